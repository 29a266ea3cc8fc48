"""The checks of `kv_decode`, and the shapes on which it is timed."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.capability import too_old
from kernels.interpreter import triton_takes
from kernels.kv_decode import KV, kv_decode, quantize_kv, quantize_kv_float8
from kernels.support.declarations import TOLERANCE, Check, Contest, Expected, TimedSizes

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}  # of torch's attention on GPUs, each a rival of its own


@dataclass(frozen=True)
class Case:
    """Sizes as in the README; `packed`: where each row's positions lie, "left", "right", "between", or "room" (they end
    before the tail does, and one row has no codes, as in the tensors of a CUDA graph); `listed`: number
    of positions read through `indices`, to which `packed` then refers (0: no list); `float8`: 8 bits are e4m3."""

    name: str
    dtype: torch.dtype = torch.bfloat16
    bits: int = 16
    group: int = 32
    B: int = 1
    H_kv: int = 2
    G: int = 4
    T_q: int = 1
    S: int = 150
    D: int = 64
    packed: str = "left"
    softcap: float | None = None
    mass: bool = False
    listed: int = 0
    lse: bool = False
    float8: bool = False


CASES = (
    Case("GQA", S=200, mass=True),
    Case("GQA, no mass", S=150, packed="between"),
    Case("MHA, odd D", torch.float16, G=1, S=77, D=80, packed="right"),
    Case("MQA, many rows", torch.float16, B=2, H_kv=1, G=20, S=40, D=16, packed="between"),
    Case("three tokens, capped", torch.float16, T_q=3, S=70, D=32, softcap=5.0, mass=True),
    Case("float32", torch.float32, S=90, D=32, packed="right", mass=True),
    Case("int8 g32", torch.float16, 8, S=170, packed="right", mass=True),
    Case("int8 g64, tokens", bits=8, group=64, S=150, D=32, T_q=2, G=3, packed="between"),
    Case("int8, odd D", torch.float16, 8, S=64, D=24, G=2),
    Case("int8 float32", torch.float32, 8, group=128, S=140, D=16, G=2, packed="right", mass=True),
    Case("int4 g32", torch.float16, 4, S=170, packed="right", mass=True),
    Case("int4 g64, capped", bits=4, group=64, S=130, D=32, G=9, softcap=3.0, packed="between"),
    Case("int4 g128, odd D", torch.float16, 4, group=128, S=260, D=40, G=2),
    Case("int4 float32", torch.float32, 4, group=64, S=150, D=16, T_q=2, G=2, packed="between", mass=True),
    Case("many spans", torch.float16, G=2, S=700, D=16, packed="between", mass=True),
    Case("int4, many spans", torch.float16, 4, group=64, G=2, S=700, D=16, packed="between", mass=True),
    Case("int4 g32, tokens, odd D", bits=4, S=300, D=36, G=3, T_q=2, packed="right", mass=True),
    Case("int8, many rows", bits=8, group=64, H_kv=1, G=7, S=330, D=64, T_q=3, packed="right"),
    Case("any D", torch.float32, S=60, D=13, G=3, packed="between"),
    Case("no sequence", B=0, S=10, D=16),
    Case("list", S=200, listed=90, mass=True, lse=True),
    Case("list, long", torch.float16, G=3, S=700, D=80, listed=600, packed="between", lse=True),
    Case("list, tokens, capped", torch.float32, S=90, D=32, T_q=2, listed=40, packed="right", softcap=4.0, mass=True),
    Case("list, int8 and tail", torch.float16, 8, S=170, D=24, listed=60, packed="between", mass=True, lse=True),
    Case("list, int4 and tail", bits=4, group=64, S=150, D=32, G=3, listed=100, packed="right", mass=True, lse=True),
    Case("lse", torch.float16, S=300, D=16, T_q=2, packed="between", softcap=5.0, lse=True),
    Case("e4m3 g32", torch.float16, 8, S=170, packed="right", mass=True, float8=True),
    Case("e4m3 g64, tokens, capped", bits=8, group=64, S=150, D=32, T_q=2, softcap=5.0, packed="between", float8=True),
    Case("e4m3 g128, odd D", torch.float16, 8, group=128, S=260, D=40, G=2, packed="between", float8=True),
    Case("e4m3 float32", torch.float32, 8, group=64, S=140, D=16, G=2, packed="right", mass=True, float8=True),
    Case("e4m3, many spans and rows", bits=8, group=64, H_kv=1, G=12, S=700, D=64, packed="right", float8=True),
    Case("e4m3, list and lse", torch.float16, 8, S=170, D=24, listed=60, packed="between", lse=True, float8=True),
    Case("int8 with room", torch.float16, 8, group=64, S=250, D=32, packed="room"),
    Case("int4 with room", torch.float16, 4, group=64, B=2, S=250, D=32, G=2, packed="room"),
    Case("e4m3 with room", torch.float16, 8, group=64, S=250, D=32, packed="room", float8=True),
    Case("16 bits with room", torch.float16, S=250, D=32, packed="room"),
    Case("lse, int4", torch.float32, 4, group=64, S=330, D=16, packed="between", lse=True),
)


def checks(device: torch.device) -> list[Check]:
    return [_check(case, device) for case in CASES]


def _pinned(backend: SDPBackend, q: Tensor, whole: list[KV]) -> Callable[[int], object]:
    """SDPA of 16-bit caches by this backend alone."""

    def call(i: int) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, *whole[i][:2])

    return call


def contests(device: torch.device, toy: bool, asked: TimedSizes) -> Iterator[Contest]:
    if toy:
        if triton_takes(device):
            yield _contest(device, "bf16 KV", 16, 1, 2, 4, 96, 32, 2)
            yield _contest(device, "int4 KV", 4, 1, 2, 4, 128, 32, 2, goal=2.6)
            yield _contest(device, "fp8 KV", 8, 1, 2, 4, 128, 32, 2, goal=1.8, float8=True)
    elif device.type == "cuda":
        yield _contest(device, "int4 KV", 4, 1, 8, 4, 32768, 128, 4, goal_bandwidth=0.65)
        for B, S in ((1, 131072), (8, 16384)):
            yield _contest(device, "bf16 KV", 16, B, 8, 4, S, 128, 2)
            yield _contest(device, "int8 KV", 8, B, 8, 4, S, 128, 2, goal=1.7)
            if too_old(device, float8=True) is None:
                yield _contest(device, "fp8 KV", 8, B, 8, 4, S, 128, 2, goal=1.8, float8=True)
            yield _contest(device, "int4 KV", 4, B, 8, 4, S, 128, 2, goal=2.6)
            yield _contest(device, "bf16 KV, 25% kept", 16, B, 8, 4, S, 128, 2, goal=3.5, kept=0.25)
            yield _contest(device, "int4 KV, 50% kept", 4, B, 8, 4, S, 128, 2, kept=0.5)
    else:
        yield _contest(device, "bf16 KV", 16, 1, 8, 4, 4096, 128, 3)
        yield _contest(device, "bf16 KV, 25% kept", 16, 1, 8, 4, 4096, 128, 3, kept=0.25)
        yield _contest(device, "int8 KV", 8, 1, 8, 4, 4096, 128, 3)
        yield _contest(device, "int4 KV", 4, 1, 8, 4, 4096, 128, 3)
        yield _contest(device, "bf16 KV, 50% kept", 16, 4, 8, 4, 2048, 128, 3, kept=0.5)


def _check(case: Case, device: torch.device) -> Check:
    generator = torch.Generator().manual_seed(len(case.name) + case.S)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    B, H_kv, S, D = case.B, case.H_kv, case.S, case.D
    q = (draw(B, case.T_q, H_kv * case.G, D) * 2).to(device, case.dtype).transpose(1, 2)
    k, v = draw(B, H_kv, S, D) + draw(D), draw(B, H_kv, S, D) + 0.5
    count = case.listed or S  # number of list entries or positions, to which the ranges refer
    lengths = torch.randint(count // 3, count - 3, (B, H_kv), generator=generator)
    if B:
        lengths[0, 0] = {"between": 0, "room": count % case.group - 5}.get(case.packed, count)
    lengths = lengths.clamp(max=count - 3) if case.packed == "room" else lengths
    starts = {"left": 0, "right": count - lengths, "between": torch.minimum(count - lengths, torch.tensor(7)),
              "room": count - 3 - lengths}[case.packed]  # fmt: skip
    at = torch.arange(count)
    used = (at >= (starts + torch.zeros_like(lengths))[..., None]) & (
        at < (starts + lengths)[..., None]
    )  # [B, H_kv, count]
    indices, visible = None, used
    if case.listed:
        indices = torch.rand(B, H_kv, S, generator=generator).argsort(-1)[..., :count]
        visible = torch.zeros(B, H_kv, S, dtype=torch.bool).scatter_(2, indices, used)
    cache = _poisoned(_stored(k, v, case, device), visible.to(device), device)
    starts = None if case.packed == "left" else starts.to(device)
    lengths = lengths.to(device, torch.int32 if case.packed == "right" else torch.int64)
    indices = None if indices is None else indices.to(device)

    def run(impl: str) -> Tensor | tuple[Tensor, ...]:
        more = {"return_mass": case.mass, "return_lse": case.lse, "impl": impl}
        return kv_decode(q, cache, lengths, starts=starts, indices=indices, softcap=case.softcap, **more)

    def expected() -> Tensor | tuple[Tensor, ...]:
        y, mass, lse = exact(q, cache, used.to(device), D**-0.5, case.softcap, indices)
        return (y, *([mass] if case.mass else []), *([_finite(lse)] if case.lse else []))

    def compared(impl: str) -> tuple[Tensor, ...]:
        found = run(impl)
        found = found if isinstance(found, tuple) else (found,)
        return (*found[:-1], _finite(found[-1])) if case.lse else found

    impls = ("triton", "cpu") if device.type == "cpu" else ("triton",)
    return Check("kv_decode", case.name, compared, expected, TOLERANCE[case.dtype], impls)


def _finite(lse: Tensor) -> Tensor:
    """Replace -inf, whose error would be NaN, by 0."""
    return lse.masked_fill(lse == -torch.inf, 0)


def _stored(k: Tensor, v: Tensor, case: Case, device: torch.device) -> KV:
    if case.bits != 16:
        if case.float8:  # heads and groups of different magnitudes
            loud = torch.arange(k.shape[2]).div(case.group, rounding_mode="floor").remainder(3).sub(1)[:, None] * 3.0
            cache = quantize_kv_float8(k, v * loud.exp2(), case.group)
        else:
            cache = quantize_kv(k, v, case.bits, case.group)
        tails = (t if t is None else t.to(case.dtype) for t in (cache.tail_k, cache.tail_v))
        return KV(*cache[:4], *tails, *cache[6:])
    larger = torch.full((*k.shape[:2], k.shape[2] + 9, 2 * k.shape[3]), torch.nan, dtype=case.dtype, device=device)
    slices = larger[:, :, 5 : 5 + k.shape[2]].chunk(
        2, -1
    )  # out of a larger buffer, there: a copy to the device would be dense
    for part, whole in zip(slices, (k, v), strict=True):
        part.copy_(whole)
    return KV(*slices)


def _poisoned(cache: KV, visible: Tensor, device: torch.device) -> KV:
    """The cache with NaN outside each row's range, so that any read there shows in the result."""
    cache = KV(*(t.to(device) if isinstance(t, Tensor) else t for t in cache))
    S = cache.k.shape[2]
    outside = ~visible
    if cache.bits == 16:
        for t in (cache.k, cache.v):
            t[outside] = torch.nan
        return cache
    if cache.float8:
        unread = outside[:, :, :S].unflatten(2, (-1, cache.group)).all(3)
        cache.params_k[unread], cache.params_v[unread] = torch.nan, torch.nan
    else:
        cache.params_v[outside[:, :, :S]] = torch.nan
        cache.params_k[outside[:, :, :S].unflatten(2, (-1, cache.group)).all(3)] = torch.nan
    if cache.tail_k is not None:
        cache.tail_k[outside[:, :, S:]] = torch.nan
        cache.tail_v[outside[:, :, S:]] = torch.nan
    return cache


