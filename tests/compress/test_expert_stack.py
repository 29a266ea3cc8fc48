"""Experts whose weights are stored in integers: all of a layer in two products, and one by one where that must be."""

import copy

import pytest
import torch

from compress import METHODS, apply, load_compressed, save_compressed
from compress.linear import CompressedLinear
from compress.walk.experts import SplitExperts, stack
from kernels.registry import recording


@pytest.fixture
def grouped(monkeypatch):
    """Stacks on a CPU, too: the op's reference stands for its kernel, and weights stay in rows."""
    monkeypatch.setattr(stack, "pays", lambda x: True)
    monkeypatch.setattr(stack, "takes", lambda w, dtype, device: True)
    monkeypatch.setattr("compress.formats.int_group.panels_fit", lambda *_: False)
    monkeypatch.setattr("compress.formats.int_group.tiles_fit", lambda *_: False)


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe", "qwen2_moe"])
def test_all_experts_at_once_give_what_each_gives(tiny, tokens, grouped, monkeypatch, architecture):
    model, ids = tiny(architecture), tokens(1, 30)[0]
    apply([METHODS["rtn"](bits=4, group_size=16)], model, tokens())
    with monkeypatch.context() as patched:
        patched.setattr(stack, "pays", lambda x: False)
        expected = model(ids).logits
    with recording() as used:
        logits = model(ids).logits
    assert used["expert_matmul"] == {"reference"} and torch.allclose(logits, expected, atol=1e-4)
    experts = next(m for m in model.modules() if isinstance(m, SplitExperts))
    held = [linear.parts[0].codes for linear in experts.down_proj]
    assert len({codes.untyped_storage().data_ptr() for codes in held}) == 1, "no weight is stored twice"
    again = copy.deepcopy(model)
    assert torch.equal(again(ids).logits, logits)
    assert torch.equal(model.to(torch.float32)(ids).logits, logits)
    state = model.state_dict()
    assert torch.equal(state[next(n for n in state if n.endswith("down_proj.1.parts.0.codes"))], held[1])


@torch.no_grad()
def test_experts_that_share_a_tensor_are_saved_and_loaded(tiny, tokens, grouped, tmp_path):
    model, ids = tiny("qwen3_moe"), tokens(1, 30)[0]
    result = apply([METHODS["rtn"](bits=4, group_size=16)], model, tokens())
    expected = result.model(ids).logits
    with recording() as used:
        loaded = load_compressed(save_compressed(result, tmp_path / "saved"))
        assert torch.allclose(loaded(ids).logits, expected, atol=1e-5)
    assert "expert_matmul" in used


@torch.no_grad()
def test_a_replaced_expert_and_a_watched_one_are_seen(tiny, tokens, grouped):
    model, ids = tiny("mixtral"), tokens(1, 30)[0]
    apply([METHODS["rtn"](bits=4, group_size=16)], model, tokens())
    before = model(ids).logits
    experts = next(m for m in model.modules() if isinstance(m, SplitExperts))
    seen = []
    handle = experts.down_proj[0].register_forward_pre_hook(lambda m, args: seen.append(args[0].shape))
    watched = model(ids).logits
    handle.remove()
    assert seen and torch.allclose(watched, before, atol=1e-4)
    part = experts.down_proj[0].parts[0]
    other = type(part)(part.integers._replace(scale=50 * part.integers.scale))
    experts.down_proj[0] = CompressedLinear([other], None, dtype=torch.float32)
    changed = model(ids).logits
    assert not torch.allclose(changed, before, atol=1e-3)
    experts.down_proj[0] = CompressedLinear([part], None, dtype=torch.float32)
    assert torch.allclose(model(ids).logits, before, atol=1e-6)
