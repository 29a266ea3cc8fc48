"""Methods that add parts to a stored weight: what quantisation left over, in few bytes. One method a file."""
