"""The weights of a model that learn: what passes read, what the optimiser moves, and what is stored in the end."""

from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compress.embedding import CompressedEmbedding
from compress.formats.base import Trainable
from compress.linear import CompressedLinear, StandIn, compressed_linears, is_linear, replace, weight_of
from compress.transforms import Rotation, parted
from compress.walk.blocks import find_blocks, is_named
from compress.walk.capture import device_of
from kernels.linear.onednn import emulates

TRAIN = ("scales", "weights", "norms")


@dataclass(frozen=True)
class Changes:
    """What training has changed: compressed linears and other parameters, by name."""

    linears: dict[str, CompressedLinear]
    parameters: dict[str, Tensor]

    def put(self, model: nn.Module) -> None:
        """Put them into the model. Other models that share the memory of its parameters keep theirs."""
        device = device_of(model)
        for name, linear in self.linears.items():
            replace(model, name, linear.to(device))
        for name, value in self.parameters.items():
            model.get_parameter(name).data = value.to(device)


class Learned:
    """All that learns in a model, while passes run through it.

    Passes read `leaves`: ordinary tensors that collect gradients. The optimiser moves other numbers, the `latent` ones,
    in relative units, from which `prepare` computes the leaves, rounded as they will be stored, and to which `collect`
    hands the leaves' gradients.
    """

    def __init__(self, views: Mapping[str, list["_View"]]) -> None:
        self.views = views

    @property
    def latent(self) -> dict[str, nn.Parameter]:
        """The numbers that the optimiser moves, by name."""
        return {
            f"{name}.{i}.{key}": number
            for name, views in self.views.items()
            for i, view in enumerate(views)
            for key, number in view.latent.items()
        }

    def prepare(self) -> None:
        """Compute the leaves from the latent numbers, and forget their gradients."""
        for view in self._every():
            view.prepare()

    def collect(self) -> None:
        """Turn the gradients of the leaves into those of the latent numbers."""
        for view in self._every():
            view.collect()

    def _every(self) -> Iterator["_View"]:
        for views in self.views.values():
            yield from views


class _View:
    """One tensor that learns: a leaf, the function that computes it, and the numbers on which the function depends."""

    def __init__(self, leaf: nn.Parameter, compute: Callable[[], Tensor], latent: Mapping[str, nn.Parameter]) -> None:
        self.leaf, self.compute, self.latent = leaf.requires_grad_(), compute, latent

    def prepare(self) -> None:
        with torch.no_grad():
            self.leaf.copy_(self.compute())
        self.leaf.grad = None

    def collect(self) -> None:
        if self.leaf.grad is not None:
            with torch.enable_grad():
                value = self.compute()
            torch.autograd.backward(value, self.leaf.grad.to(value.dtype))
            self.leaf.grad = None


