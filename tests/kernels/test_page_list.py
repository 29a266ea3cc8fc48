"""Which pages a query reads: held against plain loops, in float64, of bounds made from the keys."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from kernels import native
from kernels.kv_decode import KV, kv_decode, list_of, note_key, page_list, page_scores, quantize_kv
from kernels.kv_decode.ranked import Ranked, kv_decode_ranked
from kernels.registry import recording

IMPLS = ["reference"] if native.why_not() else ["reference", "cpu"]
SHAPES = (  # B H G D page T; the last two have more pages than one thread multiplies at a time, few rows and many
    (2, 3, 4, 20, 4, 57), (1, 2, 4, 128, 16, 300), (2, 2, 1, 64, 3, 100), (1, 1, 3, 24, 8, 7), (1, 1, 3, 64, 2, 700),
    (40, 2, 7, 16, 1, 150),
)  # fmt: skip


def keys_and_bounds(shape, dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Keys [B, H, T, D], where each row starts [B, H], and the bounds of its pages [B, H, P, 2 D]."""
    B, H, _, D, page, T = shape
    k, starts = torch.randn(B, H, T, D).to(dtype), torch.randint(0, max(T // 2, 1), (B, H))
    starts[0, 0] = 0
    edges = torch.zeros(B, H, -(-T // page), 2 * D, dtype=dtype)
    for b in range(B):
        for h in range(H):
            for p, keys in enumerate(k[b, h, starts[b, h] :].split(page)):
                edges[b, h, p] = torch.cat([keys.amin(0), keys.amax(0)])
    return k, starts, edges


def written_out(q, edges, n: int, start: int, page: int, pages: int, behind: int, scale: float) -> list[int]:
    """Of one row and its query heads [G, D]: the positions in ascending order."""
    held, D = -(-n // page), q.shape[-1]
    low, high = edges[:held].double().split(D, -1)
    bound = torch.stack([torch.maximum(head * low, head * high).sum(-1) for head in q.double()]) * scale
    order = bound.softmax(-1).sum(0)[: held - 1].argsort(descending=True)[: min(pages, held) - 1].tolist()
    chosen = [start + p * page + i for p in sorted([*order, held - 1]) for i in range(page)]
    return [at for at in chosen if at < start + n] + [start + n + i for i in range(behind)]


@pytest.mark.in_turns
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_lists_are_those_of_plain_loops(shape, dtype, impl):
    B, H, G, D, page, T = shape
    _, starts, edges = keys_and_bounds(shape, dtype)
    q, n = (2 * torch.randn(B, H * G, 1, D)).to(dtype), T - starts
    for behind, index in ((0, torch.int32), (1, torch.int64)):
        pages = torch.randint(1, edges.shape[2] + 2, (B, H))
        more = {"page": page, "pages": pages, "most": int(pages.max()), "behind": behind, "scale": 0.2, "impl": impl}
        with recording() as ran:
            found = page_list(q, edges, starts.to(index), n.to(index), **more)
        assert impl in next(iter(ran["page_list"]))
        for b in range(B):
            for h in range(H):
                row = int(n[b, h]), int(starts[b, h]), page, int(pages[b, h]), behind, 0.2
                expected = written_out(q[b, h * G : (h + 1) * G, 0], edges[b, h], *row)
                assert found.indices[b, h, : int(found.lengths[b, h])].tolist() == expected
        assert found.indices.shape[2] == min(int(pages.max()), edges.shape[2]) * page + behind


def test_bounds_bound_and_scores_are_shares():
    shape = SHAPES[0]
    k, starts, edges = keys_and_bounds(shape, torch.float32)
    q = torch.randn(2, 12, 5, 20)
    scores = page_scores(q, edges, 57 - starts, page=4, scale=0.3)
    assert scores.shape == (2, 3, 5, 15)
    assert_close(scores.sum(-1), torch.ones(2, 3, 5))
    assert all((scores[b, h, :, -(-(57 - int(starts[b, h])) // 4) :] == 0).all() for b in range(2) for h in range(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_keys_taken_in_one_by_one_give_the_bounds_of_all(dtype):
    """In place, in a part of a larger tensor, on whichever path takes the dtype."""
    shape = (2, 3, 1, 20, 4, 41)
    k, starts, edges = keys_and_bounds(shape, dtype)
    room = torch.full((2, 3, 20, 40), torch.nan, dtype=dtype)
    for i in range(41):
        note_key(room[:, :, :11], k[:, :, i : i + 1], (i - starts).clamp(min=0), 4)
    for b in range(2):
        for h in range(3):
            held = -(-(41 - int(starts[b, h])) // 4)
            assert torch.equal(room[b, h, :held], edges[b, h, :held])
    assert room[:, :, 11:].isnan().all()


def test_rows_without_positions_and_pages_of_any_scores():
    scores = torch.tensor([[[0.1, 0.9, 0.5, 0.3]]])
    for n, expected in ((0, [5]), (1, [5, 6]), (7, [*range(7, 9), *range(9, 12), 12]), (8, None)):
        starts, lengths = torch.tensor([[5]]), torch.tensor([[n]])
        found = list_of(scores, starts, lengths, page=2, pages=torch.tensor([[3]]), most=3, behind=1)
        got = found.indices[0, 0, : int(found.lengths[0, 0])].tolist()
        assert got == (expected or [7, 8, 9, 10, 11, 12, 13])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("page, T", [(1, 3000), (4, 90), (16, 17)])
def test_lists_of_any_scores_are_those_of_a_sort(page, T, shared, impl):
    """Negative and infinite scores among them; `shared`: one row of scores for all heads of a sequence."""
    P, starts = -(-T // page), torch.tensor([[0, T // 3, T // 3], [T, 5, T - 1]])
    scores = torch.randn(2, 1 if shared else 3, P + 2)
    scores[0, 0, : P // 4] = -torch.inf if P > 8 else -1.5
    scores, n = scores.expand(2, 3, -1), T - starts
    pages = torch.tensor([[P // 2 + 1, P // 5, P // 5], [3, P, 2]])
    with recording() as ran:
        found = list_of(scores, starts, n, page=page, pages=pages, most=P // 2 + 2, behind=1, impl=impl)
    assert ran["list_of"] == {impl} and found.indices.shape == (2, 3, (P // 2 + 2) * page + 1)
    for b in range(2):
        for h in range(3):
            held, start, count = -(-int(n[b, h]) // page), int(starts[b, h]), int(n[b, h])
            used = min(max(int(pages[b, h]), 1), held, P // 2 + 2)
            best = sorted(range(held - 1), key=lambda p, s=scores[b, h]: -float(s[p]))[: max(used - 1, 0)]
            chosen = [start + p * page + i for p in sorted([*best, *([held - 1] if held else [])]) for i in range(page)]
            expected = [*(at for at in chosen if at < start + count), start + count]
            got = found.indices[b, h, : int(found.lengths[b, h])].tolist()
            if float(scores[b, h, : held - 1].sort(descending=True).values[used - 2 : used - 1].sum()) == -torch.inf:
                assert len(got) == len(expected)  # which of equal scores are read is open
            else:
                assert got == expected


@pytest.mark.skipif("cpu" not in IMPLS, reason="no C++ kernels here")
def test_of_equal_scores_those_in_front_are_read():
    scores, one = torch.tensor([[[0.5, 0.0, 0.5, 0.0, 0.5, 0.5, 9.0]]]), torch.ones(1, 1, dtype=torch.int64)
    for pages, expected in ((1, [6]), (2, [0, 6]), (4, [0, 2, 4, 6]), (6, [0, 1, 2, 4, 5, 6]), (7, list(range(7)))):
        found = list_of(scores, 0 * one, 7 * one, page=1, pages=pages * one, most=7)
        assert found.indices[0, 0, :pages].tolist() == expected and int(found.lengths) == pages


def test_arguments_of_wrong_shapes_are_refused():
    q, edges, one = torch.randn(1, 4, 1, 8), torch.randn(1, 2, 5, 16), torch.ones(1, 2, dtype=torch.int64)
    more = {"page": 4, "pages": one, "most": 1}
    for given, of, message in (
        (q[..., :7], edges, "`bounds`"),
        (q, edges.half(), "dtype"),
        (q.expand(1, 4, 2, 8), edges, "`q`"),
    ):
        with pytest.raises(ValueError, match=message):
            page_list(given, of, one, one, **more)
    with pytest.raises(ValueError, match="`impl`"):
        page_list(q, edges, one, one, impl="triton", **more)
    with pytest.raises(ValueError, match="`impl`"):
        list_of(edges[..., 0], one, one, impl="triton", **more)
    if "cpu" in IMPLS:
        with pytest.raises(ValueError, match="21 positions does not fit into 5 pages of 4"):
            page_list(q, edges, one, 21 * one, **more)


@pytest.mark.in_turns
@pytest.mark.parametrize("impl", [*IMPLS, "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [*SHAPES, (1, 3, 3, 64, 16, 5000)], ids=str)
def test_ranked_pages_are_read_as_their_lists_are(shape, dtype, impl):
    """With rows of any length, empty ones among them, and memory outside of what is read that holds NaN."""
    B, H, G, D, page, T = shape
    k, starts, edges = keys_and_bounds(shape, dtype)
    v, q, n = torch.randn_like(k), torch.randn(B, H * G, 1, D).to(dtype), T - 1 - starts
    n[-1, -1] = 0
    pages = torch.randint(1, edges.shape[2] + 2, (B, H))
    for behind in (0, 1):
        ranked = Ranked(q, edges, starts, n, page, pages, max(int(pages.max()) - 1, 1), behind, 0.2)
        chosen = ranked.listed("reference" if impl == "reference" else "auto")
        unread = torch.ones(B, H, T, dtype=torch.bool)
        for b in range(B):
            for h in range(H):
                unread[b, h, chosen.indices[b, h, : int(chosen.lengths[b, h])]] = False
        cache = KV(*(x.masked_fill(unread[..., None], torch.nan) for x in (k, v)))
        with recording() as ran:
            y = kv_decode_ranked(q, cache, ranked, softcap=8.0, impl=impl)
        one = impl != "reference" and "cpu" in IMPLS
        assert next(iter(ran["kv_decode_ranked"])).startswith("cpu" if one else "page_list")
        more = {"indices": chosen.indices, "softcap": 8.0}
        assert torch.equal(y, kv_decode(q, cache, chosen.lengths, **more, impl=impl))
        whole = KV(k.float(), v.float())
        expected = kv_decode(q.float(), whole, chosen.lengths, **more, impl="reference")
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        assert_close(y.float(), expected, atol=tolerance, rtol=tolerance)


def test_ranked_pages_of_codes_are_read_by_the_two_ops():
    shape = (1, 2, 4, 64, 16, 256)
    k, starts, edges = keys_and_bounds(shape, torch.bfloat16)
    q, cache = torch.randn(1, 8, 1, 64).bfloat16(), quantize_kv(k, torch.randn_like(k), bits=8)
    ranked = Ranked(q, edges, starts, 256 - starts, 16, torch.full((1, 2), 4), 4)
    chosen = ranked.listed()
    assert torch.equal(kv_decode_ranked(q, cache, ranked), kv_decode(q, cache, chosen.lengths, indices=chosen.indices))


@pytest.mark.skipif("cpu" not in IMPLS, reason="no C++ kernels here")
def test_the_op_of_ranked_pages_passes_opcheck_and_refuses_rows_outside_the_cache():
    k, starts, edges = keys_and_bounds((1, 2, 4, 64, 4, 60), torch.bfloat16)
    q, n, pages = torch.randn(1, 8, 1, 64).bfloat16(), 60 - starts, torch.full((1, 2), 4)
    given = (q, k, k, q, edges, starts, n, pages, 4, 4, 0, 0.125, 0.125, 0.0, native.kv_decode_isa(q.dtype))
    torch.library.opcheck(torch.ops.workbench.kv_decode_ranked, given)
    with pytest.raises(ValueError, match="none of the 60 positions"):
        kv_decode_ranked(q, KV(k, k), Ranked(q, edges, starts, n, 4, pages, 4, 1))
