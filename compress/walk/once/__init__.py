"""One calibration for many recipes: statistics of a model as it is, kept on disk, and linears solved from them."""
