"""The notebooks, and the code that executes them."""
