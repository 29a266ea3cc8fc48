"""The loop over the blocks of a model, and what it needs: inputs, statistics, folds, finished blocks."""
