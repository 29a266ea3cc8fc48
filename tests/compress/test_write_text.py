"""Texts that a model writes: drawn as it predicts them, the same for a seed, and a corpus like any other."""

import sys

import pytest
import torch

from compress import calibration, load_model
from compress.commands import write_text
from compress.commands.write_text import texts
from compress.inputs.corpus import load_text


@pytest.fixture
def peaked():
    model, tokenizer = load_model("tiny")
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(3 / head.in_features**0.5 * torch.randn_like(head.weight))
    return model, tokenizer


def test_tokens_are_as_probable_as_the_model_predicts_them(peaked):
    """Then the mean of -log p of what was drawn is the mean entropy of the predictions."""
    model, tokenizer = peaked
    surprise, entropy = [], []
    for ids in texts(model, tokenizer, samples=40, seqlen=24):
        with torch.no_grad():
            logp = model(ids[None]).logits[0, :-1].double().log_softmax(-1)
        surprise.append(-logp.gather(-1, ids[1:, None])[:, 0])
        entropy.append(-(logp.exp() * logp).sum(-1))
    surprise, entropy = torch.cat(surprise), torch.cat(entropy)
    assert entropy.mean() < 9.5, "well below that of equal probabilities, 10.8"
    assert abs(surprise.mean() - entropy.mean()) < 4 * surprise.std() / len(surprise) ** 0.5 < 0.5


def test_a_seed_gives_the_same_texts_and_leaves_the_generators_alone(peaked):
    state = torch.random.get_rng_state()
    one, same, other, more = (
        [ids.tolist() for ids in texts(*peaked, samples=count, seqlen=8, seed=seed)]
        for count, seed in ((18, 0), (18, 0), (18, 1), (33, 0))
    )
    assert one == same and len(one) == 18 and one[:16] == more[:16]
    assert not {*map(tuple, one)} & {*map(tuple, other)} and len({*map(tuple, one)}) == 18
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_text_ends_where_the_model_ends_it(peaked):
    model, tokenizer = peaked
    ids = max(texts(model, tokenizer, samples=4, seqlen=24), key=len)
    model.generation_config.eos_token_id = [int(ids[5]), 2]
    cut = [other for other in texts(model, tokenizer, samples=4, seqlen=24) if torch.equal(other, ids[: len(other)])]
    assert [len(other) for other in cut] == [5]
    with pytest.raises(ValueError, match=r"`seqlen` \(=1\) must be at least 2 for this tokenizer"):
        next(texts(model, tokenizer, samples=1, seqlen=1))


def test_the_file_is_a_corpus(tmp_path, monkeypatch, capsys):
    path = tmp_path / "written.jsonl"
    options = ["--model", "tiny", "--out", str(path), "--samples", "20", "--seqlen", "32"]
    monkeypatch.setattr(sys, "argv", ["write_text", *options])
    write_text.main()
    assert f"{path}: 20 texts" in capsys.readouterr().out
    parts = [load_text(str(path), part) for part in ("calibration", "evaluation")]
    assert sum(map(len, parts)) == 20 and all(parts)
    _, tokenizer = load_model("tiny")
    assert len(calibration(tokenizer, corpus=str(path), samples=4, seqlen=32)) == 4
