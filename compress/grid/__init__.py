"""Number formats: sets of values with scales, and how weights are rounded to them."""
