"""A native step of decoding against the same program in plain torch."""

import copy
import dataclasses
import os
import subprocess
import sys

import pytest
import torch

from kernels import native
from kernels.int_matmul import pack, to_panels
from kernels.lut_matmul import NF4, pack_codebook
from kernels.lut_matmul import to_panels as codebook_panels
from kernels.sparse_matmul import skips_zeros
from kernels.sparse_matmul.cases import sparse_rows
from kernels.step import Attention, DecodeStep, InputChange, Norm, Products, Program, Weight
from kernels.step.cache_view import CacheView
from kernels.step.program import CacheAttention, Choice, Experts, Mixture
from kernels.step.reference import decode_step
from kernels.trellis_matmul import UNIT, Trellis, length_for
from kernels.w8a8_matmul import W8
from kernels.w8a8_matmul.layout import integer_dots
from kernels.w8a8_matmul.panels import to_panels as int8_panels

pytestmark = pytest.mark.skipif(native.why_not() is not None, reason="no C++ kernels here")


def signs(n: int) -> torch.Tensor:
    return torch.randint(2, (n,), generator=torch.Generator().manual_seed(n)) * 2.0 - 1  # the same for the same input


def weight(kind: str, out: int, columns: int, dtype: torch.dtype, bias: bool = False) -> Weight:
    kind, _, change = kind.partition(" ")
    if change:
        block = columns // 2 if change == "half" else columns
        order = torch.randperm(columns, generator=torch.Generator().manual_seed(columns)).int()
        how = {
            "coded": InputChange(bits=8, group_size=columns),
            "coded static": InputChange(bits=8, group_size=columns, step=0.03),
            "both": InputChange(signs(columns), block, bits=8, group_size=8),
            "ordered": InputChange(order=order),
            "gathered": InputChange(order=order, bits=4, group_size=8, wide=columns // 8 - 1),
            "all": InputChange(signs(columns), block, bits=4, group_size=8, order=order, wide=columns // 8 - 1),
        }
        changed = how.get(change) or InputChange(signs(columns), block)
        return dataclasses.replace(weight(kind, out, columns, dtype, bias), change=changed)
    W, scale = torch.randn(out, columns) / columns**0.5, torch.rand(out, columns // 8) + 0.5
    b = torch.randn(out) if bias else None
    if kind == "rows":
        return Weight(W.to(dtype), b)
    if kind == "kept":
        return Weight(sparse_rows(W.to(dtype), torch.rand(out, columns) < 0.5), b)
    if kind == "nf4":
        codes = torch.randint(16, (out, columns))
        return Weight(codebook_panels(pack_codebook(codes, NF4, scale.to(dtype) / columns**0.5, group_size=8)), b)
    if kind in ("int8", "int8static"):
        w = W8(
            "panels",
            int8_panels(torch.randint(-127, 128, (out, columns), dtype=torch.int8)),
            scale[:, 0] / 900,
            (out, columns),
        )
        return Weight(w, b, x_scale=torch.tensor(0.03) if kind == "int8static" else None)
    if kind.startswith("walks"):
        bits, length = int(kind[-1]), length_for(out)
        codes = torch.randint(256, (-(-out // length), columns, length * bits // 8), dtype=torch.uint8)
        walks = Trellis(codes, scale[:, 0].contiguous() / UNIT / columns**0.5, bits, 12, (out, columns))
        return Weight(walks, b, InputChange(signs(columns), columns), torch.rand(columns) + 0.5)
    bits = {"nibbles": 4, "bytes": 8, "rowwise": 8}.get(kind) or int(kind.removeprefix("planes"))
    group_size = columns if kind == "rowwise" else 16 if kind.startswith("planes") else 8
    zero = torch.randint(1 << bits, (out, columns // group_size)) if bias else None
    codes = torch.randint(1 << bits, (out, columns))
    scale = scale[:, : columns // group_size] * 3 / (1 << bits) / columns**0.5
    return Weight(to_panels(pack(codes, scale.to(dtype), zero, bits=bits, group_size=group_size)), b)


def decoder(kinds: dict[str, str], dtype: torch.dtype, tokens: int = 1, **settings) -> Program:
    """Two blocks of odd sizes: 48 hidden channels, 6 heads on 2, an MLP of 80, 101 words."""
    hidden, heads, kv_heads, channels, mlp, words = 48, 6, 2, settings.get("channels", 12), 80, 101
    hidden, mlp, words = settings.get("sizes", (hidden, mlp, words))
    norm = lambda n: Norm(torch.rand(n) + 0.5, 1e-5)  # noqa: E731
    made = lambda name, out, columns: weight(kinds.get(name, "rows"), out, columns, dtype, settings.get("bias", False))  # noqa: E731
    instructions, positions = [], 700
    angles = torch.arange(positions)[:, None] * torch.rand(1, 8)
    for block in range(2):
        cache = torch.randn(2, settings.get("sequences", tokens), kv_heads, positions, channels).to(dtype)
        instructions += [
            Products("residual", "qkv", tuple(made("qkv", n * channels, hidden) for n in (heads, kv_heads, kv_heads)),
                     before=None if settings.get("behind") else norm(hidden), added="down" if block else None, after=norm(hidden) if block and settings.get("after") else None),
            Attention("qkv", heads, kv_heads, cache[0], cache[1], torch.tensor(settings.get("position", 0)),
                      angles.cos(), angles.sin(), channels**-0.5, settings.get("softcap", 0.0), settings.get("window", 0),
                      *head_norms(settings.get("head_norms"), norm, channels, heads, kv_heads), settings.get("neighbours", False)),
            Products("attention", "o", (made("o", hidden, heads * channels),)),
        ]  # fmt: skip
        if "experts" in settings:
            instructions += mixture(made, norm(hidden), hidden, mlp, **settings["experts"])
            continue
        instructions += [
            Products("residual", "mlp", (made("mlp", mlp, hidden), made("mlp", mlp, hidden)), settings.get("activation", "silu"),
                     before=norm(hidden), added="o", after=norm(hidden) if settings.get("after") else None),
            Products("mlp", "down", (made("down", hidden, mlp),)),
        ]  # fmt: skip
    head = made("head", words, hidden)
    instructions.append(Products("residual", "logits", (head,), before=norm(hidden), added="down"))
    if "experts" in settings:  # what is added behind a mixture has no norm
        instructions = [
            dataclasses.replace(one, after=None) if one.__class__ is Products else one for one in instructions
        ]
    return Program(hidden, tokens, dataclasses.replace(head, bias=None), tuple(instructions), 1.5)


def head_norms(kind: bool | str | None, norm, channels: int, *heads: int) -> list[Norm | None]:
    """Of queries and keys: of each head (True), of all together ("all"), or none."""
    return [None if not kind else norm(channels * (count if kind == "all" else 1)) for count in heads]


def mixture(made, before: Norm, hidden: int, mlp: int, count: int, chosen: int, shared: str = "", **how) -> list:
    """The instructions of a mixture whose experts have half of the MLP's width; shared: "", "added" or "gated"."""
    half, router = mlp // 2, [made("router", count, hidden)]
    if shared == "gated":
        router.append(made("router", 1, hidden))
    several = lambda name, *shape: tuple(made(name, *shape) for _ in range(count))  # noqa: E731
    first = several("gate", half, hidden), several("mlp", half, hidden)
    found = [
        Products("residual", "router", tuple(router), before=before, added="o"),
        Experts("router", "chosen", *first, "silu", Choice(chosen, **how)),
    ]
    if shared:
        both = made("shared", mlp, hidden), made("shared", mlp, hidden)
        found.append(Products("residual", "shared", both, "gelu_tanh", before=before))
        found.append(Products("shared", "shared down", (made("down", hidden, mlp),)))
    added, gate = "shared down" if shared else None, "router" if shared == "gated" else None
    return [*found, Mixture("chosen", "down", several("down", hidden, half), chosen, added, gate)]


def compare(program: Program, dtype: torch.dtype, position: int, isa: str = "auto", steps: int = 2) -> None:
    step, ids = DecodeStep(copy.deepcopy(program), dtype, isa), torch.arange(program.tokens)[:, None] * 13 + 5
    for place in range(position, position + steps):
        expected = decode_step(program, ids, place, dtype)
        token = step(ids, place)
        assert (step.logits - expected).norm() < (0.01 if dtype == torch.bfloat16 else 2e-3) * expected.norm()
        assert torch.equal(token[:, 0], step.logits.argmax(-1)), "the first of the largest logits"
        ids = expected.argmax(-1, keepdim=True)
    for ours, theirs in zip(step.program.instructions, program.instructions, strict=True):
        if isinstance(theirs, Attention):
            assert torch.equal(ours.length, theirs.length) and int(theirs.length) == position + steps
            assert (ours.keys - theirs.keys).norm() < 0.01 * theirs.keys.norm() and torch.allclose(
                ours.values, theirs.values, atol=0.1
            )


@pytest.mark.parametrize("isa", native.ISAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_instruction_set(isa, dtype):
    if not native.runs(isa) or (isa.endswith("bf16") and dtype == torch.float16):
        pytest.skip(f"no {isa} for {dtype} here")
    mixed = {"qkv": "nibbles", "o": "rows", "mlp": "bytes", "down": "nf4", "head": "rows"}
    compare(decoder(mixed, dtype, bias=True, position=3), dtype, 3, isa)
    planes = {"qkv": "planes2", "mlp": "planes3", "down": "planes5", "head": "planes6"}
    compare(decoder(planes, dtype, bias=True, position=3), dtype, 3, isa)


CHOICES = {
    "softmax": {"count": 6, "chosen": 2},
    "sigmoid": {"count": 5, "chosen": 3, "sigmoid": True, "factor": 2.5, "shared": "added", "rounded": False,
                "bias": torch.tensor([0.1, -0.2, 0.3, 0.0, 0.2])},
    "gated": {"count": 4, "chosen": 4, "whole": False, "shared": "gated"},
    "one": {"count": 17, "chosen": 1, "shared": "gated"},
}  # fmt: skip


@pytest.mark.parametrize("experts", CHOICES)
@pytest.mark.parametrize("isa", native.ISAS)
def test_mixtures(isa, experts):
    """Of experts in every layout, for several sequences, and for several tokens of one."""
    if not native.runs(isa):
        pytest.skip(f"no {isa} here")
    dtype = torch.bfloat16 if isa.endswith("bf16") or experts == "one" else torch.float16
    kinds = {
        "softmax": {"gate": "nibbles", "mlp": "planes3", "down": "bytes"},
        "sigmoid": {"gate": "rows", "mlp": "rows", "down": "nf4"},
        "gated": {"gate": "walks2", "mlp": "nibbles turned", "down": "walks4"},
        "one": {"gate": "nibbles both", "mlp": "planes5", "down": "nibbles gathered"},
    }[experts]
    if experts == "softmax" and integer_dots(torch.empty(0, dtype=torch.int8)):
        kinds |= {"down": "int8", "gate": "int8", "mlp": "int8"}
    if experts == "sigmoid" and skips_zeros(dtype, torch.device("cpu"), 32) and isa.startswith("avx512"):
        kinds |= {"gate": "kept", "mlp": "kept"}
    how = {"experts": CHOICES[experts], "position": 3, "bias": experts != "gated", "sizes": (64, 96, 101)}
    compare(decoder(kinds, dtype, **how), dtype, 3, isa)
    compare(decoder(kinds, dtype, 3, **how), dtype, 3, isa)
    in_one_step_and_alone(decoder(kinds, dtype, 16, **{**how, "position": 253}, sequences=1), 253, 7, dtype, isa)


@pytest.mark.skipif(not skips_zeros(torch.bfloat16, torch.device("cpu"), 32), reason="no AVX512-VBMI2")
@pytest.mark.parametrize("isa", ["avx512bf16", "avx512"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_without_their_zeros(isa, dtype):
    if not native.runs(isa) or (isa.endswith("bf16") and dtype == torch.float16):
        pytest.skip(f"no {isa} for {dtype} here")
    kinds = dict.fromkeys(("qkv", "o", "mlp", "down"), "kept")
    sizes = {"sizes": (64, 96, 101), "channels": 16, "position": 3, "bias": True}
    compare(decoder(kinds, dtype, 3, **sizes), dtype, 3, isa)
    compare(decoder({**kinds, "down": "kept turned"}, dtype, **sizes), dtype, 3, isa)
    program = decoder(kinds, dtype, 16, **{**sizes, "position": 253}, sequences=1)
    for tokens in (2, 7, 16):
        in_one_step_and_alone(program, 253, tokens, dtype, isa)


def test_instructions_are_timed_when_asked_for():
    """Every one, summed over the calls since then; the tokens are the same."""
    program = decoder(dict.fromkeys(("qkv", "o", "mlp", "down", "head"), "rows"), torch.bfloat16, position=3)
    ids, steps = (
        torch.arange(program.tokens)[:, None],
        [DecodeStep(copy.deepcopy(program), torch.bfloat16) for _ in "ab"],
    )
    assert steps[0].seconds == []
    steps[0].time()
    tokens = [[step(ids, place) for place in (3, 4)] for step in steps]
    assert all(map(torch.equal, *tokens))
    first = steps[0].seconds
    assert len(first) == len(program.instructions) and all(0 < one < 1 for one in first) and steps[1].seconds == []
    steps[0](ids, 5)
    assert all(later > one for later, one in zip(steps[0].seconds, first, strict=True))
    steps[0].time()
    assert steps[0].seconds == [0.0] * len(first)


@pytest.mark.parametrize("isa", native.ISAS)
def test_changed_inputs(isa):
    if not native.runs(isa):
        pytest.skip(f"no {isa} here")
    for kinds in (
        {"qkv": "walks2", "o": "nibbles turned", "mlp": "walks3", "down": "rows half"},
        {"qkv": "nibbles both", "o": "walks4", "mlp": "bytes coded", "down": "planes3 turned"},
        {"qkv": "nibbles gathered", "o": "rows ordered", "mlp": "nf4 all", "down": "nibbles ordered"},
    ):
        program = decoder(kinds, torch.bfloat16, 3, bias=True, position=3)
        compare(program, torch.bfloat16, 3, isa)
        compare(dataclasses.replace(program, stream=InputChange(signs(48), 24)), torch.bfloat16, 5, isa)


@pytest.mark.skipif(not integer_dots(torch.empty(0, dtype=torch.int8)), reason="no AVX512-VNNI")
@pytest.mark.parametrize("tokens", [1, 8])
def test_int8_rounds_its_input(tokens):
    kinds = {"qkv": "int8", "o": "int8static", "mlp": "int8", "down": "int8", "head": "rows"}
    compare(decoder(kinds, torch.bfloat16, tokens, bias=True), torch.bfloat16, 0)


@pytest.mark.parametrize("head", ["rows", "nibbles", "bytes", "nf4", "planes2", "planes3", "planes5", "planes6"])
def test_every_layout_looks_rows_up_and_multiplies(head):
    for bias in (False, True):
        compare(decoder({"head": head, "mlp": head}, torch.bfloat16, bias=bias), torch.bfloat16, 0)


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("tokens", [1, 3, 8])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_tokens_and_threads(tokens, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        compare(decoder({"mlp": "nibbles"}, torch.bfloat16, tokens, position=300), torch.bfloat16, 300)
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
def test_fewer_threads_than_were_asked_for():
    """As with a thread limit, or in a build without OpenMP: a thread then takes several shares of every product."""
    asked = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "tokens_and_threads", __file__]
    limited = {**os.environ, "OMP_THREAD_LIMIT": "1"}
    done = subprocess.run(asked, env=limited, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.parametrize(
    "settings",
    [
        {"head_norms": True, "after": True, "activation": "gelu_tanh"},
        {"head_norms": "all", "after": True, "behind": True},
        {"head_norms": True, "neighbours": True},
        {"window": 5},
        {"window": 300, "softcap": 2.0},
        {"activation": "relu", "channels": 40},
    ],
)
@pytest.mark.parametrize("position", [0, 1, 256, 611])
def test_kinds_of_decoders(settings, position):
    compare(decoder({}, torch.bfloat16, position=position, **settings), torch.bfloat16, position)


MIXTURES = [
    {},
    {"qkv": "nibbles", "o": "bytes", "mlp": "nf4", "down": "planes3", "head": "planes2"},
    {"qkv": "planes5", "o": "walks2", "mlp": "walks3", "down": "planes6", "head": "bytes"},
    {"qkv": "nibbles both", "o": "walks4", "mlp": "nibbles gathered", "down": "rows half", "head": "nf4"},
]


def in_one_step_and_alone(program: Program, position: int, tokens: int, dtype: torch.dtype, isa: str = "auto") -> None:
    """Logits and the cache are the same, bit by bit, whether one step reads the tokens or steps of one token each."""
    at_once, alone = (DecodeStep(copy.deepcopy(program), dtype, isa) for _ in range(2))
    ids = torch.arange(tokens)[:, None] * 13 % 101
    chosen = at_once(ids, position)
    for i in range(tokens):
        assert torch.equal(alone(ids[[i]], position + i), chosen[[i]])
        assert torch.equal(alone.logits[0], at_once.logits[i]), f"token {i} of {tokens}"
    for one, other in zip(at_once.program.instructions, alone.program.instructions, strict=True):
        if isinstance(one, Attention):
            assert int(one.length) == position + tokens and torch.equal(one.length, other.length)
            assert torch.equal(one.keys, other.keys) and torch.equal(one.values, other.values)


@pytest.mark.parametrize("isa", native.ISAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kinds", MIXTURES)
def test_tokens_of_one_sequence_get_the_logits_of_steps_of_one_token(isa, dtype, kinds):
    if not native.runs(isa) or (isa.endswith("bf16") and dtype == torch.float16):
        pytest.skip(f"no {isa} for {dtype} here")
    # Spans of a head end at 256. Sizes are such that another order of sums shows in spite of the rounding to 16 bits.
    program = decoder(kinds, dtype, 16, sequences=1, bias=True, position=253, sizes=(768, 640, 2001))
    for tokens in (2, 3, 7, 8, 16):
        in_one_step_and_alone(program, 253, tokens, dtype, isa)


@pytest.mark.skipif(not integer_dots(torch.empty(0, dtype=torch.int8)), reason="no AVX512-VNNI")
def test_tokens_of_one_sequence_by_int8():
    kinds = {"qkv": "int8", "o": "int8static", "mlp": "int8", "down": "int8", "head": "rows"}
    program = decoder(kinds, torch.bfloat16, 16, sequences=1, bias=True, position=3, sizes=(768, 640, 2001))
    for tokens in (3, 16):
        in_one_step_and_alone(program, 3, tokens, torch.bfloat16)


@pytest.mark.parametrize("isa", native.ISAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tokens_of_one_sequence_by_int8_as_floats(isa, dtype):
    """Processors without dot products of integers multiply int8 codes, with one scale per row, by rounded inputs."""
    if not native.runs(isa) or (isa.endswith("bf16") and dtype == torch.float16):
        pytest.skip(f"no {isa} for {dtype} here")
    kinds = {"qkv": "rowwise coded", "o": "rowwise coded static", "mlp": "rowwise coded", "down": "rowwise coded"}
    program = decoder(kinds, dtype, 16, sequences=1, position=253, sizes=(768, 640, 2001))
    for tokens in (2, 3, 7, 8, 16):
        in_one_step_and_alone(program, 253, tokens, dtype, isa)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize(
    "settings",
    [
        {"head_norms": True, "after": True},
        {"head_norms": "all", "behind": True},
        {"window": 5},
        {"window": 300, "softcap": 2.0},
    ],
)
def test_tokens_of_one_sequence_in_kinds_of_decoders(threads, settings):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for position in (0, 1, 297):
            program = decoder({}, torch.bfloat16, 9, sequences=1, position=position, **settings)
            in_one_step_and_alone(program, position, 5, torch.bfloat16)
            ids = torch.arange(9)[:, None]
            step, expected = (
                DecodeStep(copy.deepcopy(program), torch.bfloat16),
                decode_step(program, ids, position, torch.bfloat16),
            )
            step(ids, position)
            assert (step.logits - expected).norm() < 0.01 * expected.norm()
    finally:
        torch.set_num_threads(before)


def stopping(program: Program) -> Program:
    """The program, which hands over in the place of every attention."""

    def handed(a):
        return CacheAttention(a.reads, a.heads, a.kv_heads, a.channels, a.scale, a.softcap, a.query_norm, a.key_norm)

    parts = (handed(one) if isinstance(one, Attention) else one for one in program.instructions)
    return dataclasses.replace(program, instructions=tuple(parts))


@pytest.mark.parametrize("isa", native.ISAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize(
    "tokens, settings", [(1, {}), (3, {"head_norms": True, "softcap": 2.0}), (8, {"head_norms": "all", "channels": 40})]
)
def test_a_step_reads_and_fills_tensors_that_are_lent(isa, dtype, together, tokens, settings):
    """The heads of one block in one part, and those of the other in a part each."""
    if not native.runs(isa) or (isa.endswith("bf16") and dtype == torch.float16):
        pytest.skip(f"no {isa} for {dtype} here")
    program = decoder({"mlp": "nibbles"}, dtype, tokens, position=300, **settings)
    ours, ids, at = copy.deepcopy(program), torch.arange(tokens)[:, None] * 13 + 5, torch.full((tokens, 1), 300)
    step = DecodeStep(stopping(ours), dtype, isa)
    step.begin(ids)
    caches = [one for one in ours.instructions if isinstance(one, Attention)]
    lents = []
    for a, heads in zip(caches, ([slice(0, 2)], [slice(0, 1), slice(1, 2)]), strict=True):
        k, v = ([x[:, one] for one in heads] for x in (a.keys, a.values))
        starts = [torch.zeros(x.shape[:2], dtype=torch.int32) for x in k]
        lents.append(CacheView(k, v, starts, [0, 300] * len(k)))
    tables = [(a.cos, a.sin) for a in caches]
    if together:
        found = step.attend_kept(lents, tables, at)
    else:
        for lent, of_one in zip(lents, tables, strict=True):
            found = step.attend_kept([lent], [of_one], at)
    expected = decode_step(program, ids, 300, dtype)
    assert (step.logits - expected).norm() < (0.01 if dtype == torch.bfloat16 else 2e-3) * expected.norm()
    assert torch.equal(found[:, 0], step.logits.argmax(-1))
    for a, b in zip(caches, (one for one in program.instructions if isinstance(one, Attention)), strict=True):
        assert (a.keys - b.keys).norm() < 0.01 * b.keys.norm() and torch.allclose(a.values, b.values, atol=0.1)
        assert not torch.equal(a.keys[:, :, 301], a.keys[:, :, 300])


def test_programs_that_cannot_run_are_refused():
    program = decoder({}, torch.bfloat16, position=7)
    with pytest.raises(ValueError, match="float32"):
        DecodeStep(program, torch.float32)
    with pytest.raises(RuntimeError, match="is no weight of"):
        DecodeStep(program, torch.float16)
    step = DecodeStep(program, torch.bfloat16)
    with pytest.raises(RuntimeError, match="number of positions in the cache"):
        step(torch.tensor([[1]]), 6)
    with pytest.raises(RuntimeError, match="not in the vocabulary"):
        step(torch.tensor([[101]]), 7)
    full = decoder({}, torch.bfloat16, position=700)
    with pytest.raises(RuntimeError, match="room for 700"):
        DecodeStep(full, torch.bfloat16)(torch.tensor([[1]]), 700)
    sequence = DecodeStep(decoder({}, torch.bfloat16, 4, sequences=1, position=697), torch.bfloat16)
    with pytest.raises(RuntimeError, match="room for 700"):
        sequence(torch.zeros(4, 1, dtype=torch.int64), 697)
    with pytest.raises(RuntimeError, match="must be 4 numbers or fewer"):
        sequence(torch.zeros(5, 1, dtype=torch.int64), 697)
    with pytest.raises(RuntimeError, match="neither of 4 sequences nor of one"):
        DecodeStep(decoder({}, torch.bfloat16, 4, sequences=2, position=7), torch.bfloat16)
    with pytest.raises(ValueError, match="9 tokens at a time, more than 8"):
        DecodeStep(decoder({}, torch.bfloat16, 9, position=7), torch.bfloat16)
    stopped = decoder({}, torch.bfloat16, position=7)
    attention = next(one for one in stopped.instructions if isinstance(one, Attention))
    step = DecodeStep(stopping(stopped), torch.bfloat16)
    with pytest.raises(RuntimeError, match="a step in parts begins with `begin`"):
        step(torch.tensor([[1]]), 7)
    with pytest.raises(RuntimeError, match="`begin` comes first"):
        step.go_on(torch.zeros(1, 64))
    tables, at = (attention.cos, attention.sin), torch.tensor([[7]])
    starts = torch.zeros(attention.keys.shape[:2], dtype=torch.int32)
    lent = CacheView([attention.keys], [attention.values], [starts], [0, 7])
    with pytest.raises(RuntimeError, match="`begin` comes first"):
        step.attend_kept([lent], [tables], at)
    step.begin(torch.tensor([[1]]))
    with pytest.raises(RuntimeError, match="`attended` .* does not fit"):
        step.go_on(torch.zeros(1, 7))
    full, other = dataclasses.replace(lent, counts=[0, attention.keys.shape[2]]), [attention.keys.float()]
    for wrong, message in (
        ((full, tables, at), "has no place for position"),
        ((dataclasses.replace(lent, k=other, v=other), tables, at), "Float has no place"),
        (
            (dataclasses.replace(lent, k=[attention.keys[:, :1]], v=[attention.values[:, :1]]), tables, at),
            "keeps 1 heads",
        ),
        ((lent, tables, torch.tensor([[1 << 20]])), "is none of the .* of the tables"),
        ((lent, tables, torch.tensor([[7, 8]])), "`positions` .* must be 1 numbers"),
        ((lent, (tables[0][:, :2], tables[1]), at), "cosines .* do not fit"),
    ):
        with pytest.raises(RuntimeError, match=message):
            step.attend_kept([wrong[0]], [wrong[1]], wrong[2])
