"""The division of a budget of bytes or zeros among layers."""
