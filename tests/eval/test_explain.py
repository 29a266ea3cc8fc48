"""`workbench explain`: the parts of a decoding step, their bytes and times, and what is said of them."""

from dataclasses import asdict
from functools import partial

import pytest
import torch

from compress import apply, load_model, save_compressed
from compress.linear import sharing_copy
from eval.record.rows import typed
from eval.record.speed import StepPart
from eval.record.steps import (
    ATTENTION,
    BESIDE,
    Explanation,
    PredictedPart,
    PredictedStep,
    Prediction,
    PromptExplanation,
    PromptPart,
    PromptTimes,
    StepTimes,
)
from eval.speed.cost import predict_step
from eval.speed.explain import explain, explain_prompts
from eval.speed.step_parts import time_parts
from eval.speed.work import work
from kernels import native
from kernels.harness import roofline
from kernels.harness.roofline import Ceilings
from notebooks.batch.cli import main
from reports.page import resources
from reports.page.render import page
from tests.architectures import tiny_model

RECIPE = "rtn(bits=4, group_size=32)"
needs_step = pytest.mark.skipif(
    native.why_not() is not None or native.isa(torch.bfloat16) == "portable", reason="no native step on this machine"
)


@pytest.fixture(autouse=True)
def quick_ceilings(monkeypatch):
    monkeypatch.setattr(roofline, "measure", partial(roofline.measure, toy=True))


@needs_step
def test_the_parts_of_a_step_have_the_bytes_of_the_model():
    model, _ = load_model("tiny")
    compressed = apply(RECIPE, sharing_copy(model)).model
    found = explain({"16 bits": model, RECIPE: compressed}, prompt_tokens=24, new_tokens=4, rounds=2)
    before, after = found.steps.values()
    blocks = model.model.layers
    wanted = {
        "q, k, v": [m for b in blocks for m in (b.self_attn.q_proj, b.self_attn.k_proj, b.self_attn.v_proj)],
        "o": [b.self_attn.o_proj for b in blocks],
        "gate, up": [m for b in blocks for m in (b.mlp.gate_proj, b.mlp.up_proj)],
        "down": [b.mlp.down_proj for b in blocks],
        "head": [model.lm_head],
    }
    assert list(before.parts) == ["q, k, v", "attention", "o", "gate, up", "down", "head"]
    for part, linears in wanted.items():
        assert before.parts[part].bytes == sum(2 * one.weight.numel() for one in linears), part
        assert (
            after.parts[part].bytes == before.parts[part].bytes
            if part == "head"
            else (0.25 * before.parts[part].bytes < after.parts[part].bytes < 0.35 * before.parts[part].bytes)
        )
    assert before.parts["attention"].calls == len(blocks) and after.parts["gate, up"].kernels == ("int_matmul",)
    for step in (before, after):
        assert all(part.seconds > 0 and part.least > 0 for part in step.parts.values())
        assert sum(part.seconds for part in step.parts.values()) <= step.seconds
    assert "Kept in 16 bits: head" in " ".join(found.sentences(RECIPE))


@needs_step
@torch.no_grad()
def test_the_parts_of_a_prompt_have_the_operations_of_the_model():
    """Their times sum up to at most the pass's; a part that was dropped is missing; nothing is timed afterwards."""
    model, _ = load_model("tiny")
    compressed = apply(
        f"layer_drop(target=mlp, layers='1'), {RECIPE}", sharing_copy(model), [torch.arange(40)[None]]
    ).model
    found = explain_prompts({"16 bits": model, "x": compressed}, prompt_tokens=24, rounds=2)
    before, after = found.prompts.values()
    assert list(before.parts) == ["q, k, v", "attention", "o", "gate, up", "down", "head"]
    blocks = model.model.layers
    for part, names in (("o", ["self_attn.o_proj"]), ("gate, up", ["mlp.gate_proj", "mlp.up_proj"])):
        weights = [block.get_submodule(name).weight for block in blocks for name in names]
        assert before.parts[part].operations == 2 * 24 * sum(w.numel() for w in weights)
    heads = model.model.layers[0].self_attn.q_proj.out_features
    assert before.parts["attention"].operations == len(blocks) * 4 * heads * 24 * 25 / 2
    assert before.parts["head"].operations == 2 * model.lm_head.weight.numel(), "of the last token alone"
    assert after.parts["down"].operations == before.parts["down"].operations * (len(blocks) - 1) / len(blocks)
    assert after.parts["down"].kernels == ("int_matmul",) and before.parts["down"].kernels == ("linear",)
    for one in (before, after):
        assert all(part.seconds > 0 for part in one.parts.values()) and one.rest >= 0
    assert found.rate > 0 and "24 tokens" in found.sentences("x")[0]
    with pytest.raises(ValueError, match="`prompt`"):
        explain_prompts({"16 bits": model}, prompt_tokens=1)


