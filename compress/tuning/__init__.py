"""Methods that train stored weights, block by block."""
