"""Links from norms and linears to the linears that read them, along which a scale per channel can move without changing
the model's outputs.

If a norm's, or a linear's, output channel c is divided by s[c] and the columns of the linears that read it are
multiplied by s[c], nothing changes, as long as nothing else reads it and nothing but sums over tokens and products with
other values lies between. Links are found by trying, block by block, never by names: a copy of the block runs in
float32 on noise, with the output of one producer after another replaced by other noise, so that the inputs of the
linears show which producer they come from.
"""

import copy
import inspect
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.pytorch_utils import Conv1D

from compress.linear import CompressedLinear, is_linear
from compress.walk.blocks import find_blocks
from compress.walk.capture import Call, block_calls, device_of, mapped, on_device, run_block
from compress.walk.experts import split_experts
from kernels.linear import without_tf32

TOKENS = 16
BASE = 64  # channel numbers are encoded digit by digit, as factors 1 + (digit + 1) / BASE
TOLERANCE = 1e-3  # the part of an output's change by a scale that may remain after the consumers undo it
NOISE = 2e-6  # the same relative to the output itself: the effect of float32 rounding alone


@dataclass(frozen=True, eq=False)
class Link:
    """A link along which a scale per channel may move from a producer into its consumers.

    producer: name in the model, of a norm or of a linear.
    kind: "norm" or "linear".
    consumers: the linears of the same block that read its output; nothing else reads it.
    channels: [in] long, the producer's output channel that each input channel of the consumers reads; 0, 1, 2, ...
        unless several heads of o read one head of v (grouped queries). Each channel of the producer is read.
    """

    producer: str
    kind: str
    consumers: tuple[str, ...]
    channels: Tensor

    @property
    def width(self) -> int:
        """Output channels of the producer."""
        return int(self.channels.max()) + 1

    def largest(self, values: Tensor) -> Tensor:
        """values [in] of the consumers' inputs -> [width]: for each channel of the producer, the largest value among
        the input channels that read it."""
        channels = self.channels.to(values.device)
        return values.new_zeros(self.width).scatter_reduce(0, channels, values, "amax", include_self=False)


def find_links(model: nn.Module) -> tuple[list[list[Link]], dict[str, str]]:
    """The links of each block, in the order of the computation, and for each linear without a link the reason.

    A linear belongs to one link at most, to the first producer that it can be linked with. v -> o is not searched if q,
    k and v are one weight, nor up -> down if gate and up are one weight.

    Raises:
        ValueError: the model is no chain of blocks.
    """
    found = list(links_by_block(model))
    return [links for links, _ in found], {name: why for _, reasons in found for name, why in reasons.items()}


@torch.no_grad()
def links_by_block(model: nn.Module) -> Iterator[tuple[list[Link], dict[str, str]]]:
    """`find_links` for one block after the other, for a caller that may need only the first blocks."""
    prefix, blocks = find_blocks(model)
    calls = block_calls(model, blocks, [made_up_batch(model)])
    names = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    for index, block in enumerate(blocks):
        shared = {
            name for name, m in block.named_modules() if any(names[id(p)] > 1 for p in m.parameters(recurse=False))
        }
        with on_device(block, device_of(block)), without_tf32():
            found, why = _links_of(_Trial(block, calls[0], index), shared)
        full = f"{prefix}.{index}."
        yield (
            [
                Link(full + link.producer, link.kind, tuple(full + c for c in link.consumers), link.channels)
                for link in found
            ],
            {full + name: reason for name, reason in why.items()},
        )


@torch.no_grad()
def compared_by_attention(model: nn.Module) -> set[str]:
    """Names of the linears whose outputs attention compares (q and k): the input of its softmax depends on them."""
    prefix, blocks = find_blocks(model)
    calls = block_calls(model, blocks, [made_up_batch(model)])
    names: set[str] = set()
    for index, block in enumerate(blocks):
        with on_device(block, device_of(block)), without_tf32():
            trial = _Trial(block, calls[0], index)
            first = _Compared()
            with first:
                outputs = trial.run().outputs
            for name in trial.linears.keys() & outputs.keys() if first.tensors else ():
                given = outputs[name][0]
                with _Compared() as changed:
                    trial.run(name, _noise(given.shape, given.device))
                same = len(changed.tensors) == len(first.tensors) and all(
                    a.shape == b.shape and torch.equal(a, b)
                    for a, b in zip(first.tensors, changed.tensors, strict=True)
                )
                if not same:
                    names.add(f"{prefix}.{index}.{name}")
    return names


