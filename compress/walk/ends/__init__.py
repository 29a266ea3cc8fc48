"""The two ends of a model, its token embedding and its head: what they read, and how their weights are solved."""
