"""Rotations that are trained to minimise the loss with rounded activations (SpinQuant, Liu et al., 2024,
arXiv:2405.16406)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from compress.rotations.folds import head_width
from compress.transforms import Rotation
from compress.transforms.rotation import Orthogonal
from compress.transforms.rounding import Rounding
from compress.walk.capture import device_of
from compress.walk.folds.links import Link, gain_offset
from compress.walk.parallel.ranks import progress_bar
from compress.walk.resume import BlockStore

RATE, MOMENTUM = 0.03, 0.9  # the length of a step along the gradient, as a matrix; rotations of n channels have √n
WINDOW = 512  # number of tokens of a step
KEPT = 20  # number of steps after which the state is kept on disk


@dataclass
class Rotations:
    """Rotations of a model: of its residual stream, and by consumer of the channels of each head.

    stream: None if the stream is not rotated. heads: by name of the producer (v).
    """

    stream: Rotation | None
    heads: dict[str, Rotation] = field(default_factory=dict)

    def to(self, device: torch.device) -> None:
        """Put all of them on this device."""
        for rotation in filter(None, (self.stream, *self.heads.values())):
            rotation.to(device)


class _Trained(nn.Module):
    """Q = Q₀ (I + A)⁻¹ (I - A) with A = S - Sᵀ: Cayley's map of a free matrix S to a rotation near Q₀."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.register_buffer("start", start)
        self.free = nn.Parameter(torch.zeros_like(start))
        self.Q = start

    def prepare(self) -> None:
        """Compute the matrix that passes use until the next call of this."""
        A = self.free - self.free.t()
        one = torch.eye(len(A), device=A.device)
        self.Q = self.start @ torch.linalg.solve(one + A, one - A)

    def rounded(self, x: Tensor, rounding: Rounding) -> Tensor:
        """x, rounded in the rotated basis; the gradient passes straight through the rounding (arXiv:1308.3432)."""
        turned = x.float() @ self.Q
        return ((turned + (rounding(turned) - turned).detach()) @ self.Q.t()).to(x.dtype)


def learn(
    model: nn.Module,
    batches: Sequence[Tensor],
    start: Rotations,
    readers: Sequence[Link],
    heads: Sequence[Link],
    online: Mapping[str, Rotation],
    *,
    bits: int,
    steps: int,
    store: BlockStore | None,
) -> Rotations:
    """Train the rotations of a model, whose weights do not change.

    Training lowers the model's own loss on the calibration tokens, with the inputs of linears rounded in the rotated
    basis, token by token; weights are not rounded (the paper's W16A4). Steps go along the gradient of Cayley's
    parameters, with momentum, and all have one length, which falls to 0; the paper's steps have the gradient's length.

    Args:
        readers: norms of the residual stream, and the linears that read them.
        heads: links from v to o.
        online: rotations of the inputs of other linears, which are not trained.
        bits: of the rounded activations.
        store: where the state is kept, so that a run that is killed can continue.
    """
    rounding, device = Rounding(bits), device_of(model)
    stream = None if start.stream is None else _Trained(_matrix(start.stream).to(device))
    inner = {link.producer: _Trained(_matrix(start.heads[link.producer]).to(device)) for link in heads}
    trained = nn.ModuleList([one for one in (stream, *inner.values()) if one is not None])
    optimizer = torch.optim.SGD(trained.parameters(), lr=RATE, momentum=MOMENTUM)
    first = _resume(store, trained, optimizer)
    windows = [w for batch in batches for w in batch.split(WINDOW, 1) if w.shape[1] > 1]
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0)).tolist()
    progress = progress_bar(range(first, steps), desc="rotations", unit="step")
    with _rounding(model, stream, inner, readers, heads, online, rounding):
        for step in progress:
            for group in optimizer.param_groups:
                group["lr"] = RATE * (1 - step / steps)
            ids = windows[order[step % len(windows)]].to(device)
            with torch.enable_grad():
                for one in trained:
                    one.prepare()
                loss = model(ids, labels=ids, use_cache=False).loss
                loss.backward()
            for one in trained:
                one.free.grad /= one.free.grad.norm().clamp_min(1e-30)
            optimizer.step()
            optimizer.zero_grad()
            progress.set_postfix_str(f"loss {loss.item():.3f}")
            if store and (step + 1) % KEPT == 0:
                _keep(store, trained, optimizer, step + 1)
    for one in trained:
        one.prepare()
    turned = None if stream is None else Orthogonal(_nearest(stream.Q.detach()))
    return Rotations(turned, {name: Orthogonal(_nearest(one.Q.detach())) for name, one in inner.items()})


