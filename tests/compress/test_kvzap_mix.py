"""Networks mixed out of several: what they predict is the mean of what those predict."""

import pytest
import torch
from torch.testing import assert_close

from compress import METHODS
from compress.kv import attached
from compress.kv.learned.mix import main, mix
from compress.kv.learned.networks import ScoringNetwork, scorers, write


def network(width: int, inputs: int = 16, heads: int = 2) -> ScoringNetwork:
    shapes = ((inputs,), (inputs,), (inputs, width), (width,), (width, heads), (heads,))
    return ScoringNetwork(
        *(torch.rand(shape) + 0.5 if i == 1 else torch.randn(shape) for i, shape in enumerate(shapes))
    )


@pytest.mark.parametrize("weights", [None, [0.25, 0.75]])
def test_predictions_are_the_mean_of_all(tmp_path, weights):
    files, out = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"], tmp_path / "mixed.safetensors"
    for file, width in zip(files, (4, 7), strict=True):
        write({1: network(width), 3: network(width)}, file)
    mix(files, out, weights)
    x, (a, b), found = torch.randn(5, 16), (scorers(str(file)) for file in files), scorers(str(out))
    assert list(found) == [1, 3] and found[1].up.shape == (16, 11)
    first, second = weights or (0.5, 0.5)
    for layer, one in found.items():
        assert_close(one(x), first * a[layer](x) + second * b[layer](x), rtol=1e-4, atol=1e-4)


def test_the_command_writes_what_the_policy_takes(tmp_path, tiny, tokens, monkeypatch, capsys):
    model, files, out = tiny("llama"), [tmp_path / f"{i}.safetensors" for i in range(3)], tmp_path / "mixed.safetensors"
    config = model.config
    for file in files:
        sizes = (config.hidden_size, config.num_key_value_heads)
        write({i: network(4, *sizes) for i in range(config.num_hidden_layers)}, file)
    monkeypatch.setattr("sys.argv", ["mix", "--out", str(out), *map(str, files)])
    main()
    assert "of 3 files" in capsys.readouterr().out
    with attached(model, [METHODS["kvzap"](budget=0.25, path=str(out), recent=2, sinks=1)]) as attachment:
        cache = attachment.cache()
        model(tokens(1, 40)[0], past_key_values=cache)
    kept = sum(int(layer.lengths.sum()) for layer in cache.own)
    assert kept == 10 * config.num_hidden_layers * config.num_key_value_heads


def test_networks_of_other_models_are_refused(tmp_path):
    files = [tmp_path / f"{i}.safetensors" for i in range(2)]
    write({0: network(4)}, files[0])
    write({0: network(4, inputs=24)}, files[1])
    with pytest.raises(ValueError, match="1.safetensors holds networks of another model"):
        mix(files, tmp_path / "mixed.safetensors")
    with pytest.raises(ValueError, match=r"`weights` \(=\[1.0\]\) must be as many"):
        mix(files, tmp_path / "mixed.safetensors", [1.0])
    with pytest.raises(ValueError, match="1 at least"):
        mix([], tmp_path / "mixed.safetensors")