def test_what_is_said_of_a_prompt_follows_from_the_times():
    def times(up, whole):
        return PromptTimes({"gate, up": PromptPart(1e9, up), "o": PromptPart(1e9, 1e-2)}, whole)

    found = PromptExplanation({"16 bits": times(2e-2, 4e-2), "x": times(4e-2, 8e-2)}, 512, 1e11, "")
    said = " ".join(found.sentences("x"))
    assert "0.50 times as fast as in 16 bits: 80.00 ms for 512 tokens instead of 40.00 ms." in said
    assert "2 billion operations would take 20.00 ms" in said and "25 % of the time." in said
    assert "Slower than in 16 bits: gate, up, by 20.00 ms together." in said and "30.00 ms (38 %) lie outside" in said


def test_what_is_said_follows_from_the_times():
    def step(mlp, head, whole, small=1.0):
        parts = {
            "gate, up": StepPart(100e6 * small, mlp, 10, ("int_matmul",), small * 5e-3),
            "head": StepPart(50e6, head, 1, (), 2e-3),
        }
        return StepTimes(parts, whole)

    found = Explanation(
        {"16 bits": step(6e-3, 3e-3, 10e-3), "x": step(7e-3, 2.6e-3, 10e-3, small=0.25)}, 2e10, "a thing"
    )
    said = " ".join(found.sentences("x"))
    assert "would decode 2.00 times as fast as in 16 bits; it decodes 1.00 times as fast: 10.00 ms" in said
    assert "Kept in 16 bits: head, 2.60 ms (26 %)." in said and "Slower than in 16 bits: gate, up." in said
    assert "is in gate, up: 7.00 ms for 25.0 MB, 18 % of the bandwidth; its limit is arithmetic." in said
    assert "lie outside the parts" not in said and "These times are noisy: a thing." in said
    assert (
        StepPart(1, 1e-5, 1, (), 1e-6).bound == "waiting of threads"
        and StepPart(1, 1e-3, 1, (), 9e-4).bound == "memory"
    )


def test_what_is_said_of_parts_that_the_other_model_lacks():
    def part(size):
        return StepPart(size, 1e-3, 1, (), 5e-4)

    for size in (0.0, float("inf"), float("nan")):
        steps = {
            "16 bits": StepTimes({"o": part(1e6)}, 3e-3),
            "x": StepTimes({"o": part(size), "new": part(0.0)}, 2e-3),
        }
        said = Explanation(steps, 2e10, "").sentences("x")
        assert said[0].endswith("ecodes 1.50 times as fast: 2.00 ms a token instead of 3.00 ms."), said
        assert "By the bytes" not in said[0] and not any("nan" in one or "inf MB" in one for one in said)


def test_timers_go_off_when_timing_is_interrupted():
    class Timed:
        on = False

        def time(self, on=True):
            self.on = on

    def interrupted():
        raise KeyboardInterrupt

    step = Timed()
    with pytest.raises(KeyboardInterrupt):
        time_parts(step, 8, 1e-3, interrupted)
    assert not step.on


def test_a_page_shows_the_parts_of_models_that_have_them():
    """In the record's form; a run of one model, or of an earlier version, has no such section."""
    part = asdict(StepPart(100e6, 6e-3, 10, ("int_matmul",), 3e-3))
    speeds = {name: {"step_tokens_per_s": 1 / whole, "parts": {"o": part}} for name, whole in
              (("baseline", 9e-3), ("compressed", 8e-3))}  # fmt: skip
    shown = resources.context(typed({"speed": speeds}))["step"]
    assert shown["rows"][0][0] == "o" and shown["rows"][0][2].bound == "arithmetic"
    assert "it decodes 1.12 times as fast: 8.00 ms" in shown["said"][0] and shown["after"].rest == pytest.approx(2e-3)
    html = page({"speed": speeds})
    assert "Where the time of a token goes" in html and "50 %" in html
    renamed = {name.replace("baseline", "other"): one for name, one in speeds.items()}
    assert not resources.context(typed({"speed": renamed})).get("step"), "none of them is known to be in 16 bits"
    for lacking in ("baseline", "compressed"):
        without = {name: one | {"parts": {}} if name == lacking else one for name, one in speeds.items()}
        assert not resources.context(typed({"speed": without})).get("step")


