"""CompressedLinear: replaces an nn.Linear (or GPT-2's Conv1D), with the weight stored as a sum of parts."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from compress.formats import FORMATS, Format
from compress.transforms import Transform, below, make_transform, parted
from kernels.linear import linear

M = TypeVar("M", bound=nn.Module)


class CompressedLinear(nn.Module):
    """y = Σ parts.matmul(transform(x)) + bias; parts that are `exact` read x before the rounding at the end of the
    transform.

    Args:
        parts: stored weights [out, in] whose sum is W (dense codes, sparse outliers, a low-rank correction, ...).
        bias: [out] or None.
        dtype: of the activations; follows the model's `.to(dtype)`, which does not change the stored weights.
        transform: a transform of x before the product (a rotation, per-token quantisation), or None.
    """

    def __init__(
        self, parts: Sequence[Format], bias: Tensor | None, *, dtype: torch.dtype, transform: Transform | None = None
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = parts[0].shape
        self.parts = nn.ModuleList(parts)
        self.transform = transform
        self.dtype = dtype
        self.register_buffer("bias", None if bias is None else bias.detach().clone())
        self._dense: Tensor | None = None
        self._lay_out()

    def forward(self, x: Tensor) -> Tensor:
        before, rounding = parted(self.transform)
        last = None  # a transform that the product does together with the rounding
        if self._dense is None and rounding is not None and before and len(self.parts) == 1 and not self.parts[0].exact:
            *before, last = before
        for step in before:
            x = step(x)
        if self._dense is not None:
            y = linear(x if rounding is None else rounding(x), self._dense, self.bias)
            return y if rounding is None else sum((p.matmul(x) for p in self.parts if p.exact), y)
        rounds = rounding is not None
        products = [p.matmul_rounded(x, rounding, last) if rounds and not p.exact else p.matmul(x) for p in self.parts]
        y = sum(products[1:], products[0])
        return y if self.bias is None else y + self.bias

    def dequantize(self) -> Tensor:
        """W [out, in] in float32, as stored (before the transform of x)."""
        W = self.parts[0].dequantize()
        for part in self.parts[1:]:
            W = W + part.dequantize()
        return W

    @property
    def weight(self) -> Tensor:
        """W [out, in] in the activations' dtype, for x as it is before the transform, computed at each call; for code
        that reads a linear's weight. Inputs are not rounded by such code."""
        W, (before, _) = self.dequantize(), parted(self.transform)
        if before:
            T = torch.eye(self.in_features, device=W.device)  # [in, in], x' = x T
            for step in before:
                T = step(T)
            W = W @ T.t()
        return W.to(self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes stored for the weight (its bias not counted)."""
        return sum(part.nbytes for part in self.parts)

    @property
    def macs(self) -> int:
        """Multiply-adds of the product with one token."""
        return sum(part.macs(part.spec()) for part in self.parts)

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per weight, floats that are cast with the model counted as 16 bits."""
        return sum(part.bits_per_weight for part in self.parts)

    @property
    def looked_up(self) -> bool:
        """Whether this is a head whose rows the token embedding looks up, too (`compress.embedding`)."""
        return "embedding" in self.__dict__

    @contextmanager
    def dense(self) -> Iterator[None]:
        """Multiply by the dequantised weight while the block runs: faster over many batches, and the same result.

        If a part rounds its activations, nothing changes: a product with the weight alone would give another result.
        """
        rounded = [part for part in self.parts if not (part.exact and parted(self.transform)[1] is not None)]
        if rounded and all(part.activation_bits is None for part in self.parts):
            self._dense = sum(part.dequantize() for part in rounded).to(self.dtype)
        try:
            yield
        finally:
            self._dense = None

    def spec(self) -> dict[str, Any]:
        """The description, as JSON, from which this linear is made again with `state_dict`."""
        transform = None if self.transform is None else self.transform.spec()
        parts = [part.spec() for part in self.parts]
        return self.spec_of(parts, bias=self.bias is not None, looked_up=self.looked_up) | {"transform": transform}

    @classmethod
    def spec_of(cls, parts: list[dict[str, Any]], *, bias: bool, looked_up: bool = False) -> dict[str, Any]:
        """The `spec()` of a linear of these parts; `looked_up`: of a head whose rows are the token embedding's."""
        return {"parts": parts, "bias": bias, "transform": None, **({"looked_up": True} if looked_up else {})}

    @classmethod
    def from_tensors(cls, spec: dict[str, Any], tensors: dict[str, Tensor], dtype: torch.dtype) -> "CompressedLinear":
        """The linear that `spec()` and `state_dict()` described.

        Raises:
            ValueError: its format or its transform is not known, or its tensors do not fit its specification.
        """
        parts = parts_from(spec["parts"], tensors)
        transform = make_transform(spec.get("transform"), below(tensors, "transform."))
        own = {f"parts.{i}.{name}" for i, part in enumerate(parts) for name in part.state_dict()}
        if transform is not None:
            transform.check(parts[0].shape[1])
            own |= {f"transform.{name}" for name in transform.state_dict()}
        if odd := (own | ({"bias"} if spec["bias"] else set())) ^ tensors.keys():
            raise ValueError(f"`{min(odd)}` of a stored linear is missing, or not part of its description")
        if spec["bias"] and tensors["bias"].shape != parts[0].shape[:1]:
            raise ValueError(
                f"`bias` {list(tensors['bias'].shape)} of a stored linear has not its {parts[0].shape[0]} rows"
            )
        return cls(parts, tensors.get("bias"), dtype=dtype, transform=transform)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bits={self.bits_per_weight:.2f}"

    def _lay_out(self) -> None:
        device = next(self.parts[0].buffers()).device
        for part in self.parts:
            part.for_compute(self.dtype, device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "CompressedLinear":
        super()._apply(fn, recurse)
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=next(self.parts[0].buffers()).device)).dtype
        self._lay_out()
        return self


