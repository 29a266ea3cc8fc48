"""How much to take from each layer."""
