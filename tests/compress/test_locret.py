"""Locret: its networks see what attention projects, learn what answers attend to, and score prompts in chunks."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import DynamicCache

from compress import METHODS, apply
from compress.commands.train_kvzap import train as train_kvzap
from compress.commands.train_locret import examples, smooth_loss, train
from compress.kv import attach, attached
from compress.kv.learned.networks import by_layer, scorers

LOCRET = METHODS["locret"]


def read(model, cache, ids, mask=None) -> Tensor:
    mask = torch.ones(len(ids), cache.get_seq_length() + ids.shape[1], dtype=torch.long) if mask is None else mask
    at = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    return model(ids, attention_mask=mask, position_ids=at, past_key_values=cache).logits


@pytest.fixture
def trained(tiny, tokens, tmp_path):
    """A tiny model, and a policy whose networks were trained for it."""

    def make(architecture: str = "llama", **knobs):
        model, path = tiny(architecture), tmp_path / "networks.safetensors"
        train(model, tokens(4, 44), path, epochs=2)
        return model, LOCRET(path=str(path), **{"budget": 12, "sinks": 1, "recent": 3, **knobs})

    return make


@pytest.fixture
def padded(tokens) -> tuple[Tensor, Tensor]:
    return torch.cat(tokens(2, 40)), (torch.arange(40) >= torch.tensor([[0], [9]])).long()


def projected(model, ids) -> list[list[Tensor]]:
    """By layer, what the projections of queries, keys and values give, [n, channels]."""
    found: list[list[Tensor]] = [[] for _ in model.model.layers]
    hooks = [
        getattr(layer.self_attn, name).register_forward_hook(lambda m, args, out, to=found[i]: to.append(out[0]))
        for i, layer in enumerate(model.model.layers)
        for name in ("q_proj", "k_proj", "v_proj")
    ]
    cache = DynamicCache()
    model(ids, past_key_values=cache)
    for hook in hooks:
        hook.remove()
    return found


def test_networks_see_what_is_projected(tiny, tokens):
    """Turned back from RoPE."""
    model, ids = tiny("llama"), tokens(1, 40)[0]
    rows = projected(model, ids)
    for layer, (inputs, target) in by_layer(examples(model, [ids])).items():
        assert inputs.shape == (24, 64 + 2 * 32) and target.shape == (24, 2)  # 30 tokens of a prompt, in whole spans
        assert_close(inputs.float(), torch.cat(rows[layer], -1)[:24], rtol=1e-2, atol=1e-2)


def test_labels_are_the_largest_logits_of_any_head_and_answer_token(tiny, tokens):
    model, ids = tiny("gpt2"), tokens(1, 40)[0]  # without rotations, so that keys and queries are those projected
    rows = []
    hook = model.transformer.h[1].attn.c_attn.register_forward_hook(lambda m, args, out: rows.append(out[0]))
    model(ids)
    hook.remove()
    q, k, _ = (x.unflatten(1, (4, 16)).transpose(0, 1) for x in rows[0].split(64, 1))  # [H, T, D]
    expected = (q[:, 30:] @ k[:, :24].mT).amax(1).T / 4
    assert_close(by_layer(examples(model, [ids]))[1][1], expected, rtol=1e-4, atol=1e-4)


def test_scores_of_neighbours_are_held_together():
    target = torch.zeros(3, 8, 2)
    even, jumping = torch.full((3, 8, 2), 0.1), torch.tensor([0.1, -0.1]).repeat(4)[None, :, None].expand(3, 8, 2)
    assert smooth_loss(even, target).isclose(torch.tensor(0.005))
    assert smooth_loss(jumping, target).isclose(torch.tensor(0.005 + 0.0025 * 0.04))


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3_text"])
def test_a_batch_is_its_rows(trained, padded, architecture):
    """With padding, and while text is generated."""
    model, locret = trained(architecture, decoding=True)
    model, (ids, mask) = model.double(), padded
    model.generation_config.eos_token_id = None
    more = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
    with attached(model, [locret]):
        both = model.generate(ids, attention_mask=mask, **more)
        for i, row in enumerate(mask.bool()):
            alone = model.generate(ids[i : i + 1, row], attention_mask=mask[i : i + 1, row], **more)
            assert torch.equal(alone[0, -10:], both[i, -10:])


def test_chunks_are_scored_once_and_their_last_tokens_stay(trained, padded):
    """Scores of what is kept are those that the projections of the whole prompt give, whatever was evicted."""
    model, locret = trained(budget=1.0, recent=5)
    (ids, mask), rows = padded, {i: [[], []] for i in range(2)}
    for i in range(2):
        for row, keep in enumerate(mask.bool()):
            rows[i][row] = torch.cat(projected(model, ids[row : row + 1, keep])[i], -1)
    with attached(model, [locret]) as attachment:
        cache = attachment.cache(traces=True)
        for begin, end in ((0, 20), (20, 38), (38, 39), (39, 40)):
            read(model, cache, ids[:, begin:end], mask[:, :end])
    first = cache.own[0]  # whose inputs no eviction changes
    for row, (memory, valid) in enumerate(zip(first.memory.view, first.valid, strict=True)):
        expected = scorers(locret.path)[0](rows[0][row]).T
        assert_close(torch.stack([m[v] for m, v in zip(memory, valid, strict=True)]), expected, rtol=1e-3, atol=1e-3)
    _, tight = trained(budget=9, recent=5)
    with attached(model, [tight]) as attachment:
        cache = attachment.cache(traces=True)
        for begin, end in ((0, 20), (20, 40)):
            read(model, cache, ids[:, begin:end], mask[:, :end])
            for layer in cache.own:
                for row, of in enumerate(layer.kept_positions()):
                    tokens = int(mask[row, :end].sum())
                    for kept in of:
                        assert len(kept) == 9 and kept[0] == 0 and kept[-5:].tolist() == list(range(tokens - 5, tokens))


def test_an_observing_cache_is_compressed_as_if_the_policy_had_been_there(trained, padded):
    model, locret = trained()
    ids, mask = padded
    with attached(model) as attachment:
        observed = attachment.cache(observes=True, traces=True)
        read(model, observed, ids, mask)
        found = observed.compressed(locret)
    with attached(model, [locret]) as attachment:
        whole = attachment.cache(traces=True)
        read(model, whole, ids, mask)
    for a, b in zip(found.own, whole.own, strict=True):
        for x, y in zip(a.kept_positions(), b.kept_positions(), strict=True):
            assert all(torch.equal(p, q) for p, q in zip(x, y, strict=True))


def test_locret_composes_and_refuses_networks_of_others(trained, tiny, tokens, padded, tmp_path):
    model, locret = trained()
    other, kvzap = tmp_path / "kvzap.safetensors", tiny("llama")
    train_kvzap(kvzap, tokens(3, 40), other, epochs=1)
    (tmp_path / "none.safetensors").write_bytes(b"{}")
    for path, message in (
        ("", r"`path` \(=''\) of locret must name a file of trained networks"),
        (str(tmp_path / "absent"), "is no file"),
        (str(tmp_path / "none.safetensors"), "holds no trained networks"),
        (str(other), "queries, keys and values of 64 channels.*this one has 128"),
    ):
        with pytest.raises(ValueError, match=message):
            attach(model, [LOCRET(path=path)])
    with pytest.raises(ValueError, match="`allocation`"):
        LOCRET(allocation="global")
    apply([locret, METHODS["kv_int"](), METHODS["quest"](full_layers=0)], model)
    cache = model(padded[0], use_cache=True).past_key_values
    assert cache.policy is locret and torch.stack([one.lengths for one in cache.own]).sum() == 2 * 2 * 2 * 12
