"""Stores weights with zeros in the fewest bytes, and keeps the zeros when a stored weight is stored again."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from compress.formats.base import Format
from compress.formats.bitmap import Bitmap
from compress.formats.dense import Dense
from compress.formats.int_group import IntGroup
from compress.formats.sparse24 import Sparse24Weight


def masked(plain: Format, keep: Tensor, *, two_of_four: bool = False) -> Format:
    """A weight that is 0 where `keep` [out, in] is false, in the fewest bytes: unchanged, if few entries are 0, or if
    its format is neither floats nor integers.

    Args:
        two_of_four: 2 of every 4 neighbours in a row are kept, and the weight is stored in this pattern.
    """
    if two_of_four:
        return Sparse24Weight.from_plain(plain, keep)
    if not isinstance(plain, Dense | IntGroup):
        return plain
    bits = plain.bits if isinstance(plain, IntGroup) else 16
    gone = 1 - keep.count_nonzero().item() / keep.numel()
    if bits * gone > 1:
        return Bitmap.from_plain(plain, keep)
    return Dense(plain.weight, pruned=gone > 0) if isinstance(plain, Dense) else plain


def masked_spec(plain: dict[str, Any], gone: float, *, two_of_four: bool = False) -> dict[str, Any]:
    """The `spec()` of the result of `masked` for a weight that `plain` describes, with a share `gone` of zeros."""
    if two_of_four:
        return Sparse24Weight.spec_of(plain)
    packs = plain["format"] in (Dense.name, IntGroup.name)
    if packs and plain.get("bits", 16) * gone > 1:
        return Bitmap.spec_of(plain)
    return {**plain, "pruned": True} if plain["format"] == Dense.name and gone > 0 else plain


def masked_like_spec(before: list[dict[str, Any]], parts: list[dict[str, Any]], gone: float) -> list[dict[str, Any]]:
    """The `spec()` of the parts that `masked_like` gives, with a share `gone` of zeros."""
    if len(parts) != 1 or parts[0]["format"] not in (Dense.name, IntGroup.name):
        return parts
    return [masked_spec(parts[0], gone, two_of_four=before[0]["format"] == Sparse24Weight.name)]


def holds_floats(part: dict[str, Any]) -> bool:
    """Whether a part that `Format.spec()` describes stores weights as floats, with or without zeros, and no codes."""
    if part["format"] == Sparse24Weight.name:
        return part["values"]["format"] == Dense.name
    return part["format"] == Dense.name or part["format"] == Bitmap.name and part["bits"] is None


def kept_of(parts: Sequence[Format]) -> Tensor | None:
    """Mask [out, in] of the weights that pruning left in a stored weight; None if it was not pruned."""
    if len(parts) != 1:
        return None
    if isinstance(parts[0], Bitmap | Sparse24Weight):
        return parts[0].keep()
    if isinstance(parts[0], Dense) and parts[0].pruned:  # too few zeros for a mask to save bytes
        return parts[0].weight != 0
    return None


def masked_like(before: Sequence[Format], parts: list[Format], keep: Tensor) -> list[Format]:
    """The parts that a method stored for a pruned weight, with the zeros of `keep` [out, in], packed as before.

    Raises:
        ValueError: the parts are not 0 there, and their format cannot store zeros there.
    """
    if len(parts) == 1 and isinstance(parts[0], Dense | IntGroup):
        plain = Dense(parts[0].weight * keep) if isinstance(parts[0], Dense) else parts[0]
        return [masked(plain, keep, two_of_four=isinstance(before[0], Sparse24Weight))]
    W = sum(part.dequantize() for part in parts)
    if (W[~keep] != 0).any():
        stored = " + ".join(part.name for part in parts)
        raise ValueError(
            f"weights that an earlier method set to 0 are not 0 after storing ({stored}); `statistics.keep` tells a "
            "method which weights must stay 0"
        )
    return parts
