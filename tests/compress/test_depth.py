"""The work of every block: what it adds, and what the model loses without it; and blocks left out at even distances."""

import math

import pytest
import torch

from compress import METHODS, apply
from compress.pruning.depth import TOKENS, check_depth, measure_depth
from compress.pruning.layer_drop import importance
from compress.pruning.layer_skip import skipped_blocks
from compress.walk.blocks import find_blocks
from compress.walk.capture import block_calls
from eval.record.compression import DepthRow


def kl(expected, logits):
    whole = expected.log_softmax(-1)
    return (whole.exp() * (whole - logits.log_softmax(-1))).sum(-1).mean().item()


def test_the_rows_say_what_dropped_blocks_show(tiny, tokens):
    model, batches = tiny("llama", num_hidden_layers=4), tokens(2, 32)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    rows = measure_depth(model, batches).rows
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    text, (_, blocks) = torch.cat(batches), find_blocks(model)
    with torch.no_grad():
        expected = model(text).logits
        turned = importance(blocks, block_calls(model, blocks, batches), torch.device("cpu"), kinds=("block",))
        for row, score in zip(rows, turned, strict=True):
            dropped = tiny("llama", num_hidden_layers=4)
            apply([METHODS["layer_drop"](target="block", layers=str(row.block))], dropped, batches)
            assert row.output == pytest.approx(kl(expected, dropped(text).logits), rel=1e-3)
            assert row.turned == pytest.approx(score.importance, rel=1e-3, abs=1e-6)
    assert rows[-1].lens == pytest.approx(0, abs=1e-6) and rows[-1].lens_agreement == 1 and rows[-1].later is None
    assert rows[-2].lens == pytest.approx(rows[-1].output, rel=1e-3)  # both leave out the last block
    assert all(row.later > 0 and 0 < row.attention < 10 and 0 < row.mlp < 10 for row in rows[:-1])


def test_blocks_of_every_kind_have_rows(any_model, tokens):
    rows = measure_depth(any_model, tokens(2, 16)).rows
    assert len(rows) == len(find_blocks(any_model)[1])
    for row in rows:
        assert all(value is None or math.isfinite(value) and abs(value) < 1e4 for value in vars(row).values())
        assert row.attention is not None or row.mlp is not None


def test_tokens_without_a_stream_are_left_out(tiny):
    """The embedding of padding is 0, and nothing has a share of it."""
    model = tiny("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = 0
    ids = torch.tensor([[1, 2, 7, 3, 7, 4]])
    rows = measure_depth(model, [ids]).rows
    assert all(0 < row.attention < 100 and 0 < row.mlp < 100 for row in rows)


def test_a_model_that_does_not_run_without_a_block_has_no_rows_and_the_reason(tiny, tokens):
    """Its second block refuses the stream that it gets if the first one is skipped."""
    model, ids = tiny("llama"), tokens(1, 16)[0]
    embedded = model.model.embed_tokens(ids)

    def refuse(_, args):
        if torch.equal(args[0], embedded):
            raise RuntimeError("another stream was expected")

    model.model.layers[1].register_forward_pre_hook(refuse)
    with pytest.warns(UserWarning, match="could not be measured .RuntimeError: another stream was expected"):
        assert measure_depth(model, [ids]).found() is None


def test_no_windows_are_no_rows(tiny, tokens):
    nothing = measure_depth(tiny("llama"), tokens(2, 16), 0)
    assert nothing.rows == [] and nothing.found() is None
    for wrong in (-1, 1.5, True):
        with pytest.raises(ValueError, match="`depth_windows` .* must be a number of calibration windows"):
            check_depth(wrong)
    long = measure_depth(tiny("llama"), [torch.zeros(1, TOKENS + 8, dtype=torch.long)], 1)
    assert len(long.rows) == 2 and isinstance(long.rows[0], DepthRow)


@pytest.mark.parametrize(
    ("count", "speed", "skipped"),
    [(30, 1.25, [2, 7, 12, 17, 22, 27]), (4, 1.3, [1]), (4, 2.0, [1, 2]), (2, 1.4, [1]), (30, 1.01, [])],
)
def test_skipped_blocks_are_evenly_spaced(count, speed, skipped):
    assert skipped_blocks(count, speed) == skipped


def test_skipping_is_dropping_these_blocks(tiny, tokens):
    ids, models = tokens(1, 16)[0], []
    for method in (METHODS["layer_skip"](speed=2.0), METHODS["layer_drop"](target="block", layers="1, 2")):
        models.append(tiny("llama", num_hidden_layers=4))
        result = apply([method], models[-1], tokens(2, 16))
        assert [drop.block for drop in result.drops if drop.order] == [1, 2]
    assert models[0].config.num_hidden_layers == 2 and torch.equal(models[0](ids).logits, models[1](ids).logits)
    with pytest.raises(ValueError, match=r"`speed` \(=1\.01\) of layer_skip leaves out none of 2 blocks: .* 1\.33 for"):
        apply("layer_skip(speed=1.01)", tiny("llama"), tokens(2, 16))
