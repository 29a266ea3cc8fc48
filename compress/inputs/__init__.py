"""The inputs of a compression: models, texts and calibration tokens."""