def exact(
    q: Tensor, cache: KV, visible: Tensor, scale: float, softcap: float | None, indices: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """y, mass and lse in float64, one query head and token at a time, over the visible positions alone [B, H_kv, S + R]
    or, with `indices` [B, H_kv, n], entries of that list."""
    k, v = (elements(cache, which, q.shape[-1]) for which in "kv")
    if indices is not None:
        k, v = (torch.take_along_dim(x, indices[..., None], 2) for x in (k, v))
    B, H_q, T_q, D = q.shape
    H_kv = k.shape[1]
    y, mass = q.new_zeros(q.shape, dtype=torch.float64), torch.zeros_like(visible, dtype=torch.float64)
    lse = torch.full(q.shape[:3], -torch.inf, dtype=torch.float64, device=q.device)
    for b in range(B):
        for head in range(H_q):
            h = head * H_kv // H_q
            for t in range(T_q):
                at = visible[b, h].nonzero()[:, 0]
                at = at[: max(0, len(at) - (T_q - 1 - t))]
                if not len(at):
                    continue
                scores = k[b, h, at] @ q[b, head, t].double() * scale
                scores = scores if softcap is None else softcap * (scores / softcap).tanh()
                p, lse[b, head, t] = scores.softmax(0), scores.logsumexp(0)
                y[b, head, t] = p @ v[b, h, at]
                mass[b, h, at] += p
    return y, mass, lse


def elements(cache: KV, which: str, D: int) -> Tensor:
    """Keys ("k") or values ("v") in float64 [B, H_kv, S + R, D], each looked up by its position and channel."""
    codes, params, tail = (
        (cache.k, cache.params_k, cache.tail_k) if which == "k" else (cache.v, cache.params_v, cache.tail_v)
    )
    if cache.bits == 16:
        return codes.double()
    s, d = torch.meshgrid(torch.arange(cache.k.shape[2]), torch.arange(D), indexing="ij")  # [S, D]
    g, i = s // cache.group, s % cache.group
    if cache.float8:
        byte = codes[:, :, s, d] if which == "k" else codes[:, :, g, d, i]
        main = e4m3(byte) * params[:, :, g].double()
        return torch.cat([main, *([] if tail is None else [tail.double()])], 2)
    half = D // 2 if which == "k" else cache.group // 2
    place, nibble = (
        ((d % half, d // half) if which == "k" else (i % half, i // half)) if cache.bits == 4 else (None, None)
    )
    if which == "k":
        byte = codes[:, :, s, d if place is None else place].double()
        scale, offset = params[:, :, g, d].double().unbind(-1)
    else:
        byte = codes[:, :, g, d, i if place is None else place].double()
        scale, offset = params[:, :, s].double().unbind(-1)
    code = byte if nibble is None else torch.where(nibble.to(byte.device) == 1, byte // 16, byte % 16)
    return torch.cat([code * scale + offset, *([] if tail is None else [tail.double()])], 2)


def e4m3(byte: Tensor) -> Tensor:
    """The value of a byte of float8_e4m3fn, in float64: four bits of exponent, three of mantissa."""
    sign, exponent, mantissa = byte.double().div(128).floor(), byte.int() >> 3 & 15, (byte.int() & 7).double()
    normal = (1 + mantissa / 8) * torch.exp2(exponent.double() - 7)
    return (1 - 2 * sign) * torch.where(exponent > 0, normal, mantissa / 512)


def right(q: Tensor, cache: KV, lengths: Tensor, starts: Tensor | None = None) -> Expected:
    """The expected y in float64 for one new token, in the shape of the output: heads may be folded into tokens."""

    def expected(found: Tensor) -> Tensor:
        first = torch.zeros_like(lengths) if starts is None else starts
        at = torch.arange(cache.k.shape[2], device=q.device)
        visible = (at >= first[..., None]) & (at < (first + lengths)[..., None])  # [B, H_kv, S]
        return exact(q, cache, visible, q.shape[-1] ** -0.5, None)[0].view(found.shape)

    return expected


def _contest(
    device: torch.device,
    detail: str,
    bits: int,
    B: int,
    H_kv: int,
    G: int,
    S: int,
    D: int,
    copies: int,
    goal: float | None = None,
    goal_bandwidth: float | None = None,
    kept: float = 1.0,
    float8: bool = False,
) -> Contest:
    """Our op against attention over the whole cache in bfloat16; with `kept`, each row keeps half to one and a half
    times that share of the cache."""
    ours = "triton" if device.type == "cuda" or triton_takes(device) else "cpu"
    shares = torch.linspace(0.5, 1.5, B * H_kv) * kept if kept < 1 else torch.ones(B * H_kv)
    lengths = (shares * S).int().view(B, H_kv).to(device)
    held = S if kept == 1 else -(-int(lengths.max()) // 128) * 128
    starts = None if kept == 1 else held - lengths
    full = torch.full((B, H_kv), S, dtype=torch.int32, device=device)
    q = torch.randn(B, H_kv * G, 1, D, device=device).bfloat16()
    folded = q.view(B, H_kv, G, D)

    def cache(bits: int, S: int) -> KV:
        k, v = (torch.randn(B, H_kv, S, D, device=device, dtype=torch.bfloat16) for _ in range(2))
        group = 128 if S % 128 == 0 else 32
        if float8 and bits != 16:
            return quantize_kv_float8(k, v, group)
        return KV(k, v) if bits == 16 else quantize_kv(k, v, bits, group)

    small = [cache(bits, held) for _ in range(copies)]
    whole = small if bits == 16 and held == S else [cache(16, S) for _ in range(copies)]
    dense = f"{ours} bfloat16"
    name = dense if small is whole else f"{ours} {detail}"
    contestants: dict[str, Callable[[int], object]] = {
        name: lambda i: kv_decode(q, small[i], lengths, starts=starts, impl=ours),
        dense: lambda i: kv_decode(q, whole[i], full, impl=ours),
        "sdpa, heads folded": lambda i: F.scaled_dot_product_attention(folded, *whole[i][:2]),
    }
    rivals = () if small is whole else (dense,)  # a smaller cache is compared with the fastest run over the whole cache
    if device.type == "cpu" and ours == "cpu":
        contestants["sdpa, enable_gqa"] = lambda i: F.scaled_dot_product_attention(q, *whole[i][:2], enable_gqa=True)
    if device.type == "cuda":
        pinned = {f"sdpa {name}": _pinned(backend, folded, whole) for name, backend in BACKENDS.items()}
        contestants |= pinned
        rivals += tuple(pinned)
    read = int(lengths.sum()) / (B * H_kv * held)
    tune_key, candidates = None, []
    if ours == "triton":
        from kernels.kv_decode.triton import candidates_for, key, kind_of

        kind = "bfloat16" if bits == 16 else kind_of(small[0])
        tune_key, candidates = key(kind, D, G), candidates_for(bits, small[0].group)
    return Contest(
        op="kv_decode",
        detail=detail,
        shape=(B, H_kv * G, H_kv, S, D),
        tokens=1,
        contestants=contestants,
        copies=copies,
        ours=name,
        baseline="sdpa, heads folded",
        rivals=rivals,
        least_bytes=int(small[0].nbytes * read) + 4 * B * H_kv * G * D,
        flops=4 * G * D * int(lengths.sum()),
        pairs=G * int(lengths.sum()),
        goal=goal,
        goal_bandwidth=goal_bandwidth,
        tune_key=tune_key,
        candidates=candidates,
        expected={**dict.fromkeys(contestants, right(q, whole[0], full)), name: right(q, small[0], lengths, starts)},
    )
