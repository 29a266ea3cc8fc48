"""The weights of a model that learn: what passes read, what the optimiser moves, and what is stored in the end."""

import platform
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compress.embedding import CompressedEmbedding
from compress.formats.base import Format, Trainable
from compress.formats.trained import TrainedFloats, TrainedGroups
from compress.linear import CompressedLinear, compressed_linears, is_linear, replace, weight_of
from compress.recover.trained_parts import TrainedParts
from compress.transforms import parted
from compress.walk.blocks import find_blocks, is_named
from compress.walk.capture import device_of
from kernels.linear.onednn import emulates

TRAIN = ("scales", "weights", "adapters", "norms")


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

    Args:
        views: by name of a parameter or of a compressed linear.
        products: the dtype of matrices while gradients are taken, see `product_dtype`.
        passes: that of passes, see `training_dtype`.
    """

    def __init__(self, views: Mapping[str, list["_View"]], products: torch.dtype, passes: torch.dtype) -> None:
        self.views, self.products, self.passes = views, products, passes

    @property
    def latent(self) -> dict[str, nn.Parameter]:
        """The numbers that the optimiser moves, by name."""
        return {
            f"{name}.{i}.{key}": number
            for name, views in self.views.items()
            for i, view in enumerate(views)
            for key, number in view.latent.items()
        }

    @property
    def count(self) -> int:
        """How many numbers learn."""
        return sum(view.count for view in self._every())

    def prepare(self, *, exact: bool = False) -> None:
        """Compute the leaves from the latent numbers, and forget their gradients.

        Args:
            exact: matrices have the dtype of passes; else that of products, to which every pass would cast them.
        """
        for view in self._every():
            view.prepare(self.products if view.leaf.dim() == 2 and not exact else view.dtype)

    def collect(self) -> None:
        """Turn the gradients of the leaves into those of the latent numbers."""
        for view in self._every():
            view.collect()

    def _every(self) -> Iterator["_View"]:
        for views in self.views.values():
            yield from views


class _View:
    """One tensor that learns: a leaf, the function that computes it, and the trained tensors of which it is the sum,
    apart from what does not learn."""

    def __init__(self, leaf: nn.Parameter, compute: Callable[[], Tensor], trained: Mapping[str, Trainable]) -> None:
        self.leaf, self.compute, self.trained, self.dtype = leaf.requires_grad_(), compute, trained, leaf.dtype
        self.latent = {
            f"{key}.{name}": number
            for key, view in trained.items()
            for name, number in view.named_parameters()
            if number.requires_grad
        }
        self.count = sum(view.learns for view in trained.values())

    @torch.no_grad()
    def prepare(self, dtype: torch.dtype) -> None:
        self.leaf.grad = None
        if self.leaf.dtype != dtype:
            self.leaf.data = torch.empty_like(self.leaf, dtype=dtype)
        self.leaf.copy_(self.compute())

    @torch.no_grad()
    def collect(self) -> None:
        if self.leaf.grad is not None:
            for view in self.trained.values():
                view.collect(self.leaf.grad)
            self.leaf.grad = None


class DistilledLinear(TrainedParts):
    """Stands for a compressed linear in passes with gradients: y = W x' + b, with W and b in floats.

    Args:
        train: which of its numbers learn, see `TRAIN`; "": none.
        keep_zeros: stored weights that are 0 stay 0.
        original: W [out, in] before the compression, or None.
        dtype: of W in products.
    """

    def __init__(
        self, linear: CompressedLinear, train: str, keep_zeros: bool, original: Tensor | None, dtype: torch.dtype
    ) -> None:
        rounds = parted(linear.transform)[1] is not None
        unrounded = {i: part for i, part in enumerate(linear.parts) if part.exact and rounds}
        able = {i: part for i, part in enumerate(linear.parts) if i not in unrounded or train == "adapters"}
        views = {i: _trainable(part, train) for i, part in able.items()}
        views = {i: view for i, view in views.items() if view is not None}
        if views and train == "weights" and original is not None:
            first = next(iter(views))
            rest = original - sum(part.dequantize() for i, part in enumerate(linear.parts) if i != first)
            if keep_zeros and not linear.parts[first].exact:  # what was pruned is where it stays
                rest = rest * (linear.parts[first].dequantize() != 0)
            views[first] = linear.parts[first].trainable(rest) or views[first]
            if isinstance(views[first], TrainedGroups):
                views[first].from_the_middle()
        super().__init__(linear, views, keep_zeros=keep_zeros, apart=unrounded)
        self.dtype, alone = dtype, self.views.get(0) if len(linear.parts) == 1 else None
        self.turn = alone.on_turned_inputs() if alone is not None else None
        fixed = [part.dequantize() for i, part in unrounded.items() if i not in views]
        self.rest_before = sum(fixed, torch.zeros(()))
        self.W = nn.Parameter(self.weight().detach().to(dtype), requires_grad=False)
        if not self.views:
            self.rest = torch.zeros(())  # W is all that passes read
        before = self.weight_before().detach().to(dtype) if unrounded else None
        self.W_before = None if before is None else nn.Parameter(before, requires_grad=False)
        self.b = None if linear.bias is None else nn.Parameter(linear.bias.to(dtype, copy=True), requires_grad=False)
        self.by_itself = any(part.activation_bits is not None for part in linear.parts)

    def weight_before(self) -> Tensor:
        """Parts that are multiplied by inputs before these are rounded, together [out, in]; differentiable."""
        return sum((view.weight() for i, view in self.views.items() if i in self.apart), self.rest_before)

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.dtype
        with torch.autocast(kind, enabled=False):  # what turns and rounds inputs does it in the dtype of passes
            return self._forward(x, dtype)

    def _forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The output, of this dtype, which is that of the products."""
        before, rounding = parted(self.stands_for.transform)
        turned = x if not before and rounding is None else x.to(self.dtype)
        for step in before:
            turned = step(turned)
        rounded = turned if rounding is None else turned + (rounding(turned) - turned).detach()
        read = rounded if self.turn is None else self.turn(rounded.to(self.dtype))
        y = F.linear(read.to(dtype), self.W.to(dtype))
        if self.W_before is not None:
            y = y + F.linear(turned.to(dtype), self.W_before.to(dtype))
        if self.by_itself:  # a part that rounds its input itself
            with torch.no_grad():
                exact = self.stands_for(x.to(self.stands_for.dtype)).to(y.dtype)
                exact = exact if self.b is None else exact - self.stands_for.bias.to(y.dtype)
            y = y + (exact - y).detach()
        return y if self.b is None else y + self.b.to(y.dtype)

    def stored(self) -> CompressedLinear:
        linear = super().stored()
        if self.b is not None:
            linear.bias = self.b.detach().to(linear.bias.dtype)
        return linear


