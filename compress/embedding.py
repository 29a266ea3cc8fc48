"""Token embeddings and output heads that are stored compressed: one stored weight where the model ties the two."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from compress.formats import Format
from compress.linear import CompressedLinear, parts_from, replace


class CompressedEmbedding(nn.Module):
    """x = scale * (Σ parts)[ids]: replaces an nn.Embedding.

    If the model ties its head to the embedding, both have the same parts. The head keeps them in its state, so that
    they are stored, moved and counted once, and `compress.linear.replace` gives this module the parts of every
    CompressedLinear that replaces the head.

    Args:
        parts: stored weights [vocabulary, hidden] whose sum is W.
        dtype: the dtype of its outputs; follows the model's `.to(dtype)`, which does not change the stored weights.
        tied: the parts are those of the head; `share` sets them.
        scale: the factor of rows, a float32 tensor without dimensions (Gemma's `embed_scale`), or None.
        padding_idx: as in the nn.Embedding.
    """

    def __init__(
        self,
        parts: Sequence[Format],
        *,
        dtype: torch.dtype,
        tied: bool = False,
        scale: Tensor | None = None,
        padding_idx: int | None = None,
    ) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = parts[0].shape
        self.dtype, self.tied, self.padding_idx = dtype, tied, padding_idx
        self.register_buffer("scale", scale, persistent=False)
        if tied:
            self.__dict__["parts"] = parts  # not submodules: they are the head's
        else:
            self.parts = nn.ModuleList(parts)

    def share(self, head: CompressedLinear) -> None:
        """From now on, look rows up in the parts of this head."""
        self.__dict__["parts"] = head.parts
        head.__dict__["embedding"] = self

    def forward(self, ids: Tensor) -> Tensor:
        flat = ids.reshape(-1)
        rows = self.parts[0].look_up(flat)
        for part in self.parts[1:]:
            rows = rows + part.look_up(flat)
        rows = rows.to(self.dtype).view(*ids.shape, self.embedding_dim)
        return rows if self.scale is None else rows * self.scale.to(self.dtype)

    def dequantize(self) -> Tensor:
        """W [vocabulary, hidden] in float32, as stored (before the scale)."""
        return sum(part.dequantize() for part in self.parts)

    @property
    def weight(self) -> Tensor:
        """W in the model's dtype, computed at each call; for code that reads an embedding's weight."""
        return self.dequantize().to(self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes stored for the weight, which may be in the head or in this module."""
        return sum(part.nbytes for part in self.parts)

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per weight, floats that are cast with the model counted as 16 bits."""
        return sum(part.bits_per_weight for part in self.parts)

    def spec(self) -> dict[str, Any]:
        """The description, as JSON, from which this module is made again, with `state_dict` and the replaced module."""
        return {"tied": self.tied} if self.tied else {"tied": False, "parts": [part.spec() for part in self.parts]}

    def extra_repr(self) -> str:
        where = ", tied to the head" if self.tied else ""
        return f"{self.num_embeddings}, {self.embedding_dim}, bits={self.bits_per_weight:.2f}{where}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "CompressedEmbedding":
        scale = self.scale
        super()._apply(fn, recurse)
        device = next(self.parts[0].buffers()).device
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=device)).dtype
        if scale is not None:  # computed when the model was made; a cast does not round it
            self.scale = scale.to(self.scale.device)
        return self


class Ends(NamedTuple):
    """Names of a model's token embedding and of its head (None: it has none), and whether they are one weight."""

    embedding: str
    head: str | None
    tied: bool


def find_ends(model: nn.Module) -> Ends:
    """The places of a model's token embedding and head.

    Raises:
        ValueError: the model does not name its embedding.
    """
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    names = {id(module): name for name, module in model.named_modules()}
    if id(table) not in names:
        raise ValueError(f"`model` ({type(model).__name__}) has no token embedding of its own")
    if head is None or id(head) not in names:
        return Ends(names[id(table)], None, False)
    if isinstance(table, CompressedEmbedding):
        tied = table.tied
    else:
        tied = not isinstance(head, CompressedLinear) and head.weight is table.weight
    return Ends(names[id(table)], names[id(head)], tied)


def store_end(model: nn.Module, name: str, stored: CompressedLinear) -> None:
    """Put a stored weight in the place of the embedding or the head of this name; of both if they are tied.

    transformers' `tie_weights`, which ties parameters, ignores them from then on.
    """
    ends = find_ends(model)
    table = model.get_input_embeddings()
    if name == ends.head:
        replace(model, name, stored)
    if ends.tied:
        made = embedding_of(table, stored.parts, stored.dtype, tied=True)
        made.share(stored)
    elif name == ends.embedding:  # in the layout of checkpoints, in which looking up rows is fastest
        parts = [type(part).from_tensors(part.spec(), part.state_dict()) for part in stored.parts]
        made = embedding_of(table, parts, stored.dtype, tied=False)
    else:
        made = table
    replace(model, ends.embedding, made)
    leave_untied(model)


def embedding_of(table: nn.Module, parts: Sequence[Format], dtype: torch.dtype, *, tied: bool) -> CompressedEmbedding:
    """The replacement of an embedding whose weight is stored in these parts."""
    if isinstance(table, CompressedEmbedding):
        scale = table.scale
    else:
        scale = getattr(table, "embed_scale", None)
        scale = None if scale is None else torch.as_tensor(scale, dtype=torch.float32).detach().clone()
    return CompressedEmbedding(parts, dtype=dtype, tied=tied, scale=scale, padding_idx=table.padding_idx)


def embedding_from(
    table: nn.Module, spec: dict[str, Any], tensors: dict[str, Tensor], dtype: torch.dtype, head: nn.Module | None
) -> CompressedEmbedding:
    """The embedding that `CompressedEmbedding.spec` and `state_dict` described, in the place of `table`.

    Args:
        head: the compressed head, whose parts it gets if they are tied.
    """
    if spec["tied"]:
        made = embedding_of(table, head.parts, dtype, tied=True)
        made.share(head)
        return made
    parts = parts_from(spec["parts"], tensors)
    if closed := [part.name for part in parts if not part.looks_up]:
        raise ValueError(f"an embedding cannot be stored as {closed[0]}, whose rows cannot be looked up")
    return embedding_of(table, parts, dtype, tied=False)


def problem_of_table(table: nn.Module) -> str:
    """The reason why an embedding cannot be stored compressed; "" if it can."""
    if isinstance(table, CompressedEmbedding):
        return ""
    if not isinstance(table, nn.Embedding):
        return f"it is a {type(table).__name__}, not an nn.Embedding"
    if table.max_norm is not None:
        return "it normalises its rows when they are looked up (max_norm)"
    if table.weight.is_meta:
        return ""
    device, dtype = table.weight.device, table.weight.dtype
    ids = torch.arange(min(8, table.num_embeddings), device=device)
    scale = torch.as_tensor(getattr(table, "embed_scale", 1.0)).to(device, dtype)
    with torch.no_grad():
        same = torch.equal(table(ids[None])[0], table.weight[ids] * scale)
    return "" if same else f"{type(table).__name__} does more than look up rows and scale them"


def leave_untied(model: nn.Module) -> None:
    """Remove compressed weights from the list of parameters that transformers ties."""
    for module in model.modules():
        for names in ("_tied_weights_keys", "all_tied_weights_keys"):
            if isinstance(keys := getattr(module, names, None), dict):
                kept = {k: v for k, v in keys.items() if not (_is_stored(module, k) or _is_stored(module, v))}
                if kept != keys:
                    setattr(module, names, kept)


def _is_stored(model: nn.Module, parameter: str) -> bool:
    try:
        owner = model.get_submodule(parameter.rpartition(".")[0])
    except AttributeError:  # a pattern of names
        return False
    return isinstance(owner, CompressedEmbedding | CompressedLinear)


def stored_specs(model: nn.Module) -> dict[str, dict[str, Any]]:
    """The `CompressedLinear.spec` of each compressed weight of a model; `looked_up` is true for the embedding's
    weight, or for that of the head that is tied to it."""
    linears = {name: m.spec() for name, m in model.named_modules() if isinstance(m, CompressedLinear)}
    tables = {name: m.spec() for name, m in compressed_embeddings(model).items() if not m.tied}
    own = {n: CompressedLinear.spec_of(s["parts"], bias=False, looked_up=True) for n, s in tables.items()}
    return linears | own


def compressed_embeddings(model: nn.Module) -> dict[str, CompressedEmbedding]:
    """The model's compressed embeddings by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, CompressedEmbedding)}
