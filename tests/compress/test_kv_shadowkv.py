"""Chunks chosen by landmarks, keys of low rank, values elsewhere: as a second implementation has them, and counted."""

import copy

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from compress import METHODS, apply, load_compressed, save_compressed
from compress.kv import attach, attached, attachment_of
from compress.kv.layer import KVLayer
from compress.kv.reading.chunked import ChunkedSlab
from compress.kv.reading.offload import OffloadedRows
from compress.kv.reading.reader import Reader
from compress.kv.storage import joined
from compress.kv.tiers import tiers
from compress.kv.timed import FilledCache
from eval.contexts.haystack import ContextSample, Question
from eval.contexts.long_context import score_long_context

SHADOW = METHODS["shadowkv"]
NEAR = {"rtol": 1e-3, "atol": 1e-3}


def read(model, cache, ids, mask=None) -> Tensor:
    mask = torch.ones(len(ids), cache.get_seq_length() + ids.shape[1], dtype=torch.long) if mask is None else mask
    at = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    return model(ids, attention_mask=mask, position_ids=at, past_key_values=cache).logits


def rope(x: Tensor, places: Tensor, back: bool = False) -> Tensor:
    """Pairs of channels as complex numbers, turned by their place: x [B, H, n, D], places [B, n]."""
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    angle = places[:, None, :, None].double() / 50.0 ** (torch.arange(pairs.shape[-1]) / pairs.shape[-1])
    turned = pairs * torch.polar(torch.ones_like(angle), -angle if back else angle)
    return torch.view_as_real(turned).flatten(-2).to(x.dtype)