class Stand(StandIn):
    """Stands for a compressed linear in passes with gradients: y = W x' + b, with W and b in floats.

    Args:
        train: which of its numbers learn, see `TRAIN`; "": none.
        original: W [out, in] before the compression, or None.
        dtype: of W in products.
    """

    def __init__(self, linear: CompressedLinear, train: str, original: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__(linear)
        self.b = None if linear.bias is None else nn.Parameter(linear.bias.to(dtype), requires_grad=False)
        _, rounding = parted(linear.transform)
        unrounded = [part.exact and rounding is not None for part in linear.parts]  # they read x before the rounding
        views = {i: _trainable(p, train) for i, p in enumerate(linear.parts) if not unrounded[i]}
        self.trained = {i: view for i, view in views.items() if view is not None}  # by the number of the part
        fixed = {i: part.dequantize() for i, part in enumerate(linear.parts) if i not in self.trained}
        if self.trained and train == "weights" and original is not None:
            first = next(iter(self.trained))
            rest = original - sum(p.dequantize() for i, p in enumerate(linear.parts) if i != first)
            self.trained[first] = linear.parts[first].trainable(rest) or self.trained[first]
        self.rest = sum((W for i, W in fixed.items() if not unrounded[i]), torch.zeros(()))
        before = [W for i, W in fixed.items() if unrounded[i]]
        self.W = nn.Parameter(self.weight().detach().to(dtype), requires_grad=False)
        self.W_before = nn.Parameter(sum(before).to(dtype), requires_grad=False) if before else None
        self.by_itself = any(part.activation_bits is not None for part in linear.parts)

    def weight(self) -> Tensor:
        """W [out, in] in float32, of all parts that read the rounded input; differentiable."""
        return sum((view.weight() for view in self.trained.values()), self.rest)

    def forward(self, x: Tensor) -> Tensor:
        before, rounding = parted(self.stands_for.transform)
        met = x
        for step in before:
            met = _Rotated.apply(met, step) if isinstance(step, Rotation) else step(met)
        rounded = met if rounding is None else met + (rounding(met) - met).detach()
        y = F.linear(rounded.to(self.W.dtype), self.W, self.b)
        if self.W_before is not None:
            y = y + F.linear(met.to(self.W.dtype), self.W_before)
        if self.by_itself:  # a part that rounds its input itself
            with torch.no_grad():
                exact = self.stands_for(x.to(self.stands_for.dtype)).to(y.dtype)
            y = y + (exact - y).detach()
        return y.to(x.dtype)

    def stored(self) -> CompressedLinear:
        """The linear with the trained weights."""
        linear = self.stands_for
        parts = [self.trained[i].stored() if i in self.trained else part for i, part in enumerate(linear.parts)]
        bias = None if linear.bias is None else self.b.detach().to(linear.bias.dtype)
        new = CompressedLinear(parts, bias, dtype=linear.dtype, transform=linear.transform)
        if linear.looked_up:
            new.__dict__["embedding"] = linear.__dict__["embedding"]
        return new


class _Rotated(torch.autograd.Function):
    """A rotation, whose kernels have no derivatives; its derivative is the inverse rotation."""

    @staticmethod
    def forward(ctx, x: Tensor, rotation: Rotation) -> Tensor:
        ctx.rotation = rotation
        return rotation(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.rotation.back(grad), None


def _trainable(part, train: str) -> Trainable | None:
    """A view of a stored part of which only the numbers of `train` have gradients; None if it has none of them."""
    if train not in ("scales", "weights"):
        return None
    view = part.trainable()
    if train == "scales" and view is not None:
        view.fix_codes()
        return view if view.factors is not None else None
    return part.trainable_floats() if view is None else view


def training_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of passes: the model's own, or float32 on a processor that only emulates 16-bit products."""
    device = device_of(model)
    return torch.float32 if device.type == "cpu" and emulates(model.dtype) else model.dtype


@contextmanager
def learning(
    model: nn.Module, train: str, skip: str, originals: Mapping[str, nn.Module] = {}
) -> Iterator[tuple[Learned, Callable[[], Changes]]]:
    """While the context lasts, passes through the model have gradients for all that learns, and nothing else changes.

    Gives what learns, and a function that gives the changes; the model gets back its modules and values at the end.

    Args:
        train: "scales" (the scales of stored weights, norms and biases; codes stay), "weights" (codes and floats,
            too), or "norms" (norms and biases alone).
        skip: patterns of names of linears that do not learn.
        originals: linears before their compression, by name, from which "weights" starts within each code's step.
    """
    dtype, stored = training_dtype(model), compressed_linears(model)
    prefix, _ = find_blocks(model)
    inside = {n: n.startswith(f"{prefix}.") and not is_named(n, skip) for n, m in model.named_modules() if is_linear(m)}
    before = {n: p.detach() for n, p in model.named_parameters() if _learns(model, n, p, train, inside)}
    stands: dict[str, Stand] = {}
    with ExitStack() as undo:
        for name, linear in stored.items():
            original = originals.get(name) if inside[name] else None
            W = None if original is None else weight_of(original)
            stands[name] = Stand(linear, train if inside[name] else "", W, dtype)
            undo.callback(replace, model, name, linear)
            replace(model, name, stands[name])
        undo.enter_context(_cast(model, dtype, before))
        views = {name: [_of_floats(model.get_parameter(name), value)] for name, value in before.items()}
        views |= {name: _views_of(stand, train if inside[name] else "") for name, stand in stands.items()}
        yield Learned(views), lambda: _changes(before, views, stands)


@contextmanager
def _cast(model: nn.Module, dtype: torch.dtype, learn: Container[str]) -> Iterator[None]:
    """While the context lasts, all parameters have this dtype and no gradients, and those that `learn` are copies.
    Buffers stay as they are, because models keep some of them in float32 whatever their own dtype is."""
    kept = {parameter: (parameter.data, parameter.requires_grad) for parameter in model.parameters()}
    tables = {m: m.dtype for m in model.modules() if isinstance(m, CompressedEmbedding)}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(dtype, copy=name in learn)
    for table in tables:
        table.dtype = dtype
    try:
        yield
    finally:
        for parameter, (data, had_gradient) in kept.items():
            parameter.data, parameter.grad = data, None
            parameter.requires_grad_(had_gradient)
        for table, own in tables.items():
            table.dtype = own


def _changes(before: Mapping[str, Tensor], views: Mapping[str, list[_View]], stands: Mapping[str, Stand]) -> Changes:
    with torch.no_grad():
        parameters = {name: views[name][0].compute().to(value.dtype).clone() for name, value in before.items()}
        return Changes({n: s.stored() for n, s in stands.items() if s.trained or views[n]}, parameters)


def _learns(model: nn.Module, name: str, parameter: nn.Parameter, train: str, inside: Mapping[str, bool]) -> bool:
    """Whether a parameter outside of compressed linears learns: norms and biases, and with "weights" linears."""
    owner = name.rpartition(".")[0]
    if parameter.dim() == 1:
        return inside.get(owner, True)
    return train == "weights" and inside.get(owner, False) and is_linear(model.get_submodule(owner))


def _views_of(stand: Stand, train: str) -> list[_View]:
    views = []
    if stand.trained:
        latent = {
            f"{i}.{key}": p
            for i, view in stand.trained.items()
            for key, p in view.named_parameters()
            if p.requires_grad
        }
        views.append(_View(stand.W, stand.weight, latent))
    if stand.b is not None and train:
        views.append(_of_floats(stand.b, stand.stands_for.bias))
    return views


def _of_floats(leaf: nn.Parameter, start: Tensor) -> _View:
    """A view of floats that are stored in the dtype of `start`; they move in units of their root mean square."""
    value = start.detach().float()
    size = value.square().mean().sqrt().clamp_min(1e-8)
    moved = nn.Parameter(torch.zeros_like(value))

    def compute() -> Tensor:
        new = value + size * moved
        return new + (new.detach().to(start.dtype) - new).detach()

    return _View(leaf, compute, {"moved": moved})
