"""Facts about the machine and the model: hardware, versions, energy, memory and stored size."""