@contextmanager
def _rounding(
    model: nn.Module,
    stream: _Trained | None,
    inner: Mapping[str, _Trained],
    readers: Sequence[Link],
    heads: Sequence[Link],
    online: Mapping[str, Rotation],
    rounding: Rounding,
) -> Iterator[None]:
    """While the context lasts, inputs of linears are rounded as they will be after the rotations are folded."""
    handles = []

    def reads(name: str, change: Callable[[Tensor], Tensor]) -> None:
        module = model.get_submodule(name)
        handles.append(module.register_forward_pre_hook(lambda _, args: (change(args[0]), *args[1:])))

    for link in readers if stream is not None else ():
        norm = model.get_submodule(link.producer)
        gain = norm.weight.float() + gain_offset(norm)
        bias = getattr(norm, "bias", None)
        handles.append(norm.register_forward_hook(_unit_rounded(stream, rounding, gain, bias)))
    for link in heads:
        one = inner[link.producer]
        for name in link.consumers:
            reads(name, lambda x, one=one: one.rounded(x.unflatten(-1, (-1, len(one.Q))), rounding).flatten(-2))
    for name, rotation in online.items():
        reads(name, lambda x, r=rotation: x + (r.back(rounding(r(x))) - x).detach())
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _unit_rounded(stream: _Trained, rounding: Rounding, gain: Tensor, bias: Tensor | None) -> Callable:
    """A forward hook of a norm: it rounds the output without gain and bias, which the next linears will hold."""
    safe = torch.where(gain == 0, 1.0, gain)

    def hook(_: nn.Module, __: tuple, y: Tensor) -> Tensor:
        unit = y.float() if bias is None else y.float() - bias.float()
        rounded = stream.rounded(unit / safe, rounding) * gain
        return (rounded if bias is None else rounded + bias.float()).to(y.dtype)

    return hook


def _matrix(rotation: Rotation) -> Tensor:
    """Q [n, n]."""
    return rotation(torch.eye(head_width(rotation), device=next(rotation.buffers()).device))


def _nearest(Q: Tensor) -> Tensor:
    """The orthogonal matrix nearest to Q, in float64: after many float32 steps Q is not exactly orthogonal."""
    U, _, V = torch.linalg.svd(Q.double())
    return U @ V


def _keep(store: BlockStore, trained: nn.ModuleList, optimizer: torch.optim.Optimizer, step: int) -> None:
    state = {f"free.{i}": one.free.detach() for i, one in enumerate(trained)}
    moments = optimizer.state_dict()["state"]
    state |= {f"momentum.{i}": moments[i]["momentum_buffer"] for i in moments}
    store.put(0, state, {"step": step})


def _resume(store: BlockStore | None, trained: nn.ModuleList, optimizer: torch.optim.Optimizer) -> int:
    """Load the state of an earlier run; returns the number of its steps."""
    found = store.get(0) if store else None
    if found is None:
        return 0
    tensors, about = found
    with torch.no_grad():
        for i, one in enumerate(trained):
            one.free.copy_(tensors[f"free.{i}"])
    state = optimizer.state_dict()
    state["state"] = {i: {"momentum_buffer": tensors[f"momentum.{i}"]} for i in range(len(trained))}
    optimizer.load_state_dict(state)
    return about["step"]
