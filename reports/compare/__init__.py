"""Many run records as one page: the best recipe, and the certainty of the ranking."""
