"""Benchmark tasks of lm-eval, compared with the baseline question by question."""
