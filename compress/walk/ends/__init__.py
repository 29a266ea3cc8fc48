"""The token embedding and the head of a model: the statistics of their inputs, and how their weights are solved."""
