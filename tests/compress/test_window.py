"""Models on disk that decode: outputs, what is in memory, and what reads nothing twice."""

import pytest
import torch

from compress import apply, load_model, save_compressed
from compress.walk.offload import offloaded_parts, put_on_disk
from compress.walk.window import _Ahead, in_window, plan_window
from kernels.linear import fast_linear
from kernels.registry import recording

LAYERS = 6


@pytest.fixture
def model(tiny):
    return tiny("llama", num_hidden_layers=LAYERS)


def written(model, tokens, **how):
    return model.generate(torch.cat(tokens), max_new_tokens=6, min_new_tokens=6, do_sample=False, **how)


def sizes_of(model):
    return {name: part.nbytes for name, part in offloaded_parts(model).items() if not part.is_table}


@pytest.mark.parametrize("blocks", [2, 3, 5])
def test_a_model_on_disk_writes_what_it_writes_in_memory(blocks, model, tokens, monkeypatch):
    """With memory for so many blocks: never more, and every other block is read once in a pass."""
    prompts = tokens(2, 20)
    expected = written(model, prompts)
    put_on_disk(model)
    parts, sizes = offloaded_parts(model), sizes_of(model)
    block, head = max(sizes.values()), sizes["lm_head"]
    most = blocks * block + head + 2000
    seen = []
    read = _Ahead._read

    def watched(self, where):
        inside = sum(sizes[name] for name, part in parts.items() if part._depth and name in sizes)
        seen.append((self._name, inside + sizes[self._name]))
        return read(self, where)

    monkeypatch.setattr(_Ahead, "_read", watched)
    with in_window(model, most) as window:
        assert torch.equal(written(model, prompts), expected)
        assert window.peak_bytes <= most and max(size for _, size in seen) <= window.peak_bytes
    order = [name for name, _ in seen]
    away = list(window.streamed)
    assert len(away) >= LAYERS - blocks + 1 and order == (away * 7)[: len(order)]
    assert len(order) - 6 * len(away) in (0, 1), "the first read of a seventh pass may be called off"
    assert window.read_bytes == sum(sizes[name] for name in order) and set(away).isdisjoint(window.held)
    assert all(part.ahead is None and not part._depth for part in parts.values()), "as before"
    assert torch.equal(written(model, prompts), expected)


@torch.no_grad()
@pytest.mark.parametrize("emulated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_those_of_memory_with_the_same_products(dtype, emulated, model, tokens, monkeypatch):
    """For a token and for a prompt, bit by bit; products that a processor only emulates are not left to torch."""
    monkeypatch.setattr("kernels.linear.emulates", lambda _: emulated)
    model, prompts = model.to(dtype), (tokens(1, 20)[0], tokens(1, 1)[0])
    with fast_linear():
        expected = [model(ids).logits for ids in prompts]
    put_on_disk(model)
    sizes = sizes_of(model)
    with in_window(model, 2 * max(sizes.values()) + sizes["lm_head"] + 2000) as window, recording() as used:
        assert window.streamed
        assert all(torch.equal(model(ids).logits, one) for ids, one in zip(prompts, expected, strict=True))
    assert ("cpu float32" in used["linear"]) == (emulated and dtype == torch.bfloat16)


def test_everything_stays_where_it_fits(model, tokens):
    expected = written(model, tokens(1, 10))
    put_on_disk(model)
    with in_window(model, "1GB") as window:
        assert not window.streamed and window.streamed_bytes == 0
        assert torch.equal(written(model, tokens(1, 10)), expected) and window.read_bytes == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
@pytest.mark.parametrize("where", ["computing", "waiting", "reading"])
def test_a_pass_that_ends_in_the_middle_spoils_nothing(where, error, model, tokens, monkeypatch):
    expected = written(model, tokens(1, 10))
    put_on_disk(model)
    sizes, parts = sizes_of(model), offloaded_parts(model)

    def stop(*_):
        raise error

    def stops_at(number, patch):
        if where == "computing":
            patch.setattr(model.model.layers[number].mlp, "forward", stop)
            return
        method = {"reading": "_read", "waiting": "__call__"}[where]
        own = getattr(_Ahead, method)

        def called(self, *given):
            return stop() if self._name == f"model.layers.{number}" else own(self, *given)

        patch.setattr(_Ahead, method, called)

    with in_window(model, 2 * max(sizes.values()) + sizes["lm_head"] + 2000) as window:
        for number in (1, 3, 5):
            with monkeypatch.context() as patch, pytest.raises(error):
                stops_at(number, patch)
                written(model, tokens(1, 10))
        assert torch.equal(written(model, tokens(1, 10)), expected)
        loaded = sum(sizes[name] for name, part in parts.items() if part._depth and name in sizes)
        assert loaded == window.held_bytes, "nothing is left behind"
        with monkeypatch.context() as patch, pytest.raises(error):
            patch.setattr(model.model.norm, "forward", stop)
            written(model, tokens(1, 10))
    assert not any(part._depth for part in parts.values())
    assert torch.equal(written(model, tokens(1, 10)), expected)


@pytest.mark.parametrize(
    "recipe", ["gptq(bits=4, group_size=16)", pytest.param("sparsegpt(ratio=0.5)", marks=pytest.mark.slow)]
)
def test_compressed_models_on_disk_decode(recipe, model, tokens, tmp_path):
    result = apply(recipe, model, tokens(4, 32))
    save_compressed(result, tmp_path / "saved", load_model("tiny")[1])
    expected = written(load_model(str(tmp_path / "saved"))[0], tokens(2, 12))
    small, _ = load_model(str(tmp_path / "saved"), weights="disk")
    with in_window(small, sum(sizes_of(small).values()) // 2) as window:
        assert window.streamed and torch.equal(written(small, tokens(2, 12)), expected)


def test_blocks_that_stay_are_spread_evenly():
    window = plan_window({f"{i}": 100 for i in range(8)} | {"norm": 1, "head": 500}, 100 * 4 + 100 * 2 + 501)
    assert window.held == ("1", "3", "5", "7", "norm", "head") and window.streamed == ("0", "2", "4", "6")
    assert (window.held_bytes, window.streamed_bytes, window.peak_bytes) == (901, 400, 1101)
    assert window.seconds(bandwidth=200, computing=1.0) == 2.0 and window.seconds(bandwidth=800, computing=1.0) == 1.0
    assert plan_window({"a": 100, "b": 300, "c": 100}, 1000).streamed == ()


def test_what_cannot_be_held_is_refused(model, tiny):
    with pytest.raises(ValueError, match="`model` is in memory"), in_window(model, "1GB"):
        pass
    put_on_disk(model)
    with pytest.raises(ValueError, match=r"`max_memory` \(=1000 bytes\).*GB are needed"), in_window(model, 1000):
        pass
    with pytest.raises(ValueError, match="`max_memory` must be a number"), in_window(model, ""):
        pass
    with pytest.raises(ValueError, match=r"`max_memory` \(='much'\)"), in_window(model, "much"):
        pass
    assert all(part.ahead is None for part in offloaded_parts(model).values())
