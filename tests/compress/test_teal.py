"""The smallest inputs of linears become 0, as many as were asked for."""

import pytest
import torch

from compress import METHODS, apply, load_compressed, save_compressed
from compress.linear import compressed_linears
from compress.recipe import parse_recipe
from compress.transforms import Threshold, parted

TEAL = METHODS["teal"]


@pytest.mark.parametrize("before", ["", "rtn(bits=8, group_size=16), "])
def test_the_asked_share_becomes_0_and_comes_back_from_disk(before, tiny, tokens, tmp_path):
    model, batches = tiny("llama"), tokens(8, 32)
    result = apply(parse_recipe(f"{before}teal(ratio=0.3)"), model, batches)
    shares = {}

    def count(name):
        return lambda module, args, out: shares.setdefault(name, []).append((out == 0).float().mean().item())

    for name, linear in compressed_linears(model).items():
        parted(linear.transform)[0][-1].register_forward_hook(count(name))
    ids = tokens(4, 32)[3]
    logits = model(ids).logits
    assert len(shares) == 14 and all(0.15 < sum(one) / len(one) < 0.45 for one in shares.values()), shares
    assert sum(one[-1] for one in shares.values()) / 14 == pytest.approx(0.3, abs=0.03)
    again = load_compressed(save_compressed(result, tmp_path / "out"))
    assert torch.equal(again(ids).logits, logits)
    assert all("become 0" in " ".join(layer.notes) for layer in result.layers)


def test_a_larger_share_loses_more_and_none_loses_nothing(tiny, tokens):
    ids, losses = tokens(2, 32)[1], []
    expected = tiny("llama")(ids).logits
    for ratio in (0.0, 0.2, 0.5):
        model = tiny("llama")
        apply([TEAL(ratio=ratio)], model, tokens(4, 32))
        losses.append((model(ids).logits - expected).norm().item())
    assert losses[0] < 1e-4 * expected.norm() and losses[0] < losses[1] < losses[2]


def test_bad_input():
    with pytest.raises(ValueError, match=r"`where` \(='embedding'\) of teal must be 'blocks'"):
        TEAL(where="embedding")
    with pytest.raises(ValueError, match=r"`ratio` .*1\.0"):
        TEAL(ratio=1.0)
    for wrong in (torch.tensor(-1.0), torch.tensor(torch.nan), torch.ones(2)):
        with pytest.raises(ValueError, match="a stored threshold is not a number of 0 or more"):
            Threshold.from_tensors({}, {"limit": wrong})
