"""Methods that store weights in fewer bits."""
