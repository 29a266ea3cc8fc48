"""The loop over the blocks of a model, and its parts: inputs, statistics, folds, finished blocks."""
