"""Projected keys and values: exact at full rank, small in bytes, and what products with the components written out
give."""

import copy

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.testing import assert_close
from transformers import DynamicCache

from compress import METHODS, apply, load_compressed, load_model, save_compressed
from compress.commands.find_components import find, kept_share, second_moments
from compress.inputs.calibration import calibration
from compress.kv import attach, attached, attachment_of
from compress.kv.precision import Precision, Projection
from compress.kv.projecting.matryoshka import components, rank_of
from compress.kv.storage import slabs_of
from compress.kv.timed import FilledCache
from kernels.kv_decode import dequantize_kv, quantize_kv
from kernels.registry import recording

MATRYOSHKA, KV_INT, SNAPKV = (METHODS[name] for name in ("matryoshka", "kv_int", "snapkv"))
NEAR = {"rtol": 1e-4, "atol": 1e-4}


def read(model, cache, ids, mask=None) -> Tensor:
    mask = torch.ones(len(ids), cache.get_seq_length() + ids.shape[1], dtype=torch.long) if mask is None else mask
    at = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    return model(ids, attention_mask=mask, position_ids=at, past_key_values=cache).logits


@pytest.fixture
def found(tiny, tokens, tmp_path):
    """A tiny model, and the method with components of its own."""

    def make(architecture: str = "llama", key_rank: float = 1.0, value_rank: float = 1.0):
        model, path = tiny(architecture), tmp_path / f"{architecture}.safetensors"
        if not path.is_file():
            find(model, tokens(3, 40), path)
        return model, MATRYOSHKA(path=str(path), key_rank=key_rank, value_rank=value_rank)

    return make


@pytest.fixture
def padded(tokens) -> tuple[Tensor, Tensor]:
    return torch.cat(tokens(2, 60)), (torch.arange(60) >= torch.tensor([[0], [9]])).long()


def in_steps(model, methods, ids, mask, **more) -> Tensor:
    """Logits of the last tokens: a prompt in chunks, single tokens, and several at once."""
    with attached(model, methods) as attachment:
        cache, at, found = attachment.cache(**more), 0, []
        for size in (30, 22, 1, 1, 1, 4, 1):
            found.append(read(model, cache, ids[:, at : at + size], mask[:, : at + size]))
            at += size
    return torch.cat(found[2:], 1)


def test_components_are_those_of_a_singular_value_decomposition(tiny, tokens, tmp_path):
    model, batches, path = tiny("llama"), tokens(2, 40), tmp_path / "components.safetensors"
    kept = find(model, batches, path)
    exact: list[DynamicCache] = []
    for ids in batches:
        exact.append(DynamicCache())
        model(ids, past_key_values=exact[-1])
    for layer, own in components(str(path)).items():
        for kind in ("keys", "values"):
            x = torch.cat([getattr(cache.layers[layer], kind)[0] for cache in exact], 1)  # [H, n, D]
            _, s, vh = torch.linalg.svd(x, full_matrices=False)
            U = getattr(own, kind)
            assert_close((U.mT @ vh.mT).abs(), torch.eye(16).expand(2, 16, 16), atol=2e-2, rtol=0)
            share = (s[:, :8].square().sum(1) / s.square().sum(1)).mean().item()
            assert abs(kept_share(second_moments(model, batches)[kind][layer], 0.5) - share) < 1e-4
    assert kept["keys before RoPE"][0.25] != kept["keys"][0.25] and kept["keys"][0.75] > kept["keys"][0.25]


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen3", "gpt_oss"])
def test_at_full_rank_nothing_changes(found, padded, architecture):
    """With padding, grouped heads, a prompt in chunks and single tokens; with a policy that evicts on the way too."""
    model, whole = found(architecture)
    for policy in ([], [SNAPKV(budget=30, observed=4, allocation="ada", decoding=True)]):
        assert_close(in_steps(model, [*policy, whole], *padded), in_steps(model, policy, *padded), **NEAR)


@pytest.mark.parametrize("ranks", [(0.5, 0.5), (0.25, 0.75)])
@pytest.mark.parametrize("storage", [[], [KV_INT(bits=8, group_size=32, residual=4, rotate_keys=True)]], ids=str)
def test_the_kernel_and_the_plain_path_read_the_same(found, tokens, ranks, storage):
    model, half = found("llama", *ranks)
    ids, logits = torch.cat(tokens(2, 75)), {}
    for by_kernel in (True, False):
        with attached(model, [half, *storage]) as attachment:
            cache = attachment.cache()
            cache.by_kernel = by_kernel
            read(model, cache, ids[:, :70])
            with recording() as ran:
                logits[by_kernel] = torch.cat([read(model, cache, ids[:, i : i + 1]) for i in range(70, 75)], 1)
            assert ("kv_decode" in ran) == by_kernel
    assert_close(logits[True], logits[False], rtol=1e-3, atol=1e-3)


