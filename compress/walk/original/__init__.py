"""The unquantised model beside the compressed one: its blocks, and what flows between them."""
