"""Squared gradients block by block, against autograd on the whole model in float64."""

import copy
import gc
import tempfile

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers.pytorch_utils import Conv1D

from compress import METHODS, apply
from compress.walk.blocks import targets
from compress.walk.experts import split_experts
from compress.walk.fisher import fisher
from compress.walk.offload import put_on_disk
from compress.walk.resume import BlockStore

CPU = torch.device("cpu")


def plainly(model, batches, names):
    """One backward pass through the whole model for each window."""
    model = copy.deepcopy(model).double().requires_grad_(True)
    sums = {name: 0.0 for name in names}
    for batch in batches:
        model.zero_grad()
        cross_entropy(model(batch).logits[0, :-1], batch[0, 1:], reduction="sum").backward()
        for name in names:
            module = model.get_submodule(name)
            if module.weight.grad is not None:
                g = module.weight.grad.t() if isinstance(module, Conv1D) else module.weight.grad
                sums[name] = sums[name] + g**2
    return {name: F / sum(batch.shape[1] - 1 for batch in batches) for name, F in sums.items()}


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3_text", "qwen3_moe"])
def test_gradients_are_those_of_the_whole_model(tiny, tokens, tmp_path, architecture):
    model = tiny(architecture)
    for block in model.modules():
        if hasattr(block, "self_attn"):
            split_experts(block)
    batches = [*tokens(3, 12), *tokens(2, 9, seed=2)]
    found = fisher(model, batches, device=CPU, folder=tmp_path)
    names = {module: name for name, module in model.named_modules()}
    embedding, head = names[model.get_input_embeddings()], names[model.get_output_embeddings()]
    expected = plainly(model, batches, [*targets(model), embedding, head])
    assert set(targets(model)) <= set(found) and {embedding, head} <= set(found)
    for name, F in expected.items():
        torch.testing.assert_close(found[name].double(), F, rtol=2e-3, atol=1e-5 * float(F.mean()) + 1e-12)
    assert not any(p.requires_grad for p in model.parameters()), "as it was"


def test_weights_on_disk_and_tied_ones_give_the_same(tiny, tokens, tmp_path):
    for tie in (True, False):
        model, batches = tiny("llama", tie_word_embeddings=tie), tokens(2, 10)
        found = fisher(model, batches, device=CPU)
        on_disk = fisher(put_on_disk(copy.deepcopy(model)), batches, device=CPU, folder=tmp_path)
        assert set(on_disk) == set(found) and len(found) == 16
        for name, F in found.items():
            torch.testing.assert_close(on_disk[name], F, rtol=1e-4, atol=1e-9)


def test_temporary_matrices_do_not_outlive_their_process(tiny, tokens, tmp_path, monkeypatch):
    """They lie in a `WorkFolder`, which is removed with the result, and after a kill by the next process."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = fisher(tiny("llama"), tokens(1, 10), device=CPU)
    (folder,) = tmp_path.iterdir()
    assert (folder / "lock").is_file() and folder in found.store.folder.parents
    del found
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_a_pass_that_was_killed_goes_on_and_a_finished_one_is_read(tiny, tokens, tmp_path, monkeypatch):
    model, batches = tiny("llama", num_hidden_layers=3), tokens(2, 10)
    whole = {name: F for name, F in fisher(model, batches, device=CPU).items()}
    put, kept = BlockStore.put, []

    def killed(self, index, *rest):
        if index == 2:
            raise KeyboardInterrupt
        kept.append(index)
        return put(self, index, *rest)

    monkeypatch.setattr(BlockStore, "put", killed)
    with pytest.raises(KeyboardInterrupt):
        fisher(model, batches, device=CPU, folder=tmp_path)
    monkeypatch.setattr(BlockStore, "put", lambda self, index, *rest: (kept.append(index), put(self, index, *rest))[1])
    again = fisher(model, batches, device=CPU, folder=tmp_path)
    assert kept == [0, 1, 2, 3] and all(torch.equal(again[name], F) for name, F in whole.items())
    monkeypatch.setattr(BlockStore, "put", None)
    assert set(fisher(model, batches, device=CPU, folder=tmp_path)) == set(whole)


def test_bad_input(tiny, tokens):
    with pytest.raises(ValueError, match="`batches` must hold windows of at least 2 tokens"):
        fisher(tiny("llama"), tokens(1, 1), device=CPU)
    with pytest.raises(ValueError, match="`model` holds model.layers.0.self_attn.q_proj compressed"):
        fisher(apply([METHODS["rtn"](group_size=16)], tiny("llama")).model, tokens(1, 4), device=CPU)
