"""The Fisher pre-pass: the mean squared gradient of the model's loss for every weight, kept on disk block by block."""

from compress.walk.fisher.gradients import fisher
from compress.walk.fisher.saved import SavedFisher

__all__ = ["SavedFisher", "fisher"]
