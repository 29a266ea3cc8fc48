"""Folds a rotation of the inputs and outputs of linears into their weights, so that the block computes the same."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from compress.linear import is_linear
from compress.transforms import Rotation
from compress.walk.capture import Call, run_block
from compress.walk.folds.links import Link, gain_offset

ALIKE = 1e-3  # of a row's length: largest part beside the direction of a row that still counts as a multiple


@dataclass(frozen=True)
class StreamUse:
    """The linears of a block that read the residual stream, and those that add to it, by their names in the block.

    readers: links from a norm of the stream to all linears that read it.
    writers: linears whose outputs are added to the stream.
    """

    readers: tuple[Link, ...]
    writers: tuple[str, ...]


def stream_use(block: nn.Module, norms: Sequence[Link], call: Call, index: int, device: torch.device) -> StreamUse:
    """How a block uses the residual stream.

    Args:
        norms: the links of its norms, some of which may lie inside a mixer or an MLP.
    """
    of_stream = _norms_of_stream(block, call, index, device)
    readers = tuple(link for link in norms if link.producer in of_stream)
    return StreamUse(readers, writers(block, call, index, device))


@torch.no_grad()
def _norms_of_stream(block: nn.Module, call: Call, index: int, device: torch.device) -> set[str]:
    """Names of the modules without children, such as norms, that read the residual stream itself.

    While all linears give zeros, the stream stays the block's input, and a norm inside a mixer reads something else.
    """
    linears = {name: m for name, m in block.named_modules() if is_linear(m)}
    x, found = call.hidden.to(device), set()

    def note(name: str, given: Tensor) -> None:
        alike = given.numel() == x.numel() and given.shape[-1] == x.shape[-1]  # OPT's MLP reads [batch * T, hidden]
        if alike and torch.allclose(given.reshape(x.shape).float(), x.float(), rtol=ALIKE, atol=ALIKE):
            found.add(name)

    handles = [
        module.register_forward_pre_hook(lambda _, args, name=name: note(name, args[0]) if args else None)
        for name, module in block.named_modules()
        if name and not any(module.children()) and not is_linear(module)
    ]
    try:
        with _outputs(linears, lambda _, output: torch.zeros_like(output)):
            run_block(block, call, index, device)
    finally:
        for handle in handles:
            handle.remove()
    return found


@torch.no_grad()
def writers(block: nn.Module, call: Call, index: int, device: torch.device) -> tuple[str, ...]:
    """Names of the linears whose outputs a block adds to the residual stream, found by trials.

    While all other linears give zeros, the stream changes by the output of the tested linear, times at most a number
    for each token; behind a norm it would not.
    """
    linears = {name: m for name, m in block.named_modules() if is_linear(m)}
    generator = torch.Generator().manual_seed(0)
    x = call.hidden.to(device)
    found = []
    for name in linears:
        given: list[Tensor] = []

        def gives(asked: str, output: Tensor, name: str = name, given: list[Tensor] = given) -> Tensor:
            if asked != name:
                return torch.zeros_like(output)
            given.append(torch.randn(output.shape, generator=generator).to(output))
            return given[-1]

        with _outputs(linears, gives):
            moved = run_block(block, call, index, device).float() - x.float()
        if len(given) == 1 and given[0].numel() == moved.numel() and _parallel(moved, given[0].float()):
            found.append(name)
    return tuple(found)


def _parallel(moved: Tensor, given: Tensor) -> bool:
    """Whether each row of `moved` is a multiple of that of `given`, and not all rows are 0."""
    moved, given = moved.flatten(0, -2), given.reshape(-1, given.shape[-1])
    if moved.shape != given.shape:
        return False
    factor = (moved * given).sum(-1, keepdim=True) / given.square().sum(-1, keepdim=True)
    left = (moved - factor * given).norm() / moved.norm().clamp_min(1e-30)
    return bool(moved.norm() > 0 and left < max(ALIKE, 20 * torch.finfo(torch.bfloat16).eps))


@contextmanager
def _outputs(linears: dict[str, nn.Module], gives: Callable[[str, Tensor], Tensor]) -> Iterator[None]:
    """While the context lasts, the outputs of linears are replaced by gives(name, output), except for routers that give
    several values."""

    def replaced(name: str, output: Tensor | tuple) -> Tensor | None:
        return gives(name, output) if isinstance(output, Tensor) else None

    handles = [m.register_forward_hook(lambda _, __, y, name=name: replaced(name, y)) for name, m in linears.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def fold_stream(block: nn.Module, use: StreamUse, rotation: Rotation) -> str:
    """Make a block read and write a rotated residual stream.

    The gains of the norms go into the linears that read them: without its gain a norm commutes with the rotation.

    Returns:
        The reason why that cannot be done, with the block partly folded; "" if it was done.
    """
    for link in use.readers:
        if problem := _absorb_gain(block, link):
            return problem
        for name in link.consumers:
            turn_inputs(block.get_submodule(name), rotation)
    for name in use.writers:
        turn_outputs(block.get_submodule(name), rotation)
    return ""


def fold_heads(block: nn.Module, link: Link, rotation: Rotation) -> None:
    """Rotate the channels between a linear and the one that reads them, head by head.

    Args:
        link: from v to o; `heads_of` tests whether its channels lie head by head.
        rotation: of the channels of one head.
    """
    producer, width = block.get_submodule(link.producer), head_width(rotation)
    turn_outputs(producer, rotation, width)
    for name in link.consumers:
        turn_inputs(block.get_submodule(name), rotation, width)


def heads_of(link: Link, width: int) -> bool:
    """Whether a linear reads the channels of its producer in whole heads of this width, each in its order."""
    if len(link.channels) % width or link.width % width:
        return False
    heads = link.channels.view(-1, width)
    inside = torch.arange(width, device=heads.device)
    return bool((heads == heads[:, :1] + inside).all() and (heads[:, 0] % width == 0).all())


def head_width(rotation: Rotation) -> int:
    """The number of channels that a rotation changes."""
    return len(next(rotation.buffers()))


def turn_inputs(linear: nn.Module, rotation: Rotation, width: int = 0) -> None:
    """W <- W Q, for inputs x Q; `width`: of the parts of the input that are rotated alike, 0: one part."""
    W = _weight(linear)
    _renew(linear, "weight", rotation(W.unflatten(-1, (-1, width or W.shape[-1]))).flatten(-2))


def turn_outputs(linear: nn.Module, rotation: Rotation, width: int = 0) -> None:
    """W <- Qᵀ W and b <- Qᵀ b, for outputs y Q; `width`: of the parts of the output that are rotated alike."""
    W = _weight(linear).t()  # [in, out]
    _renew(linear, "weight", rotation(W.unflatten(-1, (-1, width or W.shape[-1]))).flatten(-2).t())
    if linear.bias is not None:
        b = linear.bias.float()
        linear.bias = nn.Parameter(
            rotation(b.unflatten(-1, (-1, width or len(b)))).flatten().to(linear.bias.dtype), requires_grad=False
        )


def _absorb_gain(block: nn.Module, link: Link) -> str:
    """Move a norm's gain, and its bias, into the linears that read it. Returns why that cannot be done, or ""."""
    norm = block.get_submodule(link.producer)
    offset = gain_offset(norm)
    gain, bias = norm.weight.float() + offset, getattr(norm, "bias", None)
    for name in link.consumers:
        linear = block.get_submodule(name)
        W = _weight(linear)
        if bias is not None and bias.any():
            if linear.bias is None:
                return f"{link.producer} adds a bias, and {name} has none that could take it up"
            moved = linear.bias.float() + W @ bias.float()
            linear.bias = nn.Parameter(moved.to(linear.bias.dtype), requires_grad=False)
        _renew(linear, "weight", W * gain)
    norm.weight = nn.Parameter(torch.full_like(norm.weight, 1 - offset), requires_grad=False)
    if bias is not None:
        norm.bias = nn.Parameter(torch.zeros_like(bias), requires_grad=False)
    return ""


def _weight(linear: nn.Module) -> Tensor:
    """W [out, in] in float32."""
    return (linear.weight.t() if isinstance(linear, Conv1D) else linear.weight).detach().float()


def _renew(linear: nn.Module, name: str, W: Tensor) -> None:
    """Give a linear another weight [out, in], in the dtype of the old one, whose memory does not change."""
    W = W.t() if isinstance(linear, Conv1D) else W
    setattr(linear, name, nn.Parameter(W.to(linear.weight.dtype).contiguous(), requires_grad=False))


def trial_of(block: nn.Module) -> nn.Module:
    """A copy of a block to fold rotations into: its weights are shared until they change."""
    memo = {id(t): t for t in (*block.parameters(), *block.buffers())}
    return copy.deepcopy(block, memo)
