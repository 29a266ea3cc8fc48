"""Attention of a decode step: what lies outside a range is never seen, the mass adds up, storage loses what it says it
loses."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from kernels import native
from kernels.kv_decode import KV, dequantize_kv, kv_decode, merge_parts, quantize_kv, quantize_kv_float8
from kernels.kv_decode.apart import kv_append_decode, kv_decode_apart
from kernels.kv_decode.cases import checks, e4m3, elements, exact
from kernels.kv_decode.layout import from_float8
from kernels.registry import recording

IMPLS = ("reference", "cpu")
needs_native = pytest.mark.skipif(native.why_not() is not None, reason=f"no C++ kernels here: {native.why_not()}")
ISAS = [isa for isa in native.ISAS if native.why_not() is None and native.runs(isa)]
if native.why_not() is None and native.kv_decode_isa(torch.bfloat16) == "amx":
    ISAS.insert(0, "amx")  # which only this kernel has by that name
STORED = [(16, 0), (8, 32), (8, 128), (4, 32), (4, 64)]
E4M3 = "e4m3"  # in the place of bits: 8 of them, as floats


def make(B=2, H_kv=2, G=3, T_q=1, S=150, D=16, dtype=torch.float32, bits=16, group=0, seed=0):
    """q, cache, lengths [B, H_kv]; the first row uses every position."""
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(B, H_kv * G, T_q, D, generator=g).to(dtype)
    k, v = (torch.randn(B, H_kv, S, D, generator=g).to(dtype) for _ in range(2))
    lengths = torch.randint(T_q, S, (B, H_kv), generator=g)
    lengths[0, 0] = S
    if bits == E4M3:
        return q, quantize_kv_float8(k, v, group), lengths
    return q, KV(k, v) if bits == 16 else quantize_kv(k, v, bits, group), lengths


def rms(y, expected):
    return ((y.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)).item()


def of_pairs(isa):
    """Does it multiply pairs of bfloat16, and take no float32?"""
    return isa == "amx" or isa.endswith("bf16")


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("bits, group", [*STORED, (E4M3, 64)])
def test_mass_adds_up_to_the_rows_of_a_head(impl, bits, group):
    q, cache, lengths = make(bits=bits, group=group, T_q=2)
    lengths[1, 1] = 0
    starts = (cache.positions - lengths) // 2
    y, mass = kv_decode(q, cache, lengths, starts=starts, return_mass=True, impl=impl)
    assert mass.shape == (2, 2, 150) and mass.dtype == torch.float32
    at = torch.arange(150)
    inside = (at >= starts[..., None]) & (at < (starts + lengths)[..., None])
    assert torch.all(mass[~inside] == 0) and torch.all(mass[inside] >= 0)
    assert torch.allclose(mass.sum(-1), 6.0 * (lengths > 0), atol=1e-4)
    assert torch.all(y[1, 3:] == 0), "a row without positions gives zeros"


@pytest.mark.parametrize("bits, group", STORED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_caches_of_different_lengths_are_read_in_one_call(bits, group, dtype):
    """Each has its own heads and ranges, and some have a tail of what is not coded yet."""
    made = [make(H_kv=heads, S=S, D=32, T_q=2, dtype=dtype, bits=bits, group=group, seed=S)
            for heads, S in ((1, 300), (2, 600), (1, 128))]  # fmt: skip
    q = torch.cat([q for q, _, _ in made], 1)
    caches, lengths = ([one[i] for one in made] for i in (1, 2))
    lengths[1][1, 0] = 0
    starts = [cache.positions - n for cache, n in zip(caches, lengths, strict=True)]
    for scale, softcap in ((0.2, None), (0.2, 3.0)):
        how = {"scale": scale, "softcap": softcap}
        apart = [kv_decode(one[0], *rest[:2], starts=rest[2], impl="reference", **how)
                 for one, rest in zip(made, zip(caches, lengths, starts, strict=True), strict=True)]  # fmt: skip
        with recording() as used:
            y = kv_decode_apart(q, caches, starts, **how)
        assert rms(y, torch.cat(apart, 1)) < (1e-5 if dtype == torch.float32 else 1e-2)
        assert len(used["kv_decode"]) == 1
    with pytest.raises(ValueError, match="a multiple of the caches' heads"):
        kv_decode_apart(q[:, :5], caches, starts, scale=1.0)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("packed", ["left", "right"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nothing_outside_a_range_is_seen(impl, packed, dtype):
    q, cache, lengths = make(dtype=dtype)
    starts = 150 - lengths if packed == "right" else torch.zeros_like(lengths)
    expected = torch.zeros(q.shape, dtype=torch.float64)
    for b in range(2):
        for h in range(2):
            a, n = starts[b, h], lengths[b, h]
            alone = KV(*(t[b : b + 1, h : h + 1, a : a + n].clone() for t in cache[:2]))
            heads = slice(3 * h, 3 * h + 3)
            expected[b, heads] = exact(q[b : b + 1, heads], alone, torch.ones(1, 1, n, dtype=torch.bool), 0.25, None)[
                0
            ][0]
            for t in cache[:2]:
                t[b, h, :a], t[b, h, a + n :] = torch.nan, torch.inf
    y = kv_decode(q, cache, lengths, starts=None if packed == "left" else starts, impl=impl)
    assert rms(y, expected) < {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (5, 1)])
def test_agrees_with_transformers_on_a_left_padded_batch(impl, heads):
    from transformers.models.llama.modeling_llama import eager_attention_forward

    H_q, H_kv = heads
    q, cache, _ = make(B=3, H_kv=H_kv, G=H_q // H_kv, S=40)
    lengths = torch.tensor([40, 7, 23])
    mask = torch.where(torch.arange(40) >= 40 - lengths[:, None], 0, torch.finfo(torch.float32).min)[:, None, None]
    module = SimpleNamespace(num_key_value_groups=H_q // H_kv, training=False)
    expected, _ = eager_attention_forward(module, q, cache.k, cache.v, mask, scaling=0.25)  # [B, T_q, H_q, D]
    per_head = lengths[:, None].expand(3, H_kv)
    y = kv_decode(q, cache, per_head, starts=40 - per_head, impl=impl)
    assert torch.allclose(y, expected.transpose(1, 2), atol=1e-5)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("bits, group", [(16, 0), (4, 32)])
def test_tokens_of_one_step_see_what_came_before_them(impl, bits, group):
    q, cache, lengths = make(T_q=3, bits=bits, group=group)
    lengths[1, 0] = 2  # the first token of three sees nothing
    together, mass = kv_decode(q, cache, lengths, return_mass=True, impl=impl)
    masses = torch.zeros_like(mass)
    for t in range(3):
        alone, part = kv_decode(q[:, :, t : t + 1], cache, (lengths - 2 + t).clamp_min(0), return_mass=True, impl=impl)
        assert torch.allclose(together[:, :, t], alone[:, :, 0], atol=1e-5)
        masses += part
    assert torch.allclose(mass, masses, atol=1e-5)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("bits, group", [*STORED[1:], (E4M3, 32), (E4M3, 64)])
def test_quantised_cache_with_a_tail_is_its_dequantised_self(impl, bits, group):
    q, cache, lengths = make(bits=bits, group=group)
    assert cache.k.shape[2] == 150 // group * group and cache.positions == 150
    k, v = dequantize_kv(cache)
    assert torch.equal(elements(cache, "k", 16).float(), k) and torch.equal(elements(cache, "v", 16).float(), v)
    lengths[1] = torch.tensor([5, 1])
    for starts in (None, 150 - lengths):  # two of the right-packed ranges lie in the tail alone
        y = kv_decode(
            q, cache, lengths.clamp_max(20) if starts is None else lengths, starts=starts, softcap=4.0, impl=impl
        )
        same = kv_decode(
            q,
            KV(k, v),
            lengths.clamp_max(20) if starts is None else lengths,
            starts=starts,
            softcap=4.0,
            impl="reference",
        )
        assert rms(y, same) < 1e-5


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_no_element_is_off_by_more_than_half_a_step(bits, group):
    g = torch.Generator().manual_seed(1)
    k = torch.randn(1, 2, 256, 8, generator=g) * torch.rand(8, generator=g) * 9 + torch.randn(8, generator=g) * 100
    v = torch.randn(1, 2, 256, 8, generator=g) - 3
    k[..., 3], v[0, 0, 5] = 2.7, 0.0  # one value only
    cache = quantize_kv(k, v, bits, group)
    back_k, back_v = dequantize_kv(cache)
    step_k = cache.params_k[..., 0].float().repeat_interleave(group, 2)
    step_v = cache.params_v[..., :1].float()
    assert torch.all((back_k - k).abs() <= step_k * 0.5 + 1e-4)
    assert torch.all((back_v - v).abs() <= step_v * 0.5 + 1e-4)
    span = k.view(1, 2, -1, group, 8).amax(3) - k.view(1, 2, -1, group, 8).amin(3)
    largest = k.abs().amax()
    assert torch.all((cache.params_k[..., 0].float() <= (span + largest / 100) / (2**bits - 1) * 1.01) | (span == 0))
    assert cache.nbytes == 2 * k.numel() * bits // 8 + 2 * 4 * 8 * (256 // group) + 2 * 4 * 256


def test_floats_of_eight_bits_are_torchs():
    codes = torch.arange(256, dtype=torch.uint8)
    finite = codes & 127 != 127
    expected = codes.view(torch.float8_e4m3fn).double()[finite]
    assert torch.equal(from_float8(codes)[finite].double(), expected) and torch.equal(e4m3(codes)[finite], expected)


@pytest.mark.parametrize("scale", [None, 1.0, 0.03])
def test_no_float_is_off_by_more_than_a_sixteenth(scale):
    k, v = torch.randn(2, 2, 150, 16) * torch.logspace(-4, 2, 150)[:, None], torch.randn(2, 2, 150, 8)
    cache = quantize_kv_float8(k, v, 32, scale=scale)
    assert cache.float8 and cache.bits == 8 and cache.positions == 150
    assert cache.params_k.shape == cache.params_v.shape == (2, 2, 4)
    for back, x, scales in zip(dequantize_kv(cache), (k, v), cache[2:4], strict=True):
        assert torch.equal(back[:, :, 128:], x[:, :, 128:])
        most = scales.repeat_interleave(32, 2)[..., None]
        x = x[:, :, :128].clamp(-448 * most, 448 * most)
        assert torch.all((back[:, :, :128] - x).abs() <= torch.maximum(x.abs() / 16, most / 1024) * (1 + 1e-6))
        if scale is None:
            largest = back[:, :, :128].unflatten(2, (4, 32)).abs().amax((3, 4))
            assert_close(largest, x.unflatten(2, (4, 32)).abs().amax((3, 4)))
        else:
            assert torch.all(scales == scale)
    nothing = quantize_kv_float8(torch.zeros(1, 1, 32, 8), torch.zeros(1, 1, 32, 8), 32)
    assert not any(x.any() for x in dequantize_kv(nothing))
    with pytest.raises(ValueError, match=r"`scale` \(=0\) must be positive"):
        quantize_kv_float8(k, v, 32, scale=0)
    with pytest.raises(ValueError, match=r"`group` \(=48\)"):
        quantize_kv_float8(k, v, 48)


def test_short_caches_stay_as_they_are():
    q, cache, lengths = make(S=20, bits=4, group=32)
    assert cache.k.shape == (2, 2, 0, 8) and cache.v.shape == (2, 2, 0, 16, 16) and cache.tail_k.shape[2] == 20
    plain = KV(cache.tail_k, cache.tail_v)
    for impl in IMPLS:
        assert torch.allclose(
            kv_decode(q, cache, lengths, impl=impl), kv_decode(q, plain, lengths, impl="reference"), atol=1e-5
        )


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("bits, group", [(16, 0), (8, 32), (4, 32), (E4M3, 32)])
def test_any_strides(impl, bits, group):
    """A cache cut out of a larger, preallocated one, and queries as a projection leaves them."""
    q, cache, lengths = make(bits=bits, group=group, S=128, dtype=torch.bfloat16)

    def cut(t):
        if t is None:
            return None
        if bits == 16:  # position by position, with all heads side by side
            larger = torch.zeros(3, 2, t.shape[2] + 4, 3, *t.shape[3:], dtype=t.dtype)
            view = larger[1, :, 2:-2, :-1].transpose(1, 2)
        else:
            view = torch.zeros(3, 2, 3, t.shape[2] + 4, *t.shape[3:], dtype=t.dtype)[1, :, :-1, 2:-2]
        return view.copy_(t)

    strided = KV(*(cut(t) for t in cache[:6]), *cache[6:])
    strided_q = q.transpose(1, 2).contiguous().transpose(1, 2)
    y = kv_decode(strided_q, strided, lengths.int(), starts=(128 - lengths).int(), impl=impl)
    assert torch.allclose(y, kv_decode(q, cache, lengths, starts=128 - lengths, impl=impl), atol=1e-2)


def test_heads_spread_over_threads_give_what_one_thread_gives():
    q, cache, lengths = make(B=3, dtype=torch.bfloat16)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = kv_decode(q, cache, lengths, impl="cpu")
        torch.set_num_threads(2)
        with torch.inference_mode():
            assert torch.equal(kv_decode(q, cache, lengths, impl="cpu"), expected)
        q.requires_grad_()
        assert torch.equal(kv_decode(q, cache, lengths, impl="cpu"), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("impl", IMPLS)
def test_empty(impl):
    q, cache, lengths = make()
    assert kv_decode(q[:0], KV(*(t[:0] for t in cache[:2])), lengths[:0], impl=impl).shape == (0, 6, 1, 16)
    y, mass = kv_decode(q, KV(*(t[:, :, :0] for t in cache[:2])), 0 * lengths, return_mass=True, impl=impl)
    assert torch.all(y == 0) and mass.shape == (2, 2, 0)


def test_auto_says_what_ran():
    with recording() as used:
        kv_decode(*make())
    assert used["kv_decode"] == {"cpu" if native.why_not() else f"cpu {native.kv_decode_isa(torch.float32)}"}
    with recording() as used:
        kv_decode(*make(bits=E4M3, group=32))
    assert used["kv_decode"] == {"cpu"}, "plain torch"


@pytest.mark.parametrize("isa", [*ISAS, None])
def test_cpu_checks_on_every_instruction_set(isa, monkeypatch):
    """None: plain torch, for machines without a compiler. Twice, and the same bits."""
    if isa is None:
        monkeypatch.setattr(native, "why_not", lambda: "not now")
    else:
        pairs = of_pairs(isa)
        monkeypatch.setattr(
            native, "kv_decode_isa", lambda dtype: "portable" if pairs and dtype == torch.float32 else isa
        )
    for check in checks(torch.device("cpu")):
        assert check.error("cpu") <= check.tolerance, check.name
        pair = [y if isinstance(y, tuple) else (y,) for y in (check.run("cpu"), check.run("cpu"))]
        assert all(torch.equal(a, b) for a, b in zip(*pair, strict=True)), check.name


@pytest.mark.in_turns
@needs_native
@pytest.mark.parametrize("bits, group", [(16, 0), (8, 32), (4, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_token_is_appended_to_every_cache_and_read(bits, group, dtype):
    """Caches of several lengths; of one without room, nothing is written into the others, either."""
    heads, room, tail, parts = 2, 8, 3, []
    for i, coded in enumerate((64, 192, 128)):
        _, cache, _ = make(1, heads, S=coded, dtype=dtype, bits=bits, group=group, seed=i)
        rows = torch.randn(2, 1, heads, room, 16, generator=torch.Generator().manual_seed(i)).to(dtype)
        starts = torch.tensor([[0, 5 + i]], dtype=torch.int32)
        if bits == 16:
            keys, values = (torch.cat([x, y], 2) for x, y in zip(cache[:2], rows, strict=True))
            parts.append(([keys, values, starts], (0, coded + tail), cache))
        else:
            parts.append(([cache.k, cache.v, starts, cache.params_k, cache.params_v, *rows], (coded, tail), cache))
    columns, counts = [list(column) for column in zip(*(own for own, _, _ in parts), strict=True)], []
    for _, of, _ in parts:
        counts += of
    q, k, v = (
        torch.randn(len(parts) * heads, n, 16, generator=torch.Generator().manual_seed(9)).to(dtype) for n in (3, 1, 1)
    )
    how = {"bits": bits, "group": group or 64, "scale": 0.25}
    written = columns[1] if bits == 16 else columns[-1]
    before = [column.clone() for column in written]
    with pytest.raises(ValueError, match="has no place for position"):
        kv_append_decode(q, k, v, columns, [*counts[:-1], 4 * room + 200], **how)
    assert all(map(torch.equal, before, written))
    y = kv_append_decode(q, k, v, columns, counts, **how)
    for i, (own, (_, more), cache) in enumerate(parts):
        of = slice(i * heads, (i + 1) * heads)
        held = [x[:, :, : more + 1] for x in (own[:2] if bits == 16 else own[-2:])]
        assert torch.equal(held[0][0, :, -1], k[of, 0]) and torch.equal(held[1][0, :, -1], v[of, 0])
        kept = KV(*held) if bits == 16 else KV(*cache[:4], *held, bits, group)
        expected = kv_decode(q[of].reshape(1, -1, 1, 16), kept, kept.positions - own[2], starts=own[2], scale=0.25)
        assert rms(y[of].reshape(expected.shape), expected) < (1e-5 if dtype == torch.float32 else 1e-2)


@needs_native
@pytest.mark.parametrize("heads", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("D", [64, 80, 256])
@pytest.mark.parametrize("bits, group", [*STORED, (2, 32), (2, 64), (2, 128)])
def test_integer_products_keep_to_their_error(bits, group, D, heads):
    """Codes times rows of 16 bits, held against the same in float32: far below what 16-bit queries are rounded by;
    items that take a part of a vector, one, or several, and ranges that end anywhere."""
    q, cache, lengths = make(G=heads, bits=bits, group=group, S=700, D=D, dtype=torch.float16)
    starts = 700 - lengths
    cache = cache._replace(
        **{name: t.half() for name in ("tail_k", "tail_v") if (t := getattr(cache, name)) is not None}
    )
    found = []
    for isa in ISAS:
        found.append(
            torch.ops.workbench.kv_decode_native(
                q * 3, *cache[:6], lengths, starts, None, bits, group, D**-0.5, 0.0, True, False, isa
            )
        )
    for y, mass, _ in found[:-1]:
        assert rms(mass, found[-1][1]) < (3e-4 if bits > 2 else 1e-3) and rms(y, found[-1][0]) < 1e-3


@pytest.mark.skipif("amx" not in ISAS, reason="no AMX here")
@pytest.mark.parametrize("heads", [1, 3, 4, 7, 11])
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("bits, group", [*STORED[1:], (8, 64), (4, 128), (2, 64), (2, 128)])
def test_tiles_sum_codes_as_vectors_do(bits, group, D, heads):
    """The same integers, so the same bits; ranges that begin and end anywhere, items of all lengths."""
    q, cache, lengths = make(G=heads, bits=bits, group=group, S=700, D=D, dtype=torch.float16)
    cache = cache._replace(tail_k=None, tail_v=None)
    held = cache.k.shape[2]
    lengths = lengths.clamp(max=held)
    arguments = (*cache[:6], lengths, held - lengths, None, bits, group, D**-0.5, 0.0, True, True)
    tiles, vectors = (torch.ops.workbench.kv_decode_native(q, *arguments, isa) for isa in ("amx", "avx512bf16"))
    assert all(torch.equal(a, b) for a, b in zip(tiles, vectors, strict=True))


@needs_native
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("D", [64, 80, 128])
def test_the_order_in_which_spans_are_read_changes_nothing(isa, D):
    """Whole spans are read as several streams, where nothing depends on which position is which: without mass."""
    q, cache, lengths = make(S=1100, D=D, dtype=torch.float16 if D == 80 else torch.bfloat16)
    lengths[0] = 1024
    listed = torch.stack([torch.randperm(1100) for _ in range(4)]).view(2, 2, 1100)
    for indices in (None, listed):
        places = (*cache[:6], lengths, None, indices, 16, 0, D**-0.5, 0.0)
        found, natural = (torch.ops.workbench.kv_decode_native(q, *places, mass, True, isa) for mass in (False, True))
        assert rms(found[0], natural[0]) < 3e-3 and rms(found[2], natural[2]) < 1e-5


@pytest.mark.in_turns
@needs_native
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("group, D", [(32, 64), (64, 16), (128, 44), (64, 256), (128, 128)])
@pytest.mark.parametrize("bits, value_bits", [(2, 2), (4, 3), (8, 3), (2, 3), (4, 2), (4, 8)])
def test_all_widths_of_keys_and_values_are_read_by_the_same_loops(isa, group, D, bits, value_bits):
    """Ranges that begin and end within groups, a tail, lists, several tokens; against the dequantised cache."""
    q, cache, lengths = make(T_q=3, S=610, D=D, bits=bits, group=group, dtype=torch.bfloat16)
    if value_bits != bits:
        generator = torch.Generator().manual_seed(5)
        k, v = torch.randn(2, *cache.k.shape[:2], cache.positions, D, generator=generator).bfloat16()
        cache = quantize_kv(k, v, bits, group, value_bits=value_bits)
    starts = (cache.positions - lengths) // 2
    listed = torch.stack([torch.randperm(610)[:333] for _ in range(4)]).view(2, 2, 333)
    for places in ((lengths, starts, None), (lengths.clamp(max=333), None, listed)):
        arguments = (*cache[:6], *places, bits, group, 0.25, 4.0, True, True, isa)
        found = torch.ops.workbench.kv_decode_native(q, *arguments)
        how = {"starts": places[1], "indices": places[2], "scale": 0.25, "softcap": 4.0}
        expected = kv_decode(q, cache, places[0], **how, return_mass=True, return_lse=True, impl="reference")
        for a, b, limit in zip(found, expected, (1e-2, 1e-3, 1e-4), strict=True):
            assert rms(a, b) < limit
    with recording() as used:
        kv_decode(q, cache, lengths)
    assert next(iter(used["kv_decode"])).startswith("cpu ")
    with pytest.raises(ValueError, match="no kernel for 2 bits" if value_bits == bits else "no kernel for values of"):
        kv_decode(q, cache, lengths, impl="triton")


@needs_native
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_lists_are_read_where_they_lie(isa, dtype):
    """Single positions and pages, in any order, over several spans, for every number of rows that loops take at a time,
    with queries that lie apart; against the reference, which gathers first."""
    if of_pairs(isa) and dtype == torch.float32:
        isa = "neon" if isa.startswith("neon") else "avx512"
    for heads, D in ((1, 64), (2, 20), (3, 64), (5, 80), (7, 128)):
        q, cache, _ = make(H_kv=2, G=heads, S=1300, D=D, dtype=dtype, seed=heads)
        apart = torch.randn(2, 2 * heads, 3, D).to(dtype)[:, :, 1:2].copy_(q)
        pages = torch.stack([torch.randperm(1300 // 16)[:40] for _ in range(4)]).view(2, 2, 40)
        paged = (pages[..., None] * 16 + torch.arange(16)).flatten(2)
        single = torch.stack([torch.randperm(1300)[:640].sort().values for _ in range(4)]).view(2, 2, 640)
        used = torch.tensor([[640, 255], [513, 1]])
        for listed in (paged, single):
            arguments = (*cache[:6], used, None, listed, 16, 0, D**-0.5, 0.0, True, True, isa)
            found = torch.ops.workbench.kv_decode_native(apart, *arguments)
            how = {"indices": listed, "return_mass": True, "return_lse": True, "impl": "reference"}
            for a, b in zip(found, kv_decode(q, cache, used, **how), strict=True):
                assert rms(a, b) < (1e-5 if dtype == torch.float32 else 5e-3)
        listed[1, 0, 512] = 1300  # in a later span than that of the first thread
        with pytest.raises(ValueError, match="`indices` hold 1300, which is none of the 1300"):
            torch.ops.workbench.kv_decode_native(apart, *arguments)


@pytest.mark.in_turns(2)
@needs_native
@pytest.mark.parametrize(
    "isa, bits, group",
    [
        pytest.param(isa, *stored, marks=[pytest.mark.slow] * (isa != ISAS[0] and stored != (4, 64)))
        for isa in ISAS
        for stored in ((16, 0), (8, 32), (4, 64))
    ],
)
def test_native_op_passes_opcheck(isa, bits, group):
    q, cache, lengths = make(bits=bits, group=group, S=70, dtype=torch.bfloat16)
    tails = [t if t is None else t.bfloat16() for t in cache[4:6]]
    indices = torch.arange(70).flip(0).expand(2, 2, 70).contiguous()
    for listed, lse in ((None, False), (indices, True)):
        arguments = (q, *cache[:4], *tails, lengths, 70 - lengths, listed, bits, group, 0.25, 0.0, True, lse, isa)
        torch.library.opcheck(torch.ops.workbench.kv_decode_native, arguments)


@needs_native
def test_native_op_says_what_it_cannot_take():
    q, cache, lengths = make()
    for isa in ("sse9", *(isa for isa in ISAS if of_pairs(isa))):
        with pytest.raises(RuntimeError, match=f"`isa` .='{isa}'. "):
            torch.ops.workbench.kv_decode_native(q, *cache[:6], lengths, None, None, 16, 0, 1.0, 0.0, False, False, isa)


def test_bad_arguments_say_what_works():
    q, cache, lengths = make()
    _, small, _ = make(bits=4, group=32)
    for message, call in {
        r"`impl` \(='cuda'\) must be": lambda: kv_decode(q, cache, lengths, impl="cuda"),
        r"`q` torch.float64": lambda: kv_decode(q.double(), cache, lengths),
        r"must have 1 to 8 tokens": lambda: kv_decode(q.expand(-1, -1, 9, -1), cache, lengths),
        r"`q`'s heads \(=5\)": lambda: kv_decode(q[:, :5], cache, lengths),
        r"`softcap` \(=-1\)": lambda: kv_decode(q, cache, lengths, softcap=-1),
        r"`lengths` must be int32 or int64 \(2, 2\)": lambda: kv_decode(q, cache, lengths.float()),
        r"`starts` must be int32 or int64 \(2, 2\)": lambda: kv_decode(q, cache, lengths, starts=lengths[0]),
        r"`indices` must be int32 or int64 \(2, 2, 'n'\)": lambda: kv_decode(q, cache, lengths, indices=lengths),
        r"`cache.k` must be torch.bfloat16": lambda: kv_decode(q.bfloat16(), cache, lengths),
        r"contiguous in its last 1": lambda: kv_decode(q, KV(*(t.mT.contiguous().mT for t in cache[:2])), lengths),
        r"`cache.v` .* must be contiguous in its last 2": lambda: kv_decode(
            q, small._replace(v=small.v.mT.contiguous().mT), lengths
        ),
        r"`cache.params_k` must be .* not None": lambda: kv_decode(q, small._replace(params_k=None), lengths),
        r"`cache.bits` \(=3\)": lambda: kv_decode(q, small._replace(bits=3), lengths),
        r"`cache.group` \(=48\)": lambda: kv_decode(q, small._replace(group=48), lengths),
        r"`cache.bits` \(=16\) goes without": lambda: kv_decode(
            q, small._replace(bits=16, k=cache.k, v=cache.v), lengths
        ),
        r"`cache.params_v` must be torch.float32": lambda: kv_decode(
            q, quantize_kv_float8(*cache[:2], 32)._replace(params_v=small.params_v), lengths
        ),
        r"`bits` \(=16\) must be 8, 4 or 2": lambda: quantize_kv(*cache[:2], 16),
        r"`group` \(=48\) must be one of 32, 64, 128": lambda: quantize_kv(*cache[:2], 4, 48),
        r"multiple of 2 channels": lambda: quantize_kv(cache.k[..., :15], cache.v[..., :15], 4),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.in_turns
@pytest.mark.parametrize("bits, group", [(16, 0), (4, 32), (E4M3, 32)])
@pytest.mark.parametrize("impl", IMPLS)
def test_registered_op_passes_opcheck(bits, group, impl):
    q, cache, lengths = make(bits=bits, group=group, S=70, dtype=torch.bfloat16)
    indices = torch.arange(70).flip(0).expand(2, 2, 70).contiguous()
    for listed, lse in ((None, False), (indices, True)):
        arguments = (q, *cache[:6], lengths, 70 - lengths, listed, cache.bits, group, 0.25, 0.0, True, lse, impl)
        torch.library.opcheck(torch.ops.workbench.kv_decode, arguments)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("bits, group", STORED)
def test_parts_merge_into_the_whole(impl, bits, group):
    """Ranges, lists and caches of other bits, attended apart: the positions of one softmax, whoever holds them."""
    q, cache, lengths = make(bits=bits, group=group, seed=3)
    lengths[1, 0] = 0
    k, v = dequantize_kv(cache)
    cut, at = lengths // 3, torch.arange(150.0)
    shuffled = torch.where((at >= cut[..., None]) & (at < lengths[..., None]), torch.rand(2, 2, 150), at - 150)
    places = torch.where(at < lengths[..., None], shuffled, at + 1).argsort(-1)  # entries cut .. lengths - 1 are mixed
    expected, whole = kv_decode(q, cache, lengths, return_lse=True, impl=impl)
    parts = [
        kv_decode(q, cache, cut, return_lse=True, impl=impl),
        kv_decode(q, KV(k, v), lengths - cut, starts=cut, indices=places, return_lse=True, impl=impl),
        kv_decode(q, cache, 0 * lengths, return_lse=True, impl=impl),
    ]
    y, lse = merge_parts(parts)
    assert rms(y, expected) < 1e-5 and torch.all(y[1, :3] == 0) and torch.all(lse[1, :3] == -torch.inf)
    assert torch.allclose(lse, whole, atol=1e-4)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_list_of_all_positions_is_the_cache(impl):
    """In whatever order; and its mass is that of its entries."""
    q, cache, lengths = make(bits=4, group=32, S=170)
    order = torch.stack([torch.randperm(170) for _ in range(4)]).view(2, 2, 170)
    full = torch.full_like(lengths, 170)
    y, mass = kv_decode(q, cache, full, return_mass=True, impl=impl)
    listed, of_entries = kv_decode(q, cache, full, indices=order, return_mass=True, impl=impl)
    assert rms(listed, y) < 1e-5
    assert torch.allclose(of_entries, mass.gather(2, order), atol=1e-5)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sequences_share_the_pages_of_one_pool(impl, dtype):
    """A table of blocks, as vLLM has it, is a list of positions in a pool that all rows of the batch see: stride 0."""
    page, table = 16, torch.tensor([[7, 2, 5, 0], [7, 2, 1, 0], [3, 0, 0, 0]])  # the first two share their first pages
    lengths, pool = torch.tensor([55, 33, 4])[:, None].expand(3, 2), torch.randn(2, 1, 2, 8 * page, 16).to(dtype)
    q = torch.randn(3, 6, 1, 16).to(dtype)
    at = (table[..., None] * page + torch.arange(page)).flatten(1)  # [B, positions]
    k, v = pool.expand(2, 3, 2, 8 * page, 16).unbind()
    y = kv_decode(q, KV(k, v), lengths, indices=at[:, None].expand(3, 2, -1), impl=impl)
    own = KV(*(x[0][:, at].transpose(0, 1).contiguous() for x in pool.unbind()))
    assert rms(y, kv_decode(q, own, lengths, impl="reference")) < (1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("bits, group", STORED)
def test_values_may_have_other_channels_than_keys(bits, group):
    """By the reference alone, as a product written out over dequantised rows says."""
    q, k, v = torch.randn(1, 4, 1, 16), torch.randn(1, 2, 70, 16), torch.randn(1, 2, 70, 24)
    cache = KV(k, v) if bits == 16 else quantize_kv(k, v, bits, group)
    with recording() as ran:
        y, lse = kv_decode(q, cache, torch.full((1, 2), 70), return_lse=True)
    dense_k, dense_v = (x.repeat_interleave(2, 1) for x in dequantize_kv(cache))
    scores = q @ dense_k.mT / 4
    assert_close(y, scores.softmax(-1) @ dense_v, rtol=1e-4, atol=1e-4)
    assert_close(lse, scores.logsumexp(-1), rtol=1e-4, atol=1e-4)
    assert ran["kv_decode"] == {"reference"}
    with pytest.raises(ValueError, match="no kernel for values of 24 channels beside keys of 16"):
        kv_decode(q, cache, torch.full((1, 2), 70), impl="cpu")


@pytest.mark.parametrize("bits, group", [(16, 0), (8, 32)])
def test_survives_the_compiler_and_export(bits, group, backend):
    q, cache, lengths = make(bits=bits, group=group)

    class Step(torch.nn.Module):
        def forward(self, q, cache, lengths):
            y, mass = kv_decode(q * 2, cache, lengths, starts=cache.positions - lengths, return_mass=True)
            return y + 1, mass

    expected = Step()(q, cache, lengths)
    exported = torch.export.export(Step(), (q, cache, lengths)).module()
    for step in (torch.compile(Step(), fullgraph=True, backend=backend), exported):
        for a, b in zip(step(q, cache, lengths), expected, strict=True):
            assert torch.allclose(a, b, atol=1e-6)


def test_assembly_unpacks_as_the_interpreter_does():
    """The interpreter cannot run the PTX, so it is read and carried out here, for every byte."""
    pytest.importorskip("triton")
    from kernels.kv_decode.spans import CENTRED_4, CENTRED_8

    codes = torch.arange(256, dtype=torch.uint8).view(-1, 4)
    words = codes.numpy().view(np.uint32)[:, 0]
    (byte,) = (np.concatenate(pair, 1) for pair in [run_ptx(CENTRED_8.value, {"$2": words}, ["$0", "$1"])])
    assert np.array_equal(byte, codes.numpy().astype(np.float16) - 128)
    found = run_ptx(CENTRED_4.value, {"$4": words}, ["$0", "$1", "$2", "$3"])
    assert np.array_equal(np.concatenate(found[:2], 1), (codes & 15).numpy().astype(np.float16) - 8)
    assert np.array_equal(np.concatenate(found[2:], 1), (codes >> 4).numpy().astype(np.float16) - 8)


def run_ptx(program, registers, outputs):
    """Values of `outputs` as pairs of float16 [n, 2], low half first, after the few instructions that this op uses."""
    n = len(next(iter(registers.values())))

    def value(name):
        return registers[name] if name in registers else np.full(n, int(name, 0), np.uint32)

    def halves(word):
        return word.view(np.float16).reshape(n, 2)

    for line in re.findall(r"([a-z][\w.]+ [^;{}]+);", program):
        opcode, _, rest = line.strip().partition(" ")
        to, *names = (part.strip() for part in rest.split(","))
        if opcode == ".reg" or not names or opcode.startswith("reg"):
            continue
        x = [value(name) for name in names]
        if opcode == "mov.b32":
            registers[to] = x[0]
        elif opcode == "prmt.b32":
            source = np.stack([x[0], x[1]], 1).view(np.uint8).reshape(n, 8)
            selector = int(names[2], 0)
            picked = [source[:, (selector >> 4 * i) & 7] for i in range(4)]
            registers[to] = np.ascontiguousarray(np.stack(picked, 1)).view(np.uint32)[:, 0]
        elif opcode == "lop3.b32":
            table, result = int(names[3], 0), np.zeros(n, np.uint32)
            for i in range(8):
                if table >> i & 1:
                    terms = [word if i >> (2 - j) & 1 else ~word for j, word in enumerate(x[:3])]
                    result |= terms[0] & terms[1] & terms[2]
            registers[to] = result
        elif opcode == "add.rn.f16x2":
            registers[to] = (halves(x[0]) + halves(x[1])).view(np.uint32)[:, 0]
        elif opcode == "fma.rn.f16x2":
            a, b, c = (halves(word).astype(np.float64) for word in x)
            registers[to] = (a * b + c).astype(np.float16).view(np.uint32)[:, 0]
        else:
            raise AssertionError(f"{opcode} is not known here")
    return [halves(np.ascontiguousarray(registers[name])) for name in outputs]
