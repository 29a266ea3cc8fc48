"""KVzap: its networks learn KVzip's scores, and score positions wherever and however they come."""

import copy

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from compress import METHODS, apply
from compress.commands.train_kvzap import examples, train
from compress.kv import CompressedCache, attach, attached
from compress.kv.learned.networks import by_layer, fit, scorers
from compress.kv.storage import joined


def read(model, cache, ids, mask=None) -> Tensor:
    mask = torch.ones(len(ids), cache.get_seq_length() + ids.shape[1], dtype=torch.long) if mask is None else mask
    at = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    return model(ids, attention_mask=mask, position_ids=at, past_key_values=cache).logits


@pytest.fixture
def trained(tiny, tokens, tmp_path):
    """A tiny model, and a policy whose networks were trained for it."""

    def make(architecture: str = "llama", **knobs):
        model, path = tiny(architecture), tmp_path / "networks.safetensors"
        train(model, tokens(3, 40), path, epochs=2)
        return model, METHODS["kvzap"](path=str(path), sinks=1, recent=2, **{"budget": 12, **knobs})

    return make


@pytest.fixture
def padded(tokens) -> tuple[Tensor, Tensor]:
    return torch.cat(tokens(2, 40)), (torch.arange(40) >= torch.tensor([[0], [9]])).long()


def test_examples_are_what_attention_reads_and_kvzip_scores(tiny, tokens):
    model, ids, inputs = tiny("llama"), tokens(1, 40)[0], []
    hooks = [layer.self_attn.register_forward_pre_hook(
        lambda m, args, kwargs: inputs.append(kwargs["hidden_states"][0]), with_kwargs=True)
        for layer in model.model.layers]  # fmt: skip
    model(ids)
    for hook in hooks:
        hook.remove()
    with attached(model, [METHODS["kvzip"](budget=1.0)]) as attachment:
        cache = attachment.cache()
        read(model, cache, ids)
    for layer, (hidden, target) in by_layer(examples(model, [ids])).items():
        assert_close(hidden.float(), inputs[layer], rtol=1e-2, atol=1e-2)
        assert_close(target, cache.own[layer].memory.view[0].T.clamp(min=1e-6).log(), rtol=1e-4, atol=1e-4)


def test_a_network_learns_what_can_be_learned():
    torch.manual_seed(0)
    hidden = torch.randn(3000, 16) * 3 + 1
    target = torch.tanh(hidden[:, :2] - 1) + 0.3 * hidden[:, 2:4]
    _, explained = fit(hidden, target, width=16, epochs=40)
    _, noise = fit(hidden, torch.randn(3000, 2), width=16, epochs=1)
    assert explained.explained > 0.8 and noise.explained < 0.1


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3_text"])
def test_a_batch_is_its_rows(trained, padded, architecture):
    """With padding, in chunks, and while text is generated."""
    for allocation, decoding in (("uniform", False), ("global", True)):
        model, kvzap = trained(architecture, allocation=allocation, decoding=decoding)
        model, (ids, mask) = model.double(), padded
        model.generation_config.eos_token_id = None
        more = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
        with attached(model, [kvzap]):
            both = model.generate(ids, attention_mask=mask, **more)
            for i, row in enumerate(mask.bool()):
                alone = model.generate(ids[i : i + 1, row], attention_mask=mask[i : i + 1, row], **more)
                assert torch.equal(alone.sequences[0, -10:], both.sequences[i, -10:])


def test_every_position_keeps_its_score(trained, tokens, padded):
    """Also those of tokens that were written one at a time, and those that a beam or a copy carried along."""
    model, kvzap = trained(budget=1.0)
    (ids, mask), inputs = padded, {}
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.register_forward_pre_hook(
            lambda m, args, kwargs, n=number: inputs.setdefault(n, []).append(kwargs["hidden_states"]),
            with_kwargs=True,
        )
    with attached(model, [kvzap]) as attachment:
        cache = attachment.cache()
        read(model, cache, ids, mask)
        for i in range(3):
            mask = torch.cat([mask, mask[:, -1:]], 1)
            read(model, cache, ids[:, i : i + 1], mask)
        copied = copy.deepcopy(cache)
        copied.reorder_cache(torch.tensor([1, 0]))
    for layer, other in zip(cache.own, copied.own, strict=True):
        expected = scorers(kvzap.path)[layer.number](torch.cat(inputs[layer.number], 1)).transpose(1, 2)
        valid = layer.valid
        assert_close(layer.memory.view[valid], expected[valid], rtol=1e-3, atol=1e-3)
        assert torch.equal(other.memory.view, layer.memory.view.flip(0))


def test_an_observing_cache_is_compressed_as_if_the_policy_had_been_there(trained, padded):
    model, kvzap = trained()
    ids, mask = padded
    with attached(model) as attachment:
        observed = attachment.cache(observes=True)
        for begin, end in ((0, 30), (30, 40)):
            read(model, observed, ids[:, begin:end], mask[:, :end])
        found, whole = observed.compressed(kvzap), CompressedCache(model, kvzap)
        read(model, whole, ids, mask)
        for a, b in zip(found.own, whole.own, strict=True):
            assert torch.equal(a.lengths, b.lengths) and a.lengths.max() < 40 and a.hidden is None
            assert_close(joined(a.slabs), joined(b.slabs), rtol=1e-4, atol=1e-4)


def test_kvzap_composes_with_storage_and_reading_in_a_recipe(trained, padded):
    model, kvzap = trained()
    apply([kvzap, METHODS["kv_int"](), METHODS["quest"](full_layers=0)], model)
    cache = model(padded[0], use_cache=True).past_key_values
    assert cache.policy is kvzap and torch.stack([one.lengths for one in cache.own]).sum() == 2 * 2 * 2 * 12


def test_a_file_of_another_model_is_refused_before_any_work(trained, tiny, tmp_path):
    _, kvzap = trained()
    other = tiny("llama", hidden_size=32)
    for policy, model, message in (
        (METHODS["kvzap"](), other, r"`path` \(=''\) of kvzap must name a file"),
        (METHODS["kvzap"](path=str(tmp_path / "none")), other, "is no file"),
        (kvzap, other, "hidden states of 64 channels.*has 32"),
    ):
        for refuse in (lambda p=policy, m=model: attach(m, [p]), lambda p=policy, m=model: apply([p], m)):
            with pytest.raises(ValueError, match=message):
                refuse()
