"""Commands that learn from a model and texts, and write a file for methods: `python -m compress.commands.NAME`."""
