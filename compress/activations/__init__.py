"""Methods that round the inputs of linears (activations), or make them easier to round."""
