"""Products with tables: the tables are the published ones, packing is exact, and the op survives the compiler."""

import re

import pytest
import torch

from kernels import native
from kernels.interpreter import interpreting
from kernels.linear.onednn import lays_out
from kernels.lut_matmul import (
    FP4,
    NF4,
    dequantize,
    lut_matmul,
    normal_float,
    pack_codebook,
    panels_fit,
    to_panels,
    to_rows,
    unpack_codebook,
)
from kernels.lut_matmul.cases import checks, contests
from kernels.registry import recording
from kernels.support.declarations import OWN, relative_rms

CPU = torch.device("cpu")


def make(out=24, columns=64, entries=16, per_row=False, group_size=None, seed=0):
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, entries, (out, columns), generator=g)
    table = torch.randn(*((out,) if per_row else ()), entries, generator=g)
    scale = None if group_size is None else torch.rand(out, columns // group_size, generator=g)
    exact = torch.stack([table[i if per_row else ...][codes[i]] for i in range(out)]).double()
    if scale is not None:
        exact = exact * scale.double().repeat_interleave(group_size, 1)
    return codes, pack_codebook(codes, table, scale, group_size=group_size), exact


@pytest.mark.parametrize("entries", [8, 16])
@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("columns, group_size", [(64, 16), (64, None), (7, 7), (7, None), (60, 12)])
def test_reference_is_exact(entries, per_row, columns, group_size):
    codes, w, exact = make(5, columns, entries, per_row, group_size)
    assert torch.equal(unpack_codebook(w).long(), codes)
    assert w.codes.shape == (5, -(-columns // 8) * w.bits)
    assert torch.equal(dequantize(w).double(), exact.float().double())
    x = torch.randn(2, 3, columns)
    torch.testing.assert_close(lut_matmul(x, w).double(), x.double() @ exact.T, rtol=1e-5, atol=1e-5)


def test_tables_are_those_of_bitsandbytes():
    functional = pytest.importorskip("bitsandbytes.functional")
    for ours, name in ((NF4, "nf4"), (FP4, "fp4")):
        theirs = functional.get_4bit_type(name, device="cpu")
        assert torch.equal(ours, theirs), name


def test_normal_float_has_zero_and_both_ends():
    assert torch.allclose(normal_float(8, 7), NF4, rtol=0, atol=1e-6)  # printed from quantiles in less precision
    assert NF4.shape == (16,) and NF4[7] == 0 and NF4[0] == -1 and NF4[-1] == 1
    assert (NF4.diff() > 0).all()
    three = normal_float(4, 3)
    assert three.shape == (8,) and three[3] == 0 and (three.diff() > 0).all()


def test_values_on_the_table_come_back_exactly():
    W = NF4[torch.randint(0, 16, (16, 64))]
    codes = (W[..., None] - NF4).abs().argmin(-1)
    w = pack_codebook(codes, NF4, torch.ones(16, 1))
    assert torch.equal(dequantize(w), W)


def test_strides_and_empty_batches():
    _, w, exact = make(24, 64, group_size=32)
    x = torch.randn(64, 6).t()[::2]  # not contiguous
    torch.testing.assert_close(lut_matmul(x, w).double(), x.double() @ exact.T, rtol=1e-5, atol=1e-5)
    assert lut_matmul(x[:0], w).shape == (0, 24)
    assert lut_matmul(torch.zeros(2, 0, 64, dtype=torch.bfloat16), w).shape == (2, 0, 24)


def test_bad_arguments_say_what_works():
    codes, w, _ = make(24, 64)
    with pytest.raises(ValueError, match=r"`table` \(10,\) must be \[n\] or \[24, n\]"):
        pack_codebook(codes, torch.randn(10))
    with pytest.raises(ValueError, match="`table`"):
        pack_codebook(codes, torch.randn(23, 16))
    with pytest.raises(ValueError, match="`group_size` \\(=48\\) must divide in_features \\(=64\\)"):
        pack_codebook(codes, NF4, torch.ones(24, 1), group_size=48)
    with pytest.raises(ValueError, match="`scale`"):
        pack_codebook(codes, NF4, torch.ones(24, 3), group_size=32)
    with pytest.raises(ValueError, match="the table has 8 entries"):
        pack_codebook(codes, torch.randn(8))
    with pytest.raises(ValueError, match="in_features \\(=64\\)"):
        lut_matmul(torch.randn(2, 63), w)
    with pytest.raises(ValueError, match="`impl` \\(='fast'\\)"):
        lut_matmul(torch.randn(2, 64), w, impl="fast")
    if not interpreting():
        with pytest.raises(ValueError, match="`impl` \\(='triton'\\) needs"):
            lut_matmul(torch.randn(2, 64), w, impl="triton")


@pytest.mark.parametrize("scaled", [False, True])
def test_registered_op_passes_opcheck(scaled):
    _, w, _ = make(24, 64, group_size=32 if scaled else None)
    arguments = (torch.randn(3, 64), w.codes, w.table, w.scale, w.layout, w.bits, w.group_size, *w.shape, "reference")
    torch.library.opcheck(torch.ops.workbench.lut_matmul, arguments)


def test_survives_the_compiler_and_export(backend):
    _, w, _ = make(24, 64, group_size=32)
    x = torch.randn(5, 64)

    class Layer(torch.nn.Module):
        def forward(self, x):
            return lut_matmul(x, w) * 2

    compiled = torch.compile(Layer(), fullgraph=True, backend=backend)
    with recording() as used:
        y = compiled(x)
    assert used["lut_matmul"] == {"reference"}
    assert torch.allclose(y, lut_matmul(x, w) * 2)
    exported = torch.export.export(Layer(), (x,))
    assert torch.allclose(exported.module()(x), y)


needs_native = pytest.mark.skipif(native.why_not() is not None, reason=f"no C++ kernels here: {native.why_not()}")
PANELS = native.why_not() is None and native.isa(torch.float32) != "portable"  # else torch's own products run


@pytest.mark.in_turns
@needs_native
@pytest.mark.parametrize("entries", [4, 8, 16, 32, 64])
@pytest.mark.parametrize("shape, group_size", [((48, 128), 64), ((33, 64), None), ((5, 40), 8)])
def test_panels_lose_nothing_and_agree(entries, shape, group_size):
    codes, w, exact = make(*shape, entries=entries, group_size=group_size)
    if group_size == 8 and entries > 16:
        assert not panels_fit(w, torch.float32, CPU), "planes are of 16 columns"
        return
    laid = to_panels(w)
    assert torch.equal(dequantize(laid), dequantize(w)) and torch.equal(to_rows(laid).codes, w.codes)
    for dtype, tolerance in ((torch.bfloat16, 1e-2), (torch.float16, 1e-3), (torch.float32, 1e-6)):
        for tokens in (1, 3, 20, 70):
            x = torch.randn(tokens, shape[1]).to(dtype)
            with recording() as used:
                y = lut_matmul(x, laid)
            own = f"cpu {native.isa(dtype, tokens > native.most_in_loops())}"
            assert used["lut_matmul"] == {own if PANELS else "reference"} and y.dtype == dtype
            assert relative_rms(y, x.double() @ exact.T) < tolerance
    torch.library.opcheck(
        torch.ops.workbench.panels_matmul, (x, laid.codes, laid.scale, laid.table, None, shape[0], "auto")
    )


def test_panels_are_refused_where_they_do_not_fit():
    for w in (make(per_row=True)[1], make(5, 60, group_size=12)[1]):
        assert not panels_fit(w, torch.float32, CPU)
        with pytest.raises(ValueError, match="`impl` \\(='cpu'\\) needs panels"):
            lut_matmul(torch.randn(2, w.shape[1]), w, impl="cpu")


def test_cases_on_a_cpu():
    for check in checks(CPU):
        for impl in ("reference", *(impl for impl in check.impls if impl == "cpu")):
            assert check.error(impl) <= check.tolerance, (check.name, impl)
    if PANELS and lays_out(OWN.dtype) and not interpreting():
        (contest,) = contests(CPU, True, OWN)
        assert contest.contestants[contest.ours](0).shape == (1, 128)


def test_assembly_reads_the_pairs_that_it_wrote():
    """The interpreter cannot run the PTX of the table of pairs, so it is read and carried out here, for a warp."""
    pytest.importorskip("triton")
    from kernels.packed_matmul.look_up import FILL, LANE, READ

    memory, stores, base, lanes = {}, [], 4096, torch.arange(32)
    for first in range(0, 256, 32):  # each lane fills the copies of one word
        words = {"$1": 1000 + first + lanes, "$2": base + (first + lanes) * 128}
        carry_out(FILL.value, words, memory, stores)
    assert sorted(memory) == list(range(base, base + 4 * 8192, 4))
    lane = carry_out(LANE.value, {"$1": lanes}, memory, stores)
    for byte in torch.stack([lanes * 8 + i for i in range(8)]):
        at = {"$1": byte * 128, "$2": lane, "$3": base + 0 * lanes}
        assert torch.equal(carry_out(READ.value, at, memory, stores), 1000 + byte)
    assert torch.equal((base + lane) // 4 % 32, lanes), "each lane reads its own bank"
    for addresses in stores:  # a quarter of a warp stores at a time, to 32 banks
        banks = [(at // 4 + word) % 32 for at in addresses[:8] for word in range(4)]
        assert sorted(banks) == list(range(32))


def carry_out(program, registers, memory, stores):
    """$0 of 32 lanes after the few instructions that the table of pairs uses; memory: what each address holds."""
    registers = {"%laneid": torch.arange(32), **registers}
    simple = {"mov": lambda a: a, "shl": lambda a, b: a << b, "and": lambda a, b: a & b, "xor": lambda a, b: a ^ b,
              "or": lambda a, b: a | b, "add": lambda a, b: a + b}  # fmt: skip
    for opcode, rest in re.findall(r"^([a-z][\w.]+) (.+);$", program, re.M):
        to, *names = (part.strip(" []{}") for part in rest.split(","))
        x = [registers[name] if name in registers else torch.full((32,), int(name, 0)) for name in names]
        if opcode == "st.shared.v4.b32":
            stores.append(registers[to].tolist())
            for word in range(4):
                memory |= zip((registers[to] + 4 * word).tolist(), x[word].tolist(), strict=True)
        elif opcode == "ld.shared.b32":
            registers[to] = torch.tensor([memory[at] for at in x[0].tolist()])
        else:
            registers[to] = simple[opcode.partition(".")[0]](*x)
    return registers["$0"]


@pytest.mark.parametrize("tokens", [1, 4, 16])
@pytest.mark.parametrize("group_size", [64, 128])
def test_a_table_of_pairs_is_only_used_where_its_shared_memory_can_be_launched(group_size, tokens):
    """An H100 refused NF4 of 4096 x 4096 at one token: 28,160 bytes of dynamic memory beside 32 KiB of static memory."""
    from kernels.lut_matmul.triton import _meta
    from kernels.packed_matmul.launch import PLAIN_SHARED, TABLE_OF_PAIRS, blocks, candidates, launchable

    for out in (576, 4096, 14336):
        w = _meta(4, group_size, out=out)
        columns = blocks(w).columns
        small = [plan for plan in candidates(w, tokens) if plan["kind"] == "small_batch"]
        for plan in [launchable({**p, "warps": warps}, blocks(w)) for p in small for warps in (1, p["warps"])]:
            a_stage = plan["block_n"] * columns // 2 + 2 * columns * plan["block_m"]
            dynamic = plan["warps"] * ((plan["stages"] - 1) * a_stage + 2 * plan["block_n"])
            assert not plan["pairs"] or not dynamic <= PLAIN_SHARED < dynamic + TABLE_OF_PAIRS, plan
