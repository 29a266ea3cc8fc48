"""What formats of other libraries share: schemes, codes in words, configurations, and the reading of such folders."""
