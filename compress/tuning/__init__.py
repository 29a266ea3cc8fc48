"""Methods that train what was stored, block by block."""
