"""What the layers of a cache give to steps of decoding that append tokens to them."""
