"""The best way to store every layer of a model under limits of bytes, measured time and divergence."""
