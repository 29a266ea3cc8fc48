"""The uncompressed model beside the compressed one: its blocks, and the activations between them."""
