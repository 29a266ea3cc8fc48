"""Methods, policies, checkpoints and steps of decoding on a GPU that is not there (`tests.pretended`): nothing mixes
devices, everything lies where it belongs, and neither a step of decoding, nor a token of a text, nor one that is timed
waits for the device.

A process of its own pretends the GPU: `python -m tests.compress.test_on_a_gpu CHECK:NAME ...` prints a line of JSON for
each check. On a machine with a GPU, `--real` runs the same there (without the checks of waiting), and `--part 2/6` the
second sixth of all checks.
"""

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from compress import METHODS, Result, apply, load_compressed, save_compressed
from compress.checkpoint.save import SAVE_FORMATS
from compress.commands import find_components, train_kvzap, train_locret
from compress.recipe import parse_recipe
from eval.speed import speed
from eval.speed.speed import TimedModel, _round, _written, make, make_ready, measure_speed, standard_variants
from kernels import trellis_matmul
from kernels.compiler import compiler
from kernels.step.gpu import between
from kernels.step.gpu.accelerate import accelerate_by_graphs
from kernels.step.gpu.graphs import Graphs, GraphSteps
from kernels.step.gpu.stored_steps import StoredSteps
from kernels.step.writing import sampling
from kernels.step.writing.generate import Calls
from kernels.step.writing.text import Text
from tests import pretended
from tests.architectures import tiny_model
from tests.pretended import GPU

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = {"bnb_nf4", "bnb_int8"}  # bitsandbytes launches kernels of its own
UNMOVED = {"compressed-tensors", "bitsandbytes"}  # their libraries need a real GPU
TRAINED = {"kvzap": train_kvzap.train, "locret": train_locret.train, "matryoshka": find_components.find}
SMALL = {
    "snapkv": {"observed": 4},
    "expected_attention": {"future": 16},
    "gemfilter": {"prefill": "short"},
}  # for short prompts
STEPS = {  # recipes whose steps of decoding never wait
    "none": "", "rtn": "rtn(bits=4, group_size=16)", "int8": "int8", "rotate": "rotate, rtn(bits=4, group_size=16)",
    "kv_int": "kv_int(bits=4, group_size=32, residual=4)", "kv_fp8": "kv_fp8", "quest": "quest(page=4, budget=12, full_layers=1)",
    "h2o": "h2o(budget=12), kv_int(bits=4, group_size=32, residual=4)", "snapkv": "snapkv(budget=12, observed=4, allocation=ada)",
    "streaming": "streaming(budget=12)", "zipvl": "zipvl", "gemfilter": "gemfilter(budget=12, prefill=short)",
    "quest of codes": "kv_int, quest(page=4, budget=12)",
}  # fmt: skip
GRAPHS = {  # recipes whose steps can be captured, also where a group becomes codes; with Gemma 3, windows beside them
    "kv_int": ("llama", "kv_int(bits=4, group_size=32, residual=4)"), "kv_fp8": ("llama", "kv_fp8(group_size=32, residual=4)"),
    "streaming": ("llama", "streaming(budget=12)"), "kvzip": ("llama", "kvzip(budget=0.5), kv_int(bits=8, group_size=32)"),
    "heads apart": ("llama", "snapkv(budget=12, observed=4, allocation=ada), kv_int(bits=8, group_size=32, residual=4)"),
    "rotated": ("llama", "kv_int(bits=4, group_size=32, residual=4, rotate_keys=True, rotate_values=True)"),
    "windows": ("gemma3_text", "kv_int(bits=4, group_size=32, residual=4)"), "padding": ("gemma3_text", ""),
    "W8A8": ("llama", "int8(activations=tensor), kv_int(group_size=32, residual=4)"),
    "W4A8": ("llama", "rtn(bits=4, group_size=-1), activations, kv_int(group_size=32, residual=4)"),
}  # fmt: skip
SAMPLED = {"do_sample": True, "temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2}
TEXTS = {  # requests of `generate` whose tokens the host of a GPU reads late
    "greedy": {}, "sampled": SAMPLED, "from all tokens": {"do_sample": True, "top_k": 0}, "top-p alone": {"do_sample": True, "top_k": 0, "top_p": 0.8},
}  # fmt: skip
TIMED = {"step": _round, "generate": _written}
MIXTURES = {"expert_drop"}  # they need a model with experts, which transformers multiplies by a kernel of real GPUs
WHOLE = {"distil"}  # they run the whole model where it lies
WEIGHTS = [name for name, method in METHODS.items() if method.stage != "cache" and name not in OUTSIDE | WHOLE]
CHECKS_OF = {
    "stays": [name for name in METHODS if name not in OUTSIDE | MIXTURES],
    "passes": WEIGHTS,
    "format": [name for name in SAVE_FORMATS if name not in UNMOVED],
    "step": list(STEPS),
    "evicting": ["h2o"],
    "graph": list(GRAPHS),
    "text": list(TEXTS),
    "timing": list(TIMED),
    "ways": ["baseline"],
}
FAST = [
    "stays:h2o", "passes:gptq", "passes:layer_drop", "step:rtn", "step:quest", "step:h2o", "evicting:h2o",
    "graph:heads apart", "text:sampled", "timing:step", "timing:generate",
]  # fmt: skip
needs_compiler = pytest.mark.skipif(not compiler(), reason="a C++ compiler tells torch of the pretended GPU")


@needs_compiler
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    "checks",
    [
        pytest.param(FAST, id="some", marks=pytest.mark.long),
        *(
            pytest.param([f"{kind}:{name}" for name in names], id=kind, marks=pytest.mark.slow)
            for kind, names in CHECKS_OF.items()
        ),
    ],
)
def test_on_a_pretended_gpu(checks):
    environment = os.environ | {"LD_PRELOAD": str(pretended.library()), "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    command = [sys.executable, "-m", "tests.compress.test_on_a_gpu", *checks]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    results = {one["check"]: one["error"] for one in map(json.loads, done.stdout.splitlines())}
    assert list(results) == checks, done.stderr[-2000:]
    assert not any(results.values()), "\n".join(f"{check}: {error}" for check, error in results.items() if error)


def test_every_name_is_known():
    assert {check.partition(":")[0] for check in FAST} <= set(CHECKS) == set(CHECKS_OF)
    assert all(name in CHECKS_OF[kind] for kind, _, name in (check.partition(":") for check in FAST))


# The checks, in a process that has the GPU.


def stays(name: str) -> None:
    """A method on a model that lies on the GPU: compressed, generating, saved and loaded again, the same."""
    model, ids = model_for(name).to(GPU), torch.randint(96, (2, 24), device=GPU)
    mask = (torch.arange(24, device=GPU) >= torch.tensor([[0], [3]], device=GPU)).long()
    with tempfile.TemporaryDirectory() as folder:
        result = compressed(name, model, texts(), Path(folder))
        tokens = written(result.model, ids, mask)
        astray = [key for key, tensor in result.model.state_dict().items() if not tensor.is_cuda]
        assert tokens.is_cuda and not astray, f"not on the GPU: {astray}"
        save_compressed(result, Path(folder, "saved"))
        again = load_compressed(Path(folder, "saved"), device="cuda")
        assert torch.equal(written(again, ids, mask), tokens), "another model came back"


def passes(name: str) -> None:
    """A method on a model that lies on the CPU, whose blocks pass through the GPU one by one."""
    model, ids = model_for(name), texts()[0]
    with tempfile.TemporaryDirectory() as folder:
        result = compressed(name, model, texts(), Path(folder), device="cuda")
    astray = [key for key, tensor in result.model.state_dict().items() if tensor.is_cuda]
    assert not astray, f"left on the GPU: {astray}"
    written(result.model, ids, torch.ones_like(ids))


def stored(name: str) -> None:
    """A checkpoint of this format of a model on the GPU, which is loaded again to verify it."""
    result = apply(parse_recipe("rtn(bits=4, group_size=32)"), tiny_model("llama").to(GPU))
    with tempfile.TemporaryDirectory() as folder:
        save_compressed(result, Path(folder, "saved"), save_format=name)


def step(name: str) -> None:
    """No step of decoding waits for the device, from the third one on."""
    waits = waits_of_steps(STEPS[name])
    assert not any(waits), f"the host waits: {sorted(set(sum(waits, [])))}"


def evicting(name: str) -> None:
    """Where text evicts while it is generated, the steps that evict wait, and no others."""
    waits = waits_of_steps(f"{name}(budget=12, decoding=True)", 26)
    assert 2 <= sum(map(bool, waits)) <= -(-len(waits) // 8), f"{sum(map(bool, waits))} of {len(waits)} steps wait"


@torch.no_grad()
def graph(name: str) -> None:
    """Steps behind a compressed cache, or behind padding in a plain one, as a graph on a real GPU, are the model's own,
    and do not wait for the device."""
    architecture, recipe = GRAPHS[name]
    model, ids = tiny_model(architecture).to(torch.bfloat16).to(GPU), torch.randint(96, (2, 24), device=GPU)
    padded: tuple[Tensor | None, Tensor | None] = None, None
    if recipe:
        apply(parse_recipe(recipe), model, texts())
    else:
        seen = torch.arange(24, device=GPU) - torch.tensor([[0], [20]], device=GPU)
        padded = (seen >= 0).long(), seen.clamp(min=0)
    cache = model(ids, attention_mask=padded[0], position_ids=padded[1], use_cache=True).past_key_values
    own = copy.deepcopy(cache)
    calls = Calls(model, own, *padded)
    graphs = Graphs(model, capture=not isinstance(ids, pretended.OnGPU))
    steps = (StoredSteps if recipe else GraphSteps)(graphs, cache, len(ids), *padded)
    for i in range(40):
        token = (ids[:, :1] + i) % 96
        with pretended.watched() as waits:
            largest = steps(token)
        assert largest is not None and not waits, f"the host waits in step {i}: {sorted(set(waits))}"
        calls(token)
        difference = float((steps.logits - calls.logits).norm() / calls.logits.norm())
        assert difference < 0.1, f"the logits of step {i} differ by {difference:.2g}"
    steps.finish()
    for one, two in zip(cache.own, own.own, strict=True) if recipe else ():
        assert [(s.coded, s.length) for s in one.slabs] == [(s.coded, s.length) for s in two.slabs]


@torch.no_grad()
def text(name: str) -> None:
    """A text that the host reads late has the tokens, and leaves the random numbers, of one that is read token by token;
    a longer one does not wait more often, and a token that cannot be drawn is an error."""
    model, ids = tiny_model("llama").to(torch.bfloat16).to(GPU), torch.randint(96, (2, 24), device=GPU)
    accelerate_by_graphs(model, Graphs(model, capture=not isinstance(ids, pretended.OnGPU)))

    def generated(late: bool, new: int, rows: int = 2, **request: Any) -> tuple[list[list[int]], list, list, list[str]]:
        torch.manual_seed(1)
        heard, request = [], {"do_sample": False, "pad_token_id": 0} | TEXTS[name] | request
        streamer = mock.Mock(spec=["put", "end"], put=lambda tokens: heard.append(tokens.tolist()))
        at_once = mock.patch.object(Text, "read_late", lambda self: None)
        with pretended.watched() as waits, nullcontext() if late else at_once:
            given = {"attention_mask": torch.ones_like(ids[:rows]), "max_new_tokens": new, "streamer": streamer}
            found = model.generate(ids[:rows], **given, **request)
        return found[:, 24:].tolist(), heard[1:], torch.rand(1, device=GPU).tolist(), waits

    for rows in (1, 2):
        tokens = generated(True, 16, rows, eos_token_id=None)[0]
        ends = {"eos_token_id": [row[place] for row, place in zip(tokens, (7, 4), strict=False)]}
        late, at_once = (generated(late, 16, rows, **ends)[:3] for late in (True, False))
        assert late == at_once and len(late[0][0]) <= 8, f"{late} is not {at_once}"
    without = {"eos_token_id": 95, "suppress_tokens": [95]}
    late, at_once = ([len(generated(late, new, **without)[-1]) for new in (4, 9)] for late in (True, False))
    if isinstance(ids, pretended.OnGPU):
        assert late[0] == late[1] and at_once[1] - at_once[0] >= 5, (
            f"the host waits {late} times, and {at_once} at once"
        )
    drawn = sampling.drawn_unread
    for new in (3, 6) if TEXTS[name] else ():
        flags = iter([True, True, False, True, True, True])
        third = lambda *of, flags=flags: (drawn(*of)[0], torch.tensor(next(flags), device=GPU))  # noqa: E731
        with mock.patch.object(sampling, "drawn_unread", third), pytest.raises(ValueError, match="not finite"):
            generated(True, new)


def prepared_variants() -> dict[str, TimedModel]:
    """What is timed, not compiled, where steps take graphs or what stands for them."""
    model = tiny_model("llama", num_hidden_layers=1).to(GPU)
    small = apply(parse_recipe("rtn(bits=4, group_size=16)"), copy.deepcopy(model)).model
    made = standard_variants(model, small)
    for one in made.values():
        one.native, one.compiled = one.compiled, False
    return made


def graphs_of_a_device() -> AbstractContextManager:
    graphs = partial(Graphs, capture=not isinstance(torch.zeros(1, device=GPU), pretended.OnGPU))
    return mock.patch.object(speed, "Graphs", graphs)


@torch.no_grad()
def timing(name: str) -> None:
    """Timing more tokens does not wait more often."""
    timed, one, waits = TIMED[name], prepared_variants()["baseline"], {}
    with graphs_of_a_device():
        make_ready(one, make(one), 8, 8)
        for new in (3, 8):
            with pretended.watched() as waits[new]:
                timed(one, 8, new)
    assert len(waits[3]) == len(waits[8]), f"the host waits: {waits[8]}"


@torch.no_grad()
def ways(name: str) -> None:
    """The ways to run the baseline are timed under names of their own."""
    with graphs_of_a_device(), mock.patch.object(torch, "compile", lambda model, **_: model):
        found = measure_speed(prepared_variants(), prompt_tokens=8, new_tokens=4, rounds=1)
    assert found.keys() >= {name, "compressed", "bfloat16", "float32"}
    executed = {one.execution for key, one in found.items() if key.startswith(name) or key == "bfloat16"}
    assert len(executed) == 3, f"each way has its name: {executed}"


CHECKS: dict[str, Callable[[str], None]] = {
    "stays": stays, "passes": passes, "format": stored, "step": step, "evicting": evicting, "graph": graph, "text": text,
    "timing": timing, "ways": ways,
}  # fmt: skip


def model_for(name: str) -> nn.Module:
    """A tiny model to which this method can be applied."""
    return tiny_model("mixtral" if name in MIXTURES else "llama")


def texts() -> list[Tensor]:
    return [torch.randint(96, (1, 24)) for _ in range(6)]


def compressed(name: str, model: nn.Module, batches: list[Tensor], folder: Path, **how: str) -> Result:
    """The result of the shortest recipe in which a method can act."""
    from tests.compress.test_methods import ROWS, recipe_of

    recipe = recipe_of(name) if name in ROWS else [METHODS[name](**knobs_of(name, model, batches, folder))]
    return apply(recipe, model, batches, **how)


def knobs_of(name: str, model: nn.Module, batches: list[Tensor], folder: Path) -> dict[str, Any]:
    """Knobs with which a method for caches acts on a prompt of 24 tokens."""
    method = METHODS[name]
    chosen: dict[str, Any] = {"budget": 12} if "budget" in method.knobs() else {}
    if "decoding" in method.knobs() and not method.runs_model:
        chosen["decoding"] = True
    if name in TRAINED:
        chosen["path"] = str(folder / f"{name}.safetensors")
        TRAINED[name](model, batches, chosen["path"])
    return chosen | SMALL.get(name, {})


def written(model: nn.Module, ids: Tensor, mask: Tensor, new: int = 10) -> Tensor:
    """Greedily generated tokens [rows, new]."""
    how = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(ids, attention_mask=mask, **how)[:, -new:]


def waits_of_steps(recipe: str, steps: int = 14) -> list[list[str]]:
    """The places where the host waits in each step of decoding, from the third one on. The twelfth one makes codes of a
    group of 32 positions, if a recipe does."""
    model = tiny_model("llama").to(torch.bfloat16).to(GPU)
    if recipe:
        apply(parse_recipe(recipe), model, texts())
    ids, found = torch.randint(96, (2, 24), device=GPU), []
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
        for i in range(steps):
            places = torch.full((2, 1), 24 + i, device=GPU)
            with pretended.watched() as waits:
                model(ids[:, :1], past_key_values=cache, position_ids=places, use_cache=True)
            found.append(waits)
    return found[2:]


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.compress.test_on_a_gpu")
    parser.add_argument("checks", nargs="*", help="CHECK:NAME; without any, all of them")
    parser.add_argument("--real", action="store_true", help="on this machine's GPU, not on a pretended one")
    parser.add_argument("--part", default="1/1", help="2/6: the second sixth of the checks")
    options = parser.parse_args(arguments)
    kinds = [kind for kind in CHECKS if not (options.real and kind in ("step", "evicting"))]
    checks = options.checks or [f"{kind}:{name}" for kind in kinds for name in CHECKS_OF[kind]]
    checks += [f"stays:{name}" for name in MIXTURES] if options.real and not options.checks else []
    part, parts = map(int, options.part.split("/"))
    checks = checks[part - 1 :: parts]
    warnings.filterwarnings("ignore")
    if not options.real:
        pretended.install()
        trellis_matmul.triton_takes = lambda device: False  # whole weights are decoded by a kernel that is no op
        between._by_triton = lambda x, impl: False  # nor are the kernels between the products of a step
    for one in checks:
        kind, _, name = one.partition(":")
        torch.manual_seed(0)
        start, error = time.process_time(), ""
        try:
            CHECKS[kind](name)
        except Exception as raised:
            frames = [f for f in traceback.extract_tb(raised.__traceback__) if f.filename.startswith(pretended.OURS)]
            where = " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(frames[-4:]))
            error = f"{type(raised).__name__}: {str(raised)[:600]} ({where})"
        print(json.dumps({"check": one, "seconds": round(time.process_time() - start, 2), "error": error}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
