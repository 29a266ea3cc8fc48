"""A weight whose rotated columns are walks through a trellis, and the rotation."""

from compress.formats.trellis.rotation import rotate, rotate_back, signs_for
from compress.formats.trellis.weight import TrellisWeight

__all__ = ["TrellisWeight", "rotate", "rotate_back", "signs_for"]
