"""The machine that measures: hardware, versions, energy, memory and stored size."""
