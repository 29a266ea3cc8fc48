"""A weight whose rotated columns are walks through a trellis, and their rotation."""

from compress.formats.trellis.rotation import signs_for, turn, turn_back
from compress.formats.trellis.weight import TrellisWeight

__all__ = ["TrellisWeight", "turn", "turn_back", "signs_for"]
