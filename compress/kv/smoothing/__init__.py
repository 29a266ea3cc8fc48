"""Scaling of keys against queries, folded into the weights that give them."""
