"""What the cases of several ops share: products beside the same products with dense weights."""
