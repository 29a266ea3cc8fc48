"""The notebooks, and what executes them."""
