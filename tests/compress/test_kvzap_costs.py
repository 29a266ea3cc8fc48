"""What KVzap's networks may learn: how much the loss can change when a token is lost, to the first order."""

import json

import pytest
import torch
from torch.testing import assert_close
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from compress import METHODS
from compress.commands import train_costs
from compress.commands.train_costs import LEFT, costs, examples, train
from compress.kv import attached, seen
from compress.kv.learned.networks import Fitted, by_layer


def test_a_cost_is_how_far_an_output_moves_times_the_slope_of_the_loss(tiny, tokens):
    """Outputs without a position are computed without it, and slopes by finite differences."""
    model, ids, n, layer = tiny("llama").double(), tokens(1, 12)[0], 12, 1
    module, inputs, moves = model.model.layers[layer].self_attn, [], []
    hidden, cost = costs(model, ids)[layer]

    def moved(_, args):
        inputs.append(args[0])
        return (args[0] + moves[-1],) if moves else None

    hook = module.o_proj.register_forward_pre_hook(moved)
    noted = module.register_forward_pre_hook(lambda m, a, given: inputs.append(given), with_kwargs=True)
    twice = torch.cat([ids, ids], 1)
    logits = model(twice).logits[0, n:].float()
    drawn = torch.multinomial(logits.softmax(-1), 1, generator=torch.Generator().manual_seed(0))[:, 0]
    given, y = inputs[-2], inputs[-1][0].detach()
    assert_close(hidden, given["hidden_states"][0, :n])

    def loss() -> float:
        return -model(twice).logits[0, n:].log_softmax(-1).gather(1, drawn[:, None]).sum().item()

    D = module.head_dim
    H_q = y.shape[-1] // D
    slope = torch.zeros(n, H_q * D, dtype=y.dtype)
    for i in range(n):
        for channel in range(H_q * D):
            move = torch.zeros_like(y)[None]
            move[0, n + i, channel] = 1e-3
            moves.append(move)
            up = loss()
            moves.append(-move)
            slope[i, channel] = (up - loss()) / 2e-3
    hook.remove()
    noted.remove()

    x = given["hidden_states"]
    q, k, v = (p(x).view(1, 2 * n, -1, D).transpose(1, 2) for p in (module.q_proj, module.k_proj, module.v_proj))
    q, k = apply_rotary_pos_emb(q, k, *given["position_embeddings"])
    shared, expected = H_q // k.shape[1], torch.zeros(n, k.shape[1], dtype=y.dtype)
    for h in range(H_q):
        for i in range(n):
            scores = q[0, h, n + i] @ k[0, h // shared, : n + i + 1].T * module.scaling
            weights = scores.softmax(-1)
            for j in range(n):
                without = scores.clone()
                without[j] = -torch.inf
                moved_by = (without.softmax(-1) - weights) @ v[0, h // shared, : n + i + 1]
                by = moved_by.norm() * slope[i, h * D : (h + 1) * D].norm()
                expected[j, h // shared] = max(expected[j, h // shared], by)
                assert weights[j] < 1 - LEFT
    assert_close(cost.double(), expected, rtol=3e-3, atol=1e-6)


def test_attention_is_the_largest_of_the_second_reading(tiny, tokens):
    """Of all heads that share a kv head, as the model's own attention gives it."""
    model, ids = tiny("llama"), tokens(1, 12)[0]
    found = costs(model, ids, target="attention")
    model.set_attn_implementation("eager")
    attentions = model(torch.cat([ids, ids], 1), output_attentions=True).attentions
    for number, (_, largest) in found.items():
        second = attentions[number][0, :, 12:, :12]  # [H_q, 12, 12]
        expected = second.amax(1).unflatten(0, (largest.shape[1], -1)).amax(1).T
        assert_close(largest, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3_text"])
def test_examples_are_of_layers_that_keep_all_positions(tiny, tokens, architecture):
    model, ids = tiny(architecture), tokens(1, 40)[0]
    for p in model.parameters():
        p.requires_grad_(False)
    before = model.config._attn_implementation
    with attached(model) as attachment:
        cache = attachment.cache()
        model(ids, past_key_values=cache)
    found = by_layer(examples(model, [ids, ids]))
    assert sorted(found) == [layer.number for layer in cache.filled]
    for number, (hidden, target) in found.items():
        heads = cache.layers[number].lengths.shape[1]
        assert hidden.shape[0] == 80 and target.shape == (80, heads)
        assert torch.isfinite(target).all() and target.std() > 0
    assert model.config._attn_implementation == before and all(p.grad is None for p in model.parameters())


def test_pieces_of_queries_are_all_of_them(tiny, tokens, monkeypatch):
    model, ids = tiny("llama"), tokens(1, 40)[0]
    whole = costs(model, ids)
    monkeypatch.setattr(seen, "ON_CPU", (1, 7))
    for number, (_, cost) in costs(model, ids).items():
        assert_close(cost, whole[number][1])


def test_the_command_joins_texts_of_corpora(tmp_path, monkeypatch, capsys):
    """So many of each, and the target that was named."""
    given, out = [], tmp_path / "attention.safetensors"
    monkeypatch.setattr(train_costs, "train", lambda _, *more: given.append(more) or {0: Fitted(0.5, 0.25)})
    file = tmp_path / "text.txt"
    file.write_text("\n\n".join(f"The {i}th word of many that are here." for i in range(400)))
    words = ["--model", "tiny", "--out", str(out), "--samples", "3", "--seqlen", "20", "--target", "attention"]
    monkeypatch.setattr("sys.argv", ["train_costs", *words, "--corpus", "pydocs", str(file), "--dtype", "bfloat16"])
    train_costs.main()
    batches, path, target = given[0]
    assert [text.shape for text in batches] == [(1, 20)] * 6 and (path, target) == (str(out), "attention")
    words, line = capsys.readouterr().out.splitlines()
    assert "1 layers, R² 0.500 on average, 0.500 at least, top tenth 0.250" in words
    assert json.loads(line).items() >= {"layers": 1, "explained": 0.5, "overlap": 0.25, "target": "attention"}.items()


def test_a_policy_takes_the_file(tiny, tokens, tmp_path):
    model, path = tiny("llama"), tmp_path / "costs.safetensors"
    train(model, tokens(3, 40), path, epochs=2)
    with attached(model, [METHODS["kvzap"](path=str(path), budget=12, sinks=1, recent=2)]) as attachment:
        cache = attachment.cache()
        model(tokens(1, 40)[0], past_key_values=cache)
    assert sum(int(layer.lengths.sum()) for layer in cache.filled) == 12 * sum(
        layer.lengths.numel() for layer in cache.filled
    )