@needs_step
def test_a_model_without_a_native_step_is_refused_with_the_reason(monkeypatch):
    with pytest.raises(ValueError, match="its parts cannot be timed, because it has no native step"):
        explain({"16 bits": tiny_model("mamba").to(torch.bfloat16)}, prompt_tokens=8, new_tokens=2, rounds=1)
    monkeypatch.setattr("eval.speed.explain.measure_speed", None)  # refused before anything is timed
    with pytest.raises(ValueError, match="^small: its parts cannot be timed"):
        models = {"16 bits": tiny_model("llama"), "small": tiny_model("mamba")}
        explain(models, prompt_tokens=8, new_tokens=2, rounds=1)
    for context in (1, 5000):
        with pytest.raises(ValueError, match=rf"`context` \(={context}\) must be at least 2, and at most \d+"):
            explain({"16 bits": tiny_model("llama")}, prompt_tokens=context, new_tokens=2, rounds=1)


@needs_step
def test_the_table_of_parts_is_printed(capsys):
    assert main(["explain", "tiny", RECIPE, "--rounds", "1", "--context", "16"]) == 0
    said = capsys.readouterr().out
    assert "gate, up" in said and "int_matmul" in said and "By the bytes that a token reads" in said
    assert main(["explain", "tiny", RECIPE, "--rounds", "1", "--prompt", "16"]) == 0
    said = capsys.readouterr().out
    assert "gate, up" in said and "int_matmul" in said and "a prompt of 16 tokens" in said and "GFLOP/s" in said
    assert main(["explain", "tiny", RECIPE, "--prompt", "1000000"]) == 2
    assert "`prompt` (=1000000) must be at least 2, and at most" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tiny", "snapkv"], "is of the cache"),
        (["tiny", ""], "`recipe` (='') must name methods"),
        (["tiny", RECIPE, "--context", "0"], "`--context` (=0) must be 1 or more"),
        (["tiny", RECIPE, "--prompt", "0"], "`--prompt` (=0) must be 1 or more"),
        (["tiny", RECIPE, "--prompt", "9", "--context", "9"], "exclude each other"),
        (["no/such folder", RECIPE], "MODEL"),
        (["tiny", RECIPE, "--batch", "4"], "`--batch` (=4) is for predictions: give `--device` as well"),
        (["tiny", RECIPE, "--launch", "4"], "`--launch` (=4) is for predictions: give `--device` as well"),
        (["tiny", RECIPE, "--device", "h100"], "`--device` (='h100') is not known; did you mean"),
        (["tiny", RECIPE, "--device", "here"], "`--device` (='here'): times are predicted for other devices"),
        (["tiny", RECIPE, "--device", "l4", "--rounds", "2"], "`--rounds` (=2) is for times that are measured"),
        (["tiny", RECIPE, "--device", "l4", "--prompt", "9", "--batch", "2"], "`--batch` (=2) is for decoding steps"),
        (["tiny", RECIPE, "--device", "l4", "--launch", "-1"], "`--launch` (=-1) must be microseconds"),
        (["tiny", "layer_drop", "--device", "l4"], "`RECIPE` (='layer_drop') must do without layer_drop"),
        (["tiny", "snapkv", "--device", "l4"], "is of the cache"),
    ],
)
def test_bad_input_is_refused_before_a_model_is_loaded(arguments, message, capsys):
    assert main(["explain", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_the_parts_on_another_device_follow_from_shapes():
    """Their sums are the work of the whole step; each takes the longest of its three times."""
    model = tiny_model("llama", num_hidden_layers=3)
    whole, ceilings = work(model), Ceilings(1e9, {"bfloat16": 1e9})
    how = {"ceilings": ceilings, "device": "a device", "launch": 1e-6}
    step = predict_step({"16 bits": model}, whole, context=10, batch=4, **how).steps["16 bits"]
    assert sum(part.bytes for part in step.parts.values()) == whole.weight_bytes(4) + whole.cache_bytes(10, 4)
    assert sum(part.operations for part in step.parts.values()) == whole.flops(10, 4)
    q = step.parts["self_attn.q_proj"]
    assert q.launches == 3 and q.operations == 3 * 2 * 4 * 64 * 64 and q.bytes == 3 * 64 * 64 * 4
    assert (q.seconds, q.bound) == (q.operations / 1e9, "arithmetic")
    assert step.parts[BESIDE].bound == "launches" and list(step.parts)[-2:] == [ATTENTION, BESIDE]
    prompt = predict_step({"16 bits": model}, whole, context=0, prompt_tokens=10, **how).steps["16 bits"]
    assert prompt.parts["self_attn.q_proj"].operations == 10 / 4 * q.operations
    assert prompt.parts["lm_head"].operations == step.parts["lm_head"].operations / 4, "of the last token alone"
    seen = sum(range(1, 11)) / 10  # of the whole context, on average
    assert prompt.parts[ATTENTION].operations == pytest.approx(10 / 4 * step.parts[ATTENTION].operations * seen / 10)


def test_experts_are_one_part_and_windows_are_short():
    model = tiny_model("mixtral")
    whole = work(model)
    how = {"ceilings": Ceilings(1e9, {}), "device": "a device"}
    step = predict_step({"16 bits": model}, whole, context=10, batch=2, **how).steps["16 bits"]
    assert sum(part.bytes for part in step.parts.values()) == pytest.approx(
        whole.weight_bytes(2) + whole.cache_bytes(10, 2)
    )
    assert any(part.operations and "expert" in name for name, part in step.parts.items())
    gemma = tiny_model("gemma3_text")
    step = predict_step({"16 bits": gemma}, work(gemma), context=100, **how).steps["16 bits"]
    assert step.parts[ATTENTION].bytes == work(gemma).cache_bytes(100, 1)


def test_what_is_said_of_another_device():
    def step(gate, head):
        parts = {"mlp.gate_proj": PredictedPart(gate, 1.0, 8, gate / 1e9, "memory")}
        parts |= {"lm_head": PredictedPart(head, 1.0, 1, head / 1e9, "arithmetic")}
        return PredictedStep(parts)

    steps = {"16 bits": step(8e6, 2e6), "x": step(2e6, 2e6)}
    said = " ".join(Prediction(steps, "gpu", 100, 5e-5).sentences("x"))
    assert "On gpu a token takes 4.00 ms at least, and 10.00 ms in 16 bits: 2.50 times as fast if nothing else" in said
    assert "Kept in 16 bits: lm_head, 2.00 ms (50 %)." in said
    assert "Limited by arithmetic in 16 bits, which fewer bytes do not shorten: lm_head, 2.00 ms (50 %)." in said
    assert (
        "starts 100 kernels, for which Python needs 5.00 ms, more than the device. Without a graph this model" in said
    )
    assert "which the device's own work hides." in Prediction(steps, "gpu", 100, 1e-6).sentences("x")[-1]
    assert "both models would wait" in Prediction(steps, "gpu", 1000, 1e-4).sentences("x")[-1]


def test_the_table_of_another_device_is_printed(capsys):
    """Of a shape that is loaded nowhere, on a device that is not here."""
    assert main(["explain", "llama-1b", "gptq(bits=4)", "--device", "h100-sxm", "--batch", "16"]) == 0
    said = capsys.readouterr().out
    assert "mlp.down_proj" in said and "a step of 16 x 1 token behind 512 on h100-sxm: 3,350 GB/s" in said
    assert "times as fast if nothing else takes time." in said and "one CUDA graph" in said
    assert main(["explain", "tiny", RECIPE, "--device", "l4", "--prompt", "64"]) == 0
    said = capsys.readouterr().out
    assert "a prompt of 64 tokens on l4" in said and "CUDA graph" not in said


def test_a_model_that_is_compressed_already_is_refused(tmp_path, capsys):
    model, tokenizer = load_model("tiny")
    save_compressed(apply(RECIPE, model), tmp_path / "small", tokenizer=tokenizer)
    assert main(["explain", str(tmp_path / "small"), "rtn(bits=8, where=embedding)", "--device", "l4"]) == 2
    assert "is compressed already" in capsys.readouterr().err
