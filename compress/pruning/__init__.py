"""Methods that set weights to 0 and store what is left."""