def _trainable(part: Format, train: str) -> Trainable | None:
    """A view of a stored part of which only the numbers of `train` have gradients; None if it has none of them."""
    if train == "adapters":
        return part.trainable_factors()
    if train not in ("scales", "weights"):
        return None
    view = part.trainable()
    if train == "weights":
        return part.trainable_floats() or part.trainable_scales() if view is None else view
    if view is None or view.factors is None:
        return part.trainable_scales()
    view.fix_codes()
    return view


def training_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of passes: the model's own; but float32 on a processor that only emulates 16-bit products, and in place
    of float16, in which most gradients would be 0."""
    emulated = device_of(model).type == "cpu" and emulates(model.dtype)
    return torch.float32 if emulated or model.dtype == torch.float16 else model.dtype


def product_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of matrix products in passes: bfloat16 if the device has instructions for it, else that of passes."""
    kind = device_of(model).type
    if kind == "cpu":
        fast = platform.machine().lower() in ("x86_64", "amd64") and not emulates(torch.bfloat16)
    else:
        fast = kind == "cuda" and torch.cuda.get_device_capability(device_of(model)) >= (8, 0)
    return torch.bfloat16 if fast else training_dtype(model)


@contextmanager
def fast_products(model: nn.Module, passes: torch.dtype | None = None) -> Iterator[None]:
    """While the context lasts, the results of matrix products, those of the head among them, are rounded to
    `product_dtype`; sums along the residual stream and norms have the dtype of passes. A model that has another dtype
    than that, outside of `learning`, computes in its own.

    Args:
        passes: the dtype of passes inside of `learning`, where the matrices of the model may have another one.
    """
    dtype, own = product_dtype(model), passes or training_dtype(model)
    rounds = dtype != own and (passes is not None or model.dtype == own)
    # Without autocast's cache, which would give the weights of earlier updates inside an autocast of the caller's.
    with torch.autocast(device_of(model).type, dtype, enabled=rounds, cache_enabled=False):
        yield


