"""What a compression starts from: models, texts and calibration tokens."""
