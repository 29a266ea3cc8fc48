"""Text that an accelerated model writes: the loop of `generate`, and the choice of the next token."""