def test_the_cache_keeps_projections_and_their_codes():
    """Written out with matrices; heads that keep different numbers have components of their own."""
    torch.manual_seed(0)
    k, v = torch.randn(2, 1, 2, 100, 16)
    U, W = (torch.linalg.qr(torch.randn(2, 16, 16)).Q for _ in range(2))
    keep = torch.ones(1, 2, 100, dtype=torch.bool)
    keep[0, 1, ::2] = False
    for bits in (16, 4):
        precision = Precision(bits, 32, 4, projection=Projection(U[..., :8], W[..., :12]))
        slabs = slabs_of(k, v, keep, precision)
        assert len(slabs) == 2
        for h, slab in enumerate(slabs):
            held = k[:, h : h + 1, keep[0, h]] @ U[h, :, :8], v[:, h : h + 1, keep[0, h]] @ W[h, :, :12]
            if bits == 4:
                full = slab.coded
                assert full == (held[0].shape[2] - 4) // 32 * 32
                coded = dequantize_kv(quantize_kv(*(x[:, :, :full] for x in held), 4, 32))
                held = [torch.cat([c, x[:, :, full:]], 2) for c, x in zip(coded, held, strict=True)]
            dense = slab.dense()
            assert_close(dense[0], held[0] @ U[h, :, :8].T, **NEAR)
            assert_close(dense[1], held[1] @ W[h, :, :12].T, **NEAR)
            assert slab.precision is precision


def test_bytes_fall_with_the_ranks_and_eviction_and_codes(found, tokens):
    model, _ = found()
    ids, rows = torch.cat(tokens(2, 120)), 2 * 2 * 2  # layers, batch, heads
    codes, scales, rest = 2 * 96 * 8 / 2, (3 * 8 + 96) * 4, 2 * 24 * 8 * 4
    for ranks, others, expected in (
        ((0.5, 0.25), [], 120 * (8 + 4) * 4),
        ((0.5, 0.5), [SNAPKV(budget=30)], 30 * (8 + 8) * 4),
        ((0.5, 0.5), [KV_INT(bits=4, group_size=32, residual=0)], codes + scales + rest),
    ):
        with attached(model, [*others, found("llama", *ranks)[1]]) as attachment:
            cache = attachment.cache()
            read(model, cache, ids)
            for _ in range(3):
                before = cache.nbytes
                cache.reorder_cache(torch.tensor([1, 0]))
                assert copy.deepcopy(cache).nbytes == cache.nbytes == before
        assert 0 < cache.nbytes - rows * expected < 16 * rows  # starts, and tokens of each row


def test_caches_share_the_components(found, tokens):
    """In another dtype, too."""
    model, half = found("llama", 0.5, 0.5)
    with attached(model.bfloat16(), [half]) as attachment:
        caches = [attachment.cache() for _ in range(2)]
        for cache in caches:
            read(model, cache, tokens(1, 40)[0])
    for a, b in zip(caches[0].own, copy.deepcopy(caches[1]).own, strict=True):
        own = [layer.slabs[0].projection.keys for layer in (a, b)]
        assert own[0].dtype == torch.bfloat16 and own[0].data_ptr() == own[1].data_ptr()


def test_generation_of_a_padded_batch_is_that_of_its_rows(found, padded):
    model, half = found("llama", 0.5, 0.75)
    ids, mask = padded
    model.generation_config.eos_token_id = None
    more = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    with attached(model, [half, SNAPKV(budget=20, observed=4)]):
        both = model.generate(ids, attention_mask=mask, **more)
        for i, row in enumerate(mask.bool()):
            alone = model.generate(ids[i : i + 1, row], attention_mask=mask[i : i + 1, row], **more)
            assert torch.equal(alone[0, -8:], both[i, -8:])


def test_an_observing_cache_is_projected_as_if_it_had_always_been(found, padded):
    model, half = found("llama", 0.5, 0.5)
    ids, mask = padded
    with attached(model) as attachment:
        observed = attachment.cache(observes=True)
        read(model, observed, ids, mask)
    with attached(model, [half]) as attachment:
        whole = attachment.cache()
        read(model, whole, ids, mask)
        made = observed.compressed(None, None, None, half)
        for a, b in zip(made.own, whole.own, strict=True):
            assert torch.equal(a.slabs[0].k.view, b.slabs[0].k.view) and a.slabs[0].k.view.shape[-1] == 8


