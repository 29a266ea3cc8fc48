"""The base class of methods that store each weight matrix by itself; the walk does the rest."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from compress.embedding import compressed_embeddings
from compress.formats import Format
from compress.formats.masked import holds_floats
from compress.linear import compressed_linears
from compress.method import Method, knob
from compress.transforms import Transform
from compress.walk.blocks import check_experts, check_skip, targets
from compress.walk.capture import Call
from compress.walk.context import Context
from compress.walk.ends.solve import check_ends, solve_ends
from compress.walk.once.calibrated import solve_from
from compress.walk.statistics import LayerStatistics
from compress.walk.walk import walk, with_errors
from eval.record.compression import LayerRecord


@dataclass(frozen=True, kw_only=True)
class LayerwiseMethod(Method):
    """A method that turns each weight matrix, by itself, into stored parts."""

    skip: str = knob("", "comma-separated name patterns (* and ?) of linears to leave as they are")
    where: str = knob(
        "blocks",
        "what is compressed: the linears inside the blocks (blocks), the token embedding and the output head, which "
        "are one weight where the model ties them (embedding), or both (all)",
        choices=("blocks", "embedding", "all"),
    )
    sequential: bool = knob(
        True,
        "inside a block, each linear is solved on the outputs of the compressed linears before it, in one pass over "
        "the block; False: each is solved on the outputs of the original linears, in two passes that need less memory",
    )

    reads_originals: ClassVar[bool] = True
    statistics: ClassVar[tuple[str, ...]] = ()  # names in compress.walk.statistics.STATISTICS
    # Whether the parts that `solve` returns are added to the stored parts. `solve` is then given the original weight
    # minus the stored parts, and takes no linear without stored parts; `stores` lists the added parts.
    adds: ClassVar[bool] = False
    # Whether the errors of some rows of a weight tell those of the others, so that a search may try a sample of rows.
    alike_rows: ClassVar[bool] = False

    def apply(self, model: nn.Module, batches: Sequence[Tensor], context: Context) -> list[LayerRecord]:
        records: list[LayerRecord] = []
        passed: list[list[Call]] = []
        if self.where != "embedding" and context.saved is not None:
            records += solve_from(model, self, context)
        elif self.where != "embedding":
            records += walk(model, self, batches, context, reached=passed if self.where == "all" else None)
        if self.where != "blocks":
            records += solve_ends(model, self, batches, passed, context)
        return records

    @property
    def places(self) -> frozenset[str]:
        return frozenset({"blocks", "embedding"} if self.where == "all" else {self.where})

    def collects(self) -> tuple[str, ...]:
        return with_errors(self.statistics)

    def solve(self, W: Tensor, statistics: LayerStatistics) -> list[Format]:
        """Parts that stand for W.

        Args:
            W: [out, in] float32, on the compute device; for a method that `adds`, the weight minus the stored parts.
            statistics: statistics of this linear's inputs; `statistics.note(...)` adds to the record.
        """
        raise NotImplementedError

    def rounding(self, statistics: LayerStatistics) -> Transform | None:
        """The transform to apply to the linear's input from now on, after its earlier transforms; None: no other."""
        return None

    def peer(self, W: Tensor, statistics: LayerStatistics) -> list[Format] | None:
        """Round-to-nearest on this method's own grid, to compare with; None if there is no such thing."""
        return None

    def check(self, model: nn.Module) -> None:
        check_skip(model, self.skip, self.name)
        if self.where != "embedding":
            check_experts(model, self.skip, self.name)
        shapes = targets(model, self.skip, self.where)
        if not shapes:
            raise ValueError(f"`skip` (={self.skip!r}) of {self.name} leaves no linear of this model to compress")
        if self.where != "blocks":
            check_ends(model, self)
        for name, shape in shapes.items():
            self.check_layer(name, shape)
        stored = {**compressed_linears(model), **compressed_embeddings(model)}
        for name, linear in stored.items():
            if name in shapes and not self.takes(linear.spec()["parts"]):
                stored = " + ".join(part["format"] for part in linear.spec()["parts"])
                earlier = getattr(model, "made_by", {}).get("compressed_before", {}).get("model", {}).get("name")
                raise ValueError(
                    f"`model` holds {name} compressed already ({stored}), and {self} cannot take what is stored: start "
                    f"from the model before that compression{f' ({earlier})' if earlier else ''}, or leave the linear "
                    f"out with `skip` of {self.name}"
                )

    def takes(self, parts: list[dict[str, Any]]) -> bool:
        """Whether the method can go on from a weight that a model holds compressed when the recipe starts.

        Args:
            parts: as `Format.spec()` describes each; here: only floats can be compressed further.
        """
        return all(map(holds_floats, parts))

    def check_layer(self, name: str, shape: tuple[int, int]) -> None:
        """Raise ValueError, before any work, if a weight [out, in] cannot be stored as the knobs ask."""
