"""Many run records as one page: which recipe is best, and how certain that is."""