def by_the_paper(q, k, v, new_k, new_v, *, tokens, rank, chunk, outliers, scale) -> tuple[list[set[int]], Tensor]:
    """One row, in loops: q [H_q, D], k, v [H, T, D], one new token. Chosen positions of each head, and y [H_q, D].

    tokens: of the prompt that are read at most.
    """
    H, T, D = k.shape
    count = T // chunk - 4
    front = rope(k[None], torch.arange(T)[None], True)[0, :, : count * chunk].transpose(0, 1).flatten(1).double()
    U, S, Vh = torch.linalg.svd(front, full_matrices=False)
    low = ((U[:, :rank] * S[:rank]) @ Vh[:rank]).unflatten(1, (H, D)).transpose(0, 1).to(k)  # [H, count chunk, D]
    low = rope(low[None], torch.arange(count * chunk)[None])[0]
    chosen, ys = [], []
    for h in range(H):
        keys = [k[h, c * chunk : (c + 1) * chunk] for c in range(count)]
        marks = torch.stack([one.mean(0) for one in keys])
        alike = [min(float(torch.cosine_similarity(mark, x, dim=0)) for x in one)
                 for mark, one in zip(marks, keys, strict=True)]  # fmt: skip
        exact = sorted(range(count), key=alike.__getitem__)[:outliers]
        others = [c for c in range(count) if c not in exact]
        group = range(h * len(q) // H, (h + 1) * len(q) // H)
        shares = torch.stack([torch.softmax(marks[others] @ q[i] * scale, 0) for i in group]).amax(0)
        rest = T - count * chunk + outliers * chunk
        picked = [others[i] for i in shares.topk(max(-(-(tokens - rest) // chunk), 1)).indices.tolist()]
        positions = sorted(p for c in (*exact, *picked) for p in range(c * chunk, (c + 1) * chunk))
        own = torch.stack([(k if p // chunk in exact else low)[h, p] for p in positions])
        keys = torch.cat([own, k[h, count * chunk :], new_k[h]])
        values = torch.cat([v[h, positions], v[h, count * chunk :], new_v[h]])
        ys += [torch.softmax(keys @ q[i] * scale, 0) @ values for i in group]
        chosen.append({*positions, *range(count * chunk, T + 1)})
    return chosen, torch.stack(ys)


@pytest.mark.parametrize("by_kernel", [True, False])
def test_chunks_and_attention_are_those_of_a_second_implementation(by_kernel):
    """For rows of different lengths; one new token behind the prompt."""
    torch.manual_seed(0)
    B, H, T, D, chunk = 2, 2, 150, 16, 4
    k, v = torch.randn(2, B, H, T, D)
    k += 3 * torch.randn(B, H, 1, D) + torch.randn(B, 1, T // 10, 1, D).expand(-1, H, -1, 10, -1).flatten(2, 3)
    q, (new_k, new_v) = torch.randn(B, 3 * H, 1, D), torch.randn(2, B, H, 1, D)
    real = torch.arange(T) >= torch.tensor([[0], [21]])
    method = SHADOW(budget=0.4, rank_share=0.25, chunk=chunk, outliers=0.2)
    layer, about = KVLayer(0), {"scaling": 0.3, "softcap": None, "sinks": None}
    layer.dtype, layer.device = k.dtype, k.device
    layer.about = {**about, "turn": rope}
    layer.keep(k, v, real, False)
    method.join([layer])
    reader = Reader(method, [0])
    new = torch.ones(B, 1, dtype=torch.bool)
    y, _ = reader.attend(layer, q, new_k, new_v, None, new, about, by_kernel=by_kernel, count=False)
    for row in range(B):
        start = T - int(real[row].sum())
        tokens = round(0.4 * (T - start))
        more = {"tokens": tokens, "rank": 8, "chunk": chunk, "outliers": int(0.2 * tokens / chunk), "scale": 0.3}
        own = (q[row, :, 0], k[row, :, start:], v[row, :, start:], new_k[row], new_v[row])
        chosen, expected = by_the_paper(*own, **more)
        assert_close(y[row, 0], expected, rtol=1e-4, atol=1e-4)
        for head in range(H):
            if by_kernel:
                listed = reader.lists[0]
                found = listed.indices[row, head, : int(listed.lengths[row, head])] - start
            else:
                pages = reader.last[0][row, head, 0]
                found = (pages[pages >= 0, None] * chunk + torch.arange(chunk)).flatten()
                found = {*found[found < T - start].tolist(), T - start}
            assert {*map(int, found)} == chosen[head] and len(chosen[head]) < T - start


def test_bytes_are_counted_where_they_lie_and_as_they_move(tiny, tokens, tmp_path):
    """In main memory and in a file alike, which leaves nothing in the folder; copies count on their own."""
    model, ids, counts = tiny("llama"), torch.cat(tokens(2, 200)), []
    B, H, D, chunk, layers = 2, 2, 16, 8, 2
    chunks, rank, exact = 200 // chunk - 4, 8, int(0.25 * 80 / chunk)
    for path in ("", str(tmp_path)):
        with attached(model, [SHADOW(budget=0.4, rank_share=0.25, outliers=0.25, path=path)]) as attachment:
            cache = attachment.cache()
            read(model, cache, ids)
            before = tiers(cache)
            far = B * H * chunks * chunk * D * 4
            own = [rank * (chunks * chunk + H * D), H * chunks * D, 2 * H * exact * chunk * D, 2 * H * 4 * chunk * D]
            assert before.far == layers * far and before.fetched == 0
            assert 0 <= before.near - layers * B * 4 * sum(own) < layers * B * 1000, "places, starts, ids"
            assert before.near + before.far == cache.nbytes > cache.nbytes_16 > cache.nbytes // 2
            copied = copy.deepcopy(cache)
            logits = read(model, cache, ids[:, :1])
            chosen = 10 - 4 - exact
            assert tiers(cache).fetched == layers * B * H * chosen * chunk * D * 4 and tiers(copied).fetched == 0
            assert_close(read(model, copied, ids[:, :1]), logits, rtol=0, atol=0)
            assert copied.own[0].slabs[0].values.rows is cache.own[0].slabs[0].values.rows
            counts.append((before, logits))
            assert not list(tmp_path.iterdir())
    assert counts[0][0] == counts[1][0] and torch.equal(counts[0][1], counts[1][1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_come_back_from_a_file(tmp_path, dtype):
    x = torch.randn(7, 3).to(dtype)
    held = OffloadedRows(x, str(tmp_path))
    assert torch.equal(held.fetch(torch.tensor([6, 0, 6])), x[[6, 0, 6]]) and held.fetched == 9 * x.itemsize
    assert held.nbytes == x.nbytes and OffloadedRows(x[:0], str(tmp_path)).nbytes == 0


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3_text", "gpt_oss"])
def test_nothing_is_lost_at_full_rank_and_budget(tiny, tokens, architecture):
    """Prompts in pieces, with padding, single tokens and several at once; layers with a window are left alone."""
    model, ids = tiny(architecture), torch.cat(tokens(2, 90))
    mask = (torch.arange(90) >= torch.tensor([[0], [13]])).long()
    found = []
    for methods in ([], [SHADOW(budget=1.0, rank_share=1.0, chunk=3)]):
        with attached(model, methods) as attachment:
            cache, at, logits = attachment.cache(), 0, []
            for size in (50, 30, 1, 1, 4, 1):
                logits.append(read(model, cache, ids[:, at : at + size], mask[:, : at + size]))
                at += size
        found.append(torch.cat(logits[1:], 1))
    assert_close(found[1], found[0], **NEAR)
    assert all(isinstance(layer.slabs[0], ChunkedSlab) and layer.slabs[0].most for layer in cache.own)
    assert len(cache.own) == (2 if architecture in ("llama", "gpt2") else 1)


def test_prompts_join_what_there_was_and_new_tokens_stay_exact(tiny, tokens):
    model, ids = tiny("llama"), torch.cat(tokens(2, 140))
    with attached(model, [SHADOW(chunk=4, rank_share=0.2)]) as attachment:
        cache = attachment.cache()
        read(model, cache, ids[:, :12])
        assert [layer.slabs[0].most for layer in cache.own] == [0, 0], "too short for a chunk"
        read(model, cache, ids[:, 12:80])
        fetched = tiers(cache).fetched
        for i in range(80, 85):
            read(model, cache, ids[:, i : i + 1])
        slab = cache.own[0].slabs[0]
        assert int(slab.counts[0, 0]) == 16 and slab.tail.length == 80 - 64 + 5 and slab.length == 85
        assert tiers(cache).fetched > fetched
        cache.crop(-5)
        with pytest.raises(ValueError, match="last 17 tokens cannot be taken back: all but 16"):
            cache.own[0].slabs[0].drop_last(17)
        before = joined(cache.own[0].slabs)[1]
        read(model, cache, ids[:, 80:120])
        slab = cache.own[0].slabs[0]
        assert int(slab.counts[0, 0]) == 26 and slab.tail.length == 16 and not cache.is_croppable
        assert torch.equal(joined(cache.own[0].slabs)[1][:, :, :80], before), "values are never rounded"


def test_an_observing_cache_is_divided_as_if_it_had_always_been(tiny, tokens):
    model, ids, method = tiny("llama"), torch.cat(tokens(2, 80)), SHADOW(rank_share=0.3)
    with attached(model) as attachment:
        observed = attachment.cache(observes=True)
        read(model, observed, ids)
        made = observed.compressed(None, None, method)
    with attached(model, [method]) as attachment:
        whole = attachment.cache()
        read(model, whole, ids)
        for a, b in zip(made.own, whole.own, strict=True):
            assert_close(joined(a.slabs), joined(b.slabs), **NEAR)
        assert_close(read(model, made, ids[:, :1]), read(model, whole, ids[:, :1]), **NEAR)


def test_an_evaluation_says_what_lies_elsewhere(tiny, tokens):
    """In 16 bits, as it counts the rest."""
    model, (context, ask) = tiny("llama"), [one[0] for one in tokens(2, 80)]
    sample = ContextSample("word", context, (Question(ask[:5], ask[5:8], ((3, 9),)),), 0.5, 80)
    with attached(model) as attachment:
        found = score_long_context(
            model,
            [sample],
            observer=lambda: attachment.cache(observes=True, traces=True),
            variants={"chunks": lambda cache: cache.compressed(None, None, SHADOW(rank_share=0.3))},
            visibilities=["agnostic"],
        )
    far = 2 * 2 * (80 - 4 * 8) * 16 * 2
    assert found.found().elsewhere_bytes == {"full": {80: 0}, "chunks": {80: far}}
    assert far < found.cache_bytes["chunks"][80] and found.kept["chunks"][80] == [[80, 80]] * 2


def test_refused_with_what_it_cannot_serve(tiny, tmp_path):
    model, method = tiny("llama"), SHADOW()
    for other in ("snapkv", "kv_int", "xkv"):
        other = METHODS[other]()
        for refuse in (lambda o=other: apply([method, o], model), lambda o=other: attach(model, [o, method])):
            with pytest.raises(ValueError, match="cannot be combined with it"):
                refuse()
    with pytest.raises(ValueError, match="both decide which positions are read"):
        apply([method, METHODS["quest"]()], model)
    for knobs, message in (
        ({"rank_share": 0.0}, "`rank_share` .=0. of shadowkv must be above 0"),
        ({"rank_share": 1.5}, "rank_share"),
        ({"chunk": 0}, "chunk"),
        ({"outliers": -0.1}, "outliers"),
        ({"budget": 0}, "`budget` .=0. of shadowkv"),
    ):
        with pytest.raises(ValueError, match=message):
            SHADOW(**knobs)
    with pytest.raises(ValueError, match="`path` .='/nowhere'. of shadowkv must be a folder that exists"):
        apply([SHADOW(path="/nowhere")], model)
    with pytest.raises(ValueError, match="in factors, which timed steps do not read"):
        FilledCache(tiny("llama"), 100, None, None, method)
    result = apply([METHODS["rtn"](bits=8, group_size=16), method], model)
    assert any("count the prompt's values, which lie in main memory" in note for note in result.notes)
    save_compressed(result, tmp_path / "saved")
    assert attachment_of(load_compressed(tmp_path / "saved")).reading == method
