"""The checks of `Decoder`, and the shapes on which it is timed."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.decoder import LLAMA_8B, TOY, Decoder, Shape, Weights, random_weights, rounded_weights
from kernels.harness.cases import TOLERANCE, Asked, Check, Contest
from kernels.int_matmul import Packed
from kernels.int_matmul.reference import dequantize
from kernels.interpreter import triton_takes

CONTEXT = 1024  # positions in the cache before a timed step
DEEP = 5e-2  # tolerance of logits after 32 layers in bfloat16, where every tensor is rounded
ROOM = 48 << 30  # bytes: the weights in 16, 8 and 4 bits beside each other, and float64 copies of one of them
GOAL, TOKENS_PER_SECOND = 2.2, 450  # of 4 bits on an H200


def checks(device: torch.device) -> list[Check]:
    found = []
    for name, bits, dtype, batch, held in (
        ("float32", None, torch.float32, 2, 5),
        ("float32, empty cache", None, torch.float32, 1, 0),
        ("bfloat16", None, torch.bfloat16, 3, 9),
        ("8 bits", 8, torch.float16, 1, 6),
        ("4 bits", 4, torch.float16, 2, 7),
        ("4 bits, float32", 4, torch.float32, 1, 3),
    ):
        torch.manual_seed(len(name))
        weights = random_weights(TOY, dtype, device)
        weights = weights if bits is None else rounded_weights(weights, bits, 32)
        found.append(_check(name, weights, batch, held, max(TOLERANCE[dtype], 2e-5) * (1 if bits is None else 2)))
    return found


def _check(name: str, weights: Weights, batch: int, held: int, tolerance: float) -> Check:
    """A check of a step after `held` positions: its logits, and the rows of the cache that it wrote."""
    impls = ("triton",) if triton_takes(weights.embedding.device) else ()
    first = _filled(Decoder(TOY, weights, batch=batch, positions=held + 3, impl="reference"))
    token = torch.randint(TOY.vocabulary, (batch,), device=weights.embedding.device)

    def run(impl: str) -> tuple[Tensor, ...]:
        decoder = Decoder(TOY, weights, batch=batch, positions=held + 3, impl=impl)
        decoder.keys.copy_(first.keys), decoder.values.copy_(first.values)
        logits = _step(decoder, token, held)
        return logits, decoder.keys[:, :, :, held], decoder.values[:, :, :, held]

    return Check("decoder", name, run, lambda: exact(first, token, held), tolerance, impls)


def _filled(decoder: Decoder) -> Decoder:
    decoder.keys.normal_(), decoder.values.normal_()
    return decoder


def _step(decoder: Decoder, token: Tensor, held: int) -> Tensor:
    """The step after the first `held` positions, independent of earlier steps."""
    decoder.token.copy_(token)
    decoder.length.fill_(held)
    return decoder.step()


def exact(decoder: Decoder, token: Tensor, held: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, and the keys and values that the step adds [layers, batch, kv_heads, channels], in float64.

    Attention is written out, head by head; nothing is rounded between the products.
    """
    shape, weights = decoder.shape, decoder.weights
    x = weights.embedding[token].double()
    added_keys, added_values = [], []
    for layer, keys, values in zip(weights.layers, decoder.keys, decoder.values, strict=True):
        qkv = (_normed(x, layer.before, shape) @ _wide(layer.qkv).t()).unflatten(1, (-1, shape.channels))
        q, k, v = qkv.split((shape.heads, shape.kv_heads, shape.kv_heads), 1)
        q, k = _turned(q, held, shape), _turned(k, held, shape)
        added_keys.append(k), added_values.append(v)
        each = [
            _attended(q[:, h], *(torch.cat([old[:, g, :held].double(), new[:, g, None]], 1)
                                 for old, new in ((keys, k), (values, v))))
            for h in range(shape.heads) for g in (h * shape.kv_heads // shape.heads,)
        ]  # fmt: skip
        x = x + torch.cat(each, 1) @ _wide(layer.out).t()
        first, second = (_normed(x, layer.middle, shape) @ _wide(layer.gate_up).t()).chunk(2, 1)
        x = x + (F.silu(first) * second) @ _wide(layer.down).t()
    logits = _normed(x, weights.last, shape) @ _wide(weights.head).t()
    return logits, torch.stack(added_keys), torch.stack(added_values)


def _attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention [batch, channels] of one head over k and v [batch, n, channels]."""
    p = ((k @ q[:, :, None])[..., 0] * q.shape[1] ** -0.5).softmax(1)
    return (p[:, None] @ v)[:, 0]


def _normed(x: Tensor, gain: Tensor, shape: Shape) -> Tensor:
    return x / (x.square().mean(1, keepdim=True) + shape.eps).sqrt() * gain.double()


def _turned(x: Tensor, place: int, shape: Shape) -> Tensor:
    """x after the rotary embedding, by complex numbers: channel i is the real, i + channels / 2 the imaginary part."""
    half = shape.channels // 2
    angle = place * shape.theta ** -(torch.arange(half, dtype=torch.float64, device=x.device) / half)
    turned = torch.complex(x[..., :half].contiguous(), x[..., half:].contiguous()) * torch.polar(
        torch.ones_like(angle), angle
    )
    return torch.cat([turned.real, turned.imag], -1)


def _wide(w: Tensor | Packed) -> Tensor:
    return (dequantize(w) if isinstance(w, Packed) else w).double()


def contests(device: torch.device, toy: bool, asked: Asked) -> Iterator[Contest]:
    """Whole steps with weights in 4, 8 and 16 bits; `asked`, which concerns single products, is not used."""
    if toy and triton_takes(device):
        yield _contest(device, TOY, 6, "toy", 32)
    elif device.type == "cuda" and not toy and torch.cuda.mem_get_info(device)[0] > ROOM:
        yield _contest(device, LLAMA_8B, CONTEXT, "Llama 8B", 128)


def _contest(device: torch.device, shape: Shape, held: int, name: str, group_size: int) -> Contest:
    dense = random_weights(shape, torch.bfloat16, device)
    weights = {"int4": rounded_weights(dense, 4, group_size), "int8": rounded_weights(dense, 8, group_size)}
    weights["bfloat16"] = dense
    decoders = {
        kind: _filled(Decoder(shape, w, batch=1, positions=held + 64, impl="triton")) for kind, w in weights.items()
    }
    token = torch.zeros(1, dtype=torch.int64, device=device)

    def step(kind: str) -> Callable[[int], Tensor]:
        return lambda _: _step(decoders[kind], token, held)

    def right(kind: str, _: object) -> Tensor:
        return exact(decoders[kind], token, held)[0]

    cache = 4 * shape.layers * shape.kv_heads * shape.channels * held  # bytes of keys and values
    products = shape.hidden * shape.vocabulary + sum(w.shape[0] * w.shape[1] for layer in dense.layers
                                                     for w in vars(layer).values() if w.dim() == 2)  # fmt: skip
    return Contest(
        op="decoder",
        detail=f"{name}, W4 g{group_size}, head in 8 bits",
        shape=(shape.layers, shape.hidden, shape.inner, held),
        tokens=1,
        contestants={kind: step(kind) for kind in weights},
        copies=1,
        ours="int4",
        baseline="bfloat16",
        least_bytes=weights["int4"].read + cache,
        flops=2 * products,
        goal=GOAL if shape is LLAMA_8B else None,
        goal_us=1e6 / TOKENS_PER_SECOND if shape is LLAMA_8B else None,
        expected={kind: partial(right, kind) for kind in weights},
        tolerance=dict.fromkeys(weights, DEEP),
    )
