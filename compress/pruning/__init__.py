"""Methods that set weights to 0 and store the other weights."""
