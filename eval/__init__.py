"""Scores a model: accuracy, speed, memory, size. Import from its modules, as in `from eval.text.perplexity import
perplexity`."""
