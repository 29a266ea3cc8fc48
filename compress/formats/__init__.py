"""How a weight is stored. One format a file; `FORMATS` maps the names that checkpoints use to the classes."""

from compress.formats.base import Format
from compress.formats.dense import Dense
from compress.formats.int_group import IntGroup

FORMATS: dict[str, type[Format]] = {"dense": Dense, "int_group": IntGroup}

__all__ = ["FORMATS", "Dense", "Format", "IntGroup"]
