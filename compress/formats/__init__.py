"""The formats of stored weights, one in each file; `FORMATS` maps the names that checkpoints use to the classes."""

from collections.abc import Iterable
from typing import Any

from compress.formats.base import Format
from compress.formats.bitmap import Bitmap
from compress.formats.bnb import BnbInt8, BnbNF4
from compress.formats.codebook import CodebookGroup
from compress.formats.columns import Columns
from compress.formats.csr import CsrWeight
from compress.formats.dense import Dense
from compress.formats.eight_bit import EightBit
from compress.formats.int_group import IntGroup
from compress.formats.low_rank import LowRankWeight
from compress.formats.sizes.row_tables import RowTables
from compress.formats.sizes.sign_stack import SignStack
from compress.formats.sparse24 import Sparse24Weight
from compress.formats.ternary import TernaryWeight
from compress.formats.trellis import TrellisWeight

FORMATS: dict[str, type[Format]] = {
    "dense": Dense, "int_group": IntGroup, "eight_bit": EightBit, "columns": Columns,
    "codebook": CodebookGroup, "bnb_int8": BnbInt8, "bnb_nf4": BnbNF4,
    "bitmap": Bitmap, "sparse24": Sparse24Weight,
    "low_rank": LowRankWeight, "csr": CsrWeight, "row_tables": RowTables, "trellis": TrellisWeight,
    "ternary": TernaryWeight, "sign_stack": SignStack,
}  # fmt: skip


def bits_of(parts: Iterable[dict[str, Any]], float_bits: int = 16, zeros: float = 0.0) -> float:
    """About the stored bits per weight of parts by their specifications; see `Format.expected_bits`."""
    return sum(FORMATS[part["format"]].expected_bits(part, float_bits, zeros) for part in parts)


__all__ = [
    "FORMATS", "Bitmap", "BnbInt8", "BnbNF4", "CodebookGroup", "Columns", "CsrWeight", "Dense", "EightBit", "Format",
    "IntGroup", "LowRankWeight", "RowTables", "SignStack", "Sparse24Weight", "TernaryWeight", "TrellisWeight",
    "bits_of",
]  # fmt: skip
