"""How a budget of bytes or zeros is shared out among layers."""