class _Compared(TorchFunctionMode):
    """While active, keeps what attention compares: queries and keys, or their scores [batch, heads, T, T]."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            self.tensors += [*args, *kwargs.values()][:2]
        elif func in (torch.softmax, torch.nn.functional.softmax, Tensor.softmax):
            scores = args[0] if args else kwargs["input"]
            self.tensors += [scores] if scores.dim() == 4 else []
        return func(*args, **kwargs)


@torch.no_grad()
def fold(model: nn.Module, link: Link, s: Tensor) -> Tensor:
    """Divide the producer's output by s and multiply the consumers' columns by it.

    The modules get new parameters: the memory of the old ones, which a copy of the model may share, stays as it is.

    Args:
        s: [channels of the producer], positive. If the producer is a norm in 16 bits, the consumers are multiplied by
            the factors that its rounded gain was really divided by, so that rounding the gain changes no output.

    Returns:
        [in]: the factors by which the consumers' columns were multiplied, and their inputs divided.
    """
    producer = model.get_submodule(link.producer)
    s = divide_outputs(producer, s.to(producer.weight.device, torch.float32))
    columns = s[link.channels.to(s.device)]  # [in]
    for name in link.consumers:
        consumer = model.get_submodule(name)
        factor = columns[:, None] if isinstance(consumer, Conv1D) else columns
        _renew(consumer, "weight", consumer.weight.float() * factor.to(consumer.weight.device))
    return columns


def divide_outputs(module: nn.Module, s: Tensor) -> Tensor:
    """Divide the output of a linear or a norm by s [out], through its weight and its bias.

    Returns:
        [out], the factors by which its outputs were divided: for a norm, whose gain is rounded to its dtype, not
            exactly s.
    """
    if is_linear(module):
        _renew(module, "weight", module.weight.float() / (s if isinstance(module, Conv1D) else s[:, None]))
    else:
        offset = gain_offset(module)
        gain = module.weight.float() + offset
        _renew(module, "weight", gain / s - offset)
        now = module.weight.float() + offset
        s = torch.where((gain == 0) | (now == 0), s, gain / now)
    if getattr(module, "bias", None) is not None:
        _renew(module, "bias", module.bias.float() / s)
    return s


def _renew(module: nn.Module, name: str, value: Tensor) -> None:
    """Give a module another parameter, in the dtype of the one that it has."""
    setattr(module, name, nn.Parameter(value.to(getattr(module, name).dtype), requires_grad=False))


def gain_offset(norm: nn.Module) -> float | None:
    """0 if the norm multiplies by its weight, 1 if it multiplies by 1 + weight (Gemma), None if by something else;
    found by a trial."""
    trial = copy.deepcopy(norm).float().requires_grad_(False)
    if getattr(trial, "bias", None) is not None:
        trial.bias.zero_()
    x = _noise((2, len(trial.weight)), trial.weight.device)
    given = {}
    for weight in (0.0, 1.0, 3.0):
        trial.weight.fill_(weight)
        given[weight] = trial(x)
    for offset in (0.0, 1.0):
        unit = given[1.0] / (1 + offset)
        if all(torch.allclose(given[w], (w + offset) * unit, rtol=1e-4, atol=1e-6) for w in given):
            return offset
    return None


def made_up_batch(model: nn.Module) -> Tensor:
    """Varied tokens [1, 16], for a pass whose numbers do not matter."""
    return (torch.arange(TOKENS) * 7919 % model.get_input_embeddings().num_embeddings)[None]


@dataclass(frozen=True)
class _SeenModule:
    """Records of one pass: the block's output; by module, in the order of the calls, the inputs of linears and the
    outputs of norms and linears."""

    y: Tensor
    inputs: dict[str, list[Tensor]]
    outputs: dict[str, list[Tensor]]


class _Trial:
    """A float32 copy of a block, run on noise."""

    def __init__(self, block: nn.Module, call: Call, index: int) -> None:
        self.block, self.device = copy.deepcopy(block).float(), device_of(block)
        split_experts(self.block)
        self.call = Call(
            _noise(call.hidden.shape, call.hidden.device, seed=1), [mapped(call.arguments[index], _in_float32)]
        )
        self.linears = {name: m for name, m in self.block.named_modules() if is_linear(m)}
        self.norms = {name: m for name, m in self.block.named_modules() if is_norm(m)}

    def run(
        self, producer: str = "", give: Tensor | None = None, undo: Mapping[str, Tensor] | None = None
    ) -> _SeenModule:
        """One pass; the producer gives `give` instead of its output, and the inputs of the linears in `undo` are
        divided by the factors there."""
        inputs, outputs, handles = defaultdict(list), defaultdict(list), []

        def reads(name: str, args: tuple) -> tuple | None:
            inputs[name].append(args[0].clone())
            return (args[0] / undo[name], *args[1:]) if undo and name in undo else None

        def gives(name: str, output: Tensor) -> Tensor | None:
            outputs[name].append(output)
            return give if name == producer else None

        for name, module in (self.linears | self.norms).items():
            if name in self.linears:
                handles.append(module.register_forward_pre_hook(lambda _, args, name=name: reads(name, args)))
            handles.append(module.register_forward_hook(lambda _, __, output, name=name: gives(name, output)))
        try:
            y = run_block(self.block, self.call, 0, self.device)
        finally:
            for handle in handles:
                handle.remove()
        return _SeenModule(y, inputs, outputs)


def _links_of(trial: _Trial, shared: set[str]) -> tuple[list[Link], dict[str, str]]:
    """Links of one block, and why its other linears have none; names are those in the block. shared: modules with tied
    weights."""
    first = trial.run()
    reasons = {name: _unlinked(first, trial.call.hidden, name) for name in trial.linears}
    links: list[Link] = []
    linked: set[str] = set()
    for name, given in first.outputs.items():
        if len(given) > 1 or not isinstance(given[0], Tensor):
            continue
        give = _noise(given[0].shape, given[0].device)
        kind = "norm" if name in trial.norms else "linear"
        seen = trial.run(name, give)
        readers = _norm_readers(first, seen, name, give) if kind == "norm" else _linear_readers(trial, seen, name, give)
        if not readers or linked & set(readers):
            continue
        link = Link(name, kind, tuple(readers), next(iter(readers.values())))
        refused = _refused(trial, link, readers, give, seen.y, shared)
        if refused:
            reasons |= dict.fromkeys(readers, refused)
        else:
            links.append(link)
            linked |= set(readers)
    return links, {name: reason for name, reason in reasons.items() if name not in linked}


def _unlinked(first: _SeenModule, hidden: Tensor, name: str) -> str:
    """The reason why a linear has no link, unless a more exact reason is found."""
    if name not in first.inputs:
        return "no made-up token reached it, so its input could not be observed"
    if any(_rows_in(x, hidden) for x in first.inputs[name]):
        return "it reads the block's input itself, which no norm of this block gives"
    return (
        "its input is not, channel by channel, the output of a norm or of a whole linear: an activation function lies "
        "between, or the weight before it is fused (q, k and v in one, or gate and up), for which links are not "
        "searched"
    )


def _norm_readers(first: _SeenModule, seen: _SeenModule, name: str, give: Tensor) -> dict[str, Tensor]:
    """Linears that read rows of the norm's output, and the channels in their order.

    Experts that only the pass without `give` reached are judged by that pass.
    """
    channels = torch.arange(give.shape[-1], device=give.device)
    read = [linear for linear, xs in seen.inputs.items() if any(_rows_in(x, give) for x in xs)]
    others = {linear: xs for linear, xs in first.inputs.items() if linear not in seen.inputs}
    read += [linear for linear, xs in others.items() if any(_rows_in(x, first.outputs[name][0]) for x in xs)]
    return dict.fromkeys(read, channels)


def _linear_readers(trial: _Trial, seen: _SeenModule, name: str, give: Tensor) -> dict[str, Tensor]:
    """Linears each of whose input channels is proportional to one output channel of linear `name`, and the numbers of
    these channels."""
    width = give.shape[-1]
    later = list(seen.outputs)[list(seen.outputs).index(name) + 1 :]
    readers = [other for other in later if other in seen.inputs and seen.inputs[other][0].shape[-1] % width == 0]
    number = torch.arange(width, device=give.device)
    channels = dict.fromkeys(readers, 0)
    place = 1
    while readers and (place == 1 or place < width):
        moved = trial.run(name, give * (1 + (number // place % BASE + 1) / BASE))
        for reader in readers:
            digit = _digits(seen.inputs[reader], moved.inputs[reader])
            channels[reader] = None if digit is None else channels[reader] + place * digit
        readers = [reader for reader in readers if channels[reader] is not None]
        place *= BASE
    return {reader: channels[reader] for reader in readers if torch.equal(channels[reader].unique(), number)}


def _digits(before: list[Tensor], after: list[Tensor]) -> Tensor | None:
    """The digit [in] that each channel's factor encodes, or None unless every channel grew by one factor over all
    tokens."""
    if not before or [x.shape for x in before] != [x.shape for x in after]:
        return None  # an expert, reached by no token, or by other tokens
    x, moved = (torch.cat([each.reshape(-1, each.shape[-1]) for each in xs]) for xs in (before, after))  # [tokens, in]
    factor = (moved * x).sum(0) / (x * x).sum(0)
    steady = (moved - factor * x).abs().amax(0) <= TOLERANCE * x.abs().amax(0)
    told = (factor - 1) * BASE - 1
    digit = told.round()
    fits = steady & ((told - digit).abs() < 0.1) & (digit >= 0) & (digit < BASE)
    return digit.long() if fits.all() else None


def _refused(trial: _Trial, link: Link, readers: dict[str, Tensor], give: Tensor, y: Tensor, shared: set[str]) -> str:
    """Why no scale may move along this link; empty if one may. y: the block's output with `give` as the producer's."""
    consumers = link.consumers
    everyone = (link.producer, *consumers)
    if tied := [name for name in everyone if name in shared]:
        return f"the weight of {tied[0]} is shared with another module"
    modules = [trial.block.get_submodule(name) for name in everyone]
    if stored := [name for name, m in zip(everyone, modules, strict=True) if isinstance(m, CompressedLinear)]:
        return f"{stored[0]} is stored compressed already, so nothing can be folded into it"
    if link.kind == "norm" and (len(modules[0].weight) != link.width or gain_offset(modules[0]) is None):
        return f"the gain of {link.producer} ({type(modules[0]).__name__}) is neither its weight nor 1 + its weight"
    r = torch.logspace(-1, 1, link.width, base=2, device=give.device)[
        torch.randperm(link.width, generator=_generator())
    ]
    scaled = trial.run(link.producer, give * r).y
    seen = trial.run(link.producer, give * r, dict.fromkeys(consumers, r[link.channels]))
    left = (seen.y - y).norm().item()
    if not left <= max(TOLERANCE * (scaled - y).norm().item(), NOISE * y.norm().item()):
        return (
            f"something that is no linear also reads the output of {link.producer} (a residual, a router): with a "
            f"scale that these linears undo, the block's output changed by {left / y.norm().item():.1e}"
        )
    inputs = [seen.inputs.get(name, []) for name in consumers]
    alike = all(
        len(xs) == 1 and xs[0].shape == inputs[0][0].shape and torch.equal(xs[0], inputs[0][0]) for xs in inputs
    )
    if not alike or any(not torch.equal(channels, link.channels) for channels in readers.values()):
        return f"the linears behind {link.producer} do not all read the same input"
    return ""


def is_norm(module: nn.Module) -> bool:
    """Whether this may be a norm: a function of x alone, with a weight and perhaps a bias, each with one number for
    each channel, and no other parameters."""
    own = dict(module.named_parameters())
    if not own or sum(p.default is p.empty for p in inspect.signature(module.forward).parameters.values()) != 1:
        return False
    return "weight" in own and set(own) <= {"weight", "bias"} and all(p.dim() == 1 for p in own.values())


def _rows_in(x: Tensor, given: Tensor) -> bool:
    """Whether each row of x is one of the rows of `given`."""
    if not isinstance(given, Tensor) or x.shape[-1] != given.shape[-1]:
        return False
    x, given = x.reshape(-1, x.shape[-1]), given.reshape(-1, given.shape[-1])
    return bool((x[:, None] == given[None]).all(-1).any(1).all())


def _in_float32(t: Tensor) -> Tensor:
    return t.float() if t.is_floating_point() else t


def _noise(shape: tuple[int, ...], device: torch.device, seed: int = 0) -> Tensor:
    """Magnitudes between 0.5 and 1.5; signs change from row to row, so that a ReLU lets every channel through in some
    row."""
    magnitude = torch.rand(shape, generator=_generator(seed)) + 0.5
    row = torch.arange(magnitude[..., 0].numel()).view(*shape[:-1], 1)
    odd = (row + (torch.arange(shape[-1]).sin() > 0)) % 2
    return (magnitude * (1 - 2 * odd)).to(device)


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
