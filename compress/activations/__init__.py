"""Methods that round what flows between the weights, or make it easier to round."""