@pytest.mark.parametrize("reading", [METHODS["quest"](page=4, full_layers=0, budget=0.3), None], ids=str)
def test_a_made_up_cache_projects_too(found, reading):
    """Its step is timed with fewer channels."""
    model, half = found("llama", 0.5, 0.25)
    with attached(model):
        cache = FilledCache(model, 100, None, None, reading, half).at(60)
        (slab,) = cache.filled[0].slabs
        assert slab.k.view.shape[2:] == (60, 8) and slab.v.view.shape[-1] == 4
        logits = model(torch.tensor([[1]]), past_key_values=cache).logits
    assert logits.isfinite().all() and cache.filled[0].slabs[0].length == 61


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """The embedded model, components of some of its tokens, random ones, and tokens to score."""
    model, tokenizer = load_model("smollm2-135m")
    path = tmp_path_factory.mktemp("components") / "pca.safetensors"
    batches = calibration(tokenizer, corpus="pydocs", samples=2, seqlen=96, seed=0)
    find(model, batches[:1], path)
    seeded = torch.Generator().manual_seed(0)  # this fixture is made before torch is seeded
    random = {
        f"{layer}.{kind}": torch.linalg.qr(torch.randn(3, 64, 64, generator=seeded)).Q.contiguous()
        for layer in range(30)
        for kind in ("keys", "values")
    }
    save_file(random, str(path.with_name("random.safetensors")))
    return model, path, batches[1][:, :64]


@pytest.mark.slow
def test_components_beat_random_directions_and_errors_fall_with_the_rank(real):
    model, path, ids = real
    cache = DynamicCache()
    model(ids[:, :48], past_key_values=cache)
    exact = model(ids[:, 48:], past_key_values=cache).logits.log_softmax(-1)

    def loss(name: str, rank: float) -> float:
        method = MATRYOSHKA(path=str(path.with_name(name)), key_rank=rank, value_rank=rank)
        with attached(model, [method]) as attachment:
            cache = attachment.cache()
            model(ids[:, :48], past_key_values=cache, logits_to_keep=1)
            given = model(ids[:, 48:], past_key_values=cache).logits.log_softmax(-1)
        return (exact.exp() * (exact - given)).sum(-1).mean().item()

    losses = [loss("pca.safetensors", rank) for rank in (0.25, 0.5, 1.0)]
    assert losses == sorted(losses, reverse=True) and losses[-1] < 1e-4
    assert loss("random.safetensors", 0.5) > 3 * losses[1]


def test_saved_with_the_recipe_and_refused_for_another_model(found, tiny, tokens, tmp_path):
    model, half = found("llama", 0.5, 0.5)
    result = apply([METHODS["rtn"](bits=8, group_size=16), SNAPKV(budget=20), half], copy.deepcopy(model))
    save_compressed(result, tmp_path / "saved")
    assert attachment_of(load_compressed(tmp_path / "saved")).projecting == half
    (tmp_path / "none.safetensors").write_bytes(b"{}")
    for method, message in (
        (MATRYOSHKA(), r"`path` \(=''\) of matryoshka must name a file of components"),
        (MATRYOSHKA(path=str(tmp_path / "absent")), "is no file"),
        (MATRYOSHKA(path=str(tmp_path / "none.safetensors")), "holds no components"),
    ):
        with pytest.raises(ValueError, match=message):
            attach(model, [method])
    with pytest.raises(ValueError, match="2 kv heads of 16 channels.*has 4 of 16"):
        attach(tiny("llama", num_key_value_heads=4), [half])
    one = {f"0.{kind}": getattr(components(half.path)[0], kind).contiguous() for kind in ("keys", "values")}
    save_file(one, str(tmp_path / "one.safetensors"))
    with pytest.raises(ValueError, match="no components of layer 1"):
        attach(model, [MATRYOSHKA(path=str(tmp_path / "one.safetensors"))])
    with pytest.raises(ValueError, match="`key_rank` .=0. of matryoshka must be above 0"):
        MATRYOSHKA(key_rank=0.0)
    with pytest.raises(ValueError, match="both decide which channels are kept"):
        apply([half, found("llama", 0.25, 0.5)[1]], model)
    assert [rank_of(share, 64) for share in (0.01, 0.5, 0.53, 1.0)] == [4, 32, 32, 64] and rank_of(1.0, 6) == 6