@contextmanager
def learning(
    model: nn.Module, train: str, skip: str, *, keep_zeros: bool = False, originals: Mapping[str, nn.Module] = {}
) -> Iterator[tuple[Learned, Callable[[], Changes]]]:
    """While the context lasts, passes through the model have gradients for all that learns, and nothing else changes.

    Gives what learns, and a function that gives the changes; the model gets back its modules and values at the end.

    Args:
        train: "scales" (the scales of stored weights, and every vector of the model, which are norms, biases and the
            like; codes stay), "weights" (codes and floats, too), "adapters" (low-rank parts and vectors), or "norms"
            (vectors alone).
        skip: patterns of names of linears that do not learn.
        keep_zeros: stored weights that are 0 stay 0.
        originals: linears before their compression, by name, from which "weights" starts within each code's step,
            or in its middle (`TrainedGroups.from_the_middle`).
    """
    dtype, stored = training_dtype(model), compressed_linears(model)
    prefix, _ = find_blocks(model)
    inside = {n: n.startswith(f"{prefix}.") and not is_named(n, skip) for n, m in model.named_modules() if is_linear(m)}
    before = {n: p.detach() for n, p in model.named_parameters() if _learns(model, n, p, train, inside)}
    stands: dict[str, DistilledLinear] = {}
    with ExitStack() as undo:
        for name, linear in stored.items():
            original = originals.get(name) if inside[name] else None
            W = None if original is None else weight_of(original)
            stands[name] = DistilledLinear(linear, train if inside[name] else "", keep_zeros, W, dtype)
            undo.callback(replace, model, name, linear)
            replace(model, name, stands[name])
        undo.enter_context(_cast(model, dtype, before))
        views = {name: [_of_floats(model.get_parameter(name), value)] for name, value in before.items()}
        views |= {name: _views_of(stand, train if inside[name] else "") for name, stand in stands.items()}
        yield Learned(views, product_dtype(model), dtype), lambda: _changes(before, views, stands)


@contextmanager
def _cast(model: nn.Module, dtype: torch.dtype, learn: Container[str]) -> Iterator[None]:
    """While the context lasts, parameters of the model's dtype have this one, none has a gradient, and those that
    `learn` are copies. Buffers, and parameters that the model keeps in another dtype, stay as they are."""
    kept = {parameter: (parameter.data, parameter.requires_grad) for parameter in model.parameters()}
    tables = {m: m.dtype for m in model.modules() if isinstance(m, CompressedEmbedding)}
    own = model.dtype
    try:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(False)
            if parameter.dtype == own or name in learn:
                to = dtype if parameter.dtype == own else parameter.dtype
                parameter.data = parameter.data.to(to, copy=name in learn)
        for table in tables:
            table.dtype = dtype
        yield
    finally:
        for parameter, (data, had_gradient) in kept.items():
            parameter.data, parameter.grad = data, None
            parameter.requires_grad_(had_gradient)
        for table, former in tables.items():
            table.dtype = former


def _changes(
    before: Mapping[str, Tensor], views: Mapping[str, list[_View]], stands: Mapping[str, DistilledLinear]
) -> Changes:
    with torch.no_grad():
        parameters = {name: views[name][0].compute().to(value.dtype).clone() for name, value in before.items()}
        return Changes({n: s.stored() for n, s in stands.items() if views[n]}, parameters)


def _learns(model: nn.Module, name: str, parameter: nn.Parameter, train: str, inside: Mapping[str, bool]) -> bool:
    """Whether a parameter outside of compressed linears learns: norms and biases, and with "weights" linears."""
    owner = name.rpartition(".")[0]
    if parameter.dim() == 1:  # what is 0 has no size by which it could move
        return inside.get(owner, True) and parameter.is_floating_point() and bool(parameter.any())
    return train == "weights" and inside.get(owner, False) and is_linear(model.get_submodule(owner))


def _views_of(stand: DistilledLinear, train: str) -> list[_View]:
    views = []
    for leaf, compute, is_apart in ((stand.W, stand.weight, False), (stand.W_before, stand.weight_before, True)):
        own = {str(i): view for i, view in stand.views.items() if (i in stand.apart) == is_apart}
        if own:
            views.append(_View(leaf, compute, own))
    if stand.b is not None and train and stand.b.any():
        views.append(_of_floats(stand.b, stand.stands_for.bias))
    return views


def _of_floats(leaf: nn.Parameter, start: Tensor) -> _View:
    """A view of floats that are stored in the dtype of `start`."""
    floats = TrainedFloats(start.detach())
    return _View(leaf, floats.weight, {"floats": floats})
