"""Methods that add small parts to a stored weight, which correct its quantisation error. One method a file."""