class StandIn(nn.Module):
    """Stands for another module in a model; attributes that it lacks are those of the other one, `stands_for`, which is
    not a submodule: it is not moved, counted or stored here."""

    def __init__(self, stands_for: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "stands_for", stands_for)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(object.__getattribute__(self, "stands_for"), name)


def parts_from(specs: Sequence[dict[str, Any]], tensors: dict[str, Tensor]) -> list[Format]:
    """The parts of a stored weight, from their specifications and from all of its tensors.

    Raises:
        ValueError: a format is not known, tensors do not fit their specification, or parts have different shapes.
    """
    for spec in specs:
        if spec.get("format") not in FORMATS:
            raise ValueError(
                f"the format {spec.get('format')!r} is not known to this workbench; it has {', '.join(FORMATS)}"
            )
    parts = [FORMATS[spec["format"]].from_tensors(spec, below(tensors, f"parts.{i}.")) for i, spec in enumerate(specs)]
    if len({part.shape for part in parts}) != 1:
        raise ValueError(
            f"the parts of a stored weight must have one shape; they have {[part.shape for part in parts]}"
        )
    return parts


def met_by(linear: nn.Module, x: Tensor) -> Tensor:
    """The input x [..., in] of a linear after its transform, by which its weight is multiplied."""
    transform = getattr(linear, "transform", None)
    return x if transform is None else transform(x)


def is_linear(module: nn.Module) -> bool:
    """Whether this is a linear, whose weight the methods compress."""
    if not isinstance(module, nn.Linear | Conv1D | CompressedLinear):
        return False
    own = isinstance(module, nn.Linear) and type(module).forward is not nn.Linear.forward
    return not own or _computes_as_linear(type(module), module)


_known_kinds: dict[type, bool] = {}


@torch.no_grad()
def _computes_as_linear(kind: type, module: nn.Linear) -> bool:
    """Whether a class that is derived from nn.Linear still gives x W^T, by the shape of what it gives for three tokens:
    a router or a product of groups gives something else."""
    if kind not in _known_kinds:
        weight = module.weight
        x = torch.zeros(1, 3, module.in_features, dtype=weight.dtype, device=weight.device)
        try:
            y = kind.forward(module, x)
            _known_kinds[kind] = isinstance(y, Tensor) and y.shape == (1, 3, module.out_features)
        except Exception:
            _known_kinds[kind] = False
    return _known_kinds[kind]


def compressed_linears(model: nn.Module) -> dict[str, CompressedLinear]:
    """The model's compressed linears by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, CompressedLinear)}


def parameter_count(module: nn.Module) -> int:
    """Number of parameters of a model or a module, including the weights and biases of compressed linears."""
    stored = [m for m in module.modules() if isinstance(m, CompressedLinear)]
    compressed = sum(m.in_features * m.out_features + m.out_features * m.spec()["bias"] for m in stored)
    tables = [m for m in module.modules() if hasattr(m, "num_embeddings") and not isinstance(m, nn.Embedding)]
    compressed += sum(m.num_embeddings * m.embedding_dim for m in tables if not m.tied)
    return compressed + sum(p.numel() for p in module.parameters())


def weight_of(module: nn.Module) -> Tensor:
    """W [out, in] in float32 of any linear: nn.Linear, Conv1D (which keeps it transposed) or a compressed one; for an
    nn.Embedding its rows."""
    if isinstance(module, CompressedLinear):
        return module.dequantize()
    W = module.weight.detach()
    return (W.t() if isinstance(module, Conv1D) else W).float().contiguous()


def shape_of(module: nn.Module) -> tuple[int, int]:
    """(out, in) of any linear; (rows, columns) of an embedding."""
    if isinstance(module, CompressedLinear):
        return module.out_features, module.in_features
    if hasattr(module, "num_embeddings"):
        return module.num_embeddings, module.embedding_dim
    rows, columns = module.weight.shape
    return (columns, rows) if isinstance(module, Conv1D) else (rows, columns)


def sharing_copy(model: M, *, weights: bool = True) -> M:
    """A copy of a model that shares its weights' memory until one of the two replaces, casts or moves them.

    Compressing such a copy needs memory only for changed weights, and does not change the model. Without `weights`, the
    copy's parameters lie on the meta device.
    """
    data = {id(p): p.data if weights else p.data.to("meta") for p in model.parameters()}
    memo: dict[int, Tensor] = {id(p): nn.Parameter(data[id(p)], p.requires_grad) for p in model.parameters()}
    memo |= {id(buffer): buffer for buffer in model.buffers()}
    return copy.deepcopy(model, memo)


def replace(model: nn.Module, name: str, new: nn.Module) -> None:
    """Replace the module `name` of the model by `new`. An embedding that is tied to a compressed head follows it."""
    parent, _, child = name.rpartition(".")
    old = getattr(model.get_submodule(parent), child, None)
    setattr(model.get_submodule(parent), child, new)
    embedding = getattr(old, "__dict__", {}).get("embedding")
    if embedding is not None and isinstance(new, CompressedLinear) and new is not old:
        embedding.share(new)
