"""WORKBENCH_ISA: the whole workbench as on a processor with fewer instructions, and what a record says of it."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels import native, processor

SIMULATED = """
import sys, torch
from transformers import AutoModelForCausalLM
from compress import accelerate
from eval.run_record import provenance
from kernels import native
from kernels.linear.onednn import lays_out
from kernels.linear.prepacked import PrepackedLinear, prepack
from kernels.w8a8_matmul.layout import has_vnni
folder = sys.argv[1]
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
ids = torch.arange(24)[None] * 31 % 96
with torch.no_grad():
    model = accelerate(model)
    prompt = model(ids[:, :20], use_cache=True)
    cache, logits = prompt.past_key_values, [prompt.logits]
    logits += [model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(20, 24)]
torch.save({
    "logits": torch.cat(logits, 1).float(),
    "isa": native.why_not() or {native.isa(torch.bfloat16), native.kv_decode_isa(torch.bfloat16)},
    "tiles": native.tiles(), "integers": native.integers() or has_vnni(), "prompts": native.prompt_attention_runs(),
    "onednn": any(map(lays_out, (torch.bfloat16, torch.float16))),
    "prepacked": any(isinstance(module, PrepackedLinear) for module in prepack(model).modules()),
    "torch": torch.backends.cpu.get_cpu_capability(), "provenance": provenance("", "cpu", "bfloat16", "bfloat16"),
}, folder + "/found.pt")
"""
X86 = platform.machine() == "x86_64"


@pytest.mark.parametrize(
    "isa",
    [pytest.param("avx2", marks=[pytest.mark.slow, pytest.mark.skipif(not X86, reason="no x86")]), "portable"],
)
def test_a_whole_model_has_the_same_logits_as_on_an_older_processor(tiny, tmp_path, isa):
    """In a process of its own, because libraries choose their instructions once."""
    model, ids = tiny("llama").bfloat16(), torch.arange(24)[None] * 31 % 96
    model.save_pretrained(tmp_path)
    environment = {**os.environ, processor.VARIABLE: isa}
    for name in processor.LIBRARIES[isa]:
        environment.pop(name, None)
    run = [sys.executable, "-c", SIMULATED, str(tmp_path)]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-2000:]
    found = torch.load(tmp_path / "found.pt")
    with torch.no_grad():
        plain, exact = model(ids).logits.float(), model.float()(ids).logits
    assert (found["logits"] - exact).norm() < 2 * (plain - exact).norm(), "as near as bfloat16 is"
    assert found["isa"] == (native.why_not() or {isa})
    for name in ("tiles", "integers", *(("onednn", "prepacked") if X86 else ())):
        assert not found[name], name
    assert found["prompts"] == (isa == "avx2" and native.why_not() is None)
    assert found["torch"] not in processor.ABOVE[isa]
    provenance = found["provenance"]
    assert provenance["flags"]["env"].items() >= {processor.VARIABLE: isa, **processor.LIBRARIES[isa]}.items()
    assert provenance["hardware"]["cpu_class"].endswith(f", {processor.VARIABLE}={isa}")


EIGHT_BITS = """
import sys, torch
from kernels.w8a8_matmul import quantize_weight, to_prepacked, w8a8_matmul
W, x = torch.ones(48, 64), torch.ones(3, 64)
w = quantize_weight(W, torch.int8)
for use in (w, *([to_prepacked(w)] if "cpu" in sys.argv else [])):
    assert torch.allclose(w8a8_matmul(x, use), x @ W.T), use.layout
"""


@pytest.mark.slow
@pytest.mark.parametrize("cap", ["AVX512_CORE", "AVX2"])  # neither has VNNI
def test_products_of_8_bits_are_exact_where_onednn_is_kept_from_vnni(cap):
    """oneDNN then adds pairs of products in 16 bits, which saturates: these are wrong by half."""
    run = [sys.executable, "-c", EIGHT_BITS, *(["cpu"] if native.integers() else [])]
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": cap}
    done = subprocess.run(run, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_limit_that_is_none_is_refused(monkeypatch):
    monkeypatch.setenv(processor.VARIABLE, "avx")
    with pytest.raises(ValueError, match=r"`WORKBENCH_ISA` \(=avx\) must be 'avx2' or 'portable'"):
        processor.limit()
    monkeypatch.setenv(processor.VARIABLE, "avx2")
    monkeypatch.setattr(processor.platform, "machine", lambda: "aarch64")
    with pytest.raises(ValueError, match="aarch64"):
        processor.limit()


def test_a_limit_that_comes_too_late_is_refused(monkeypatch):
    """torch has chosen its instructions in this process; what the user set for a library stays."""
    if (chosen := torch.backends.cpu.get_cpu_capability()) not in processor.ABOVE["portable"]:
        pytest.skip("torch has no vector instructions here")
    for name in processor.LIBRARIES["portable"]:
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    monkeypatch.setenv(processor.VARIABLE, "portable")
    with pytest.raises(ValueError, match=f"torch already computes with {chosen}"):
        processor.limit_libraries()


def test_limits_are_the_same_before_and_after_the_libraries_have_theirs(monkeypatch):
    """They are part of a run's identity, which is computed in the process that plans it and in the one that runs it."""
    for name in (*processor.LIBRARIES["avx2"], *processor.OTHERS, processor.VARIABLE):
        monkeypatch.delenv(name, raising=False)
    assert processor.limits() == {}
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
    assert processor.limits() == {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}
    monkeypatch.setenv(processor.VARIABLE, "portable")
    before = processor.limits()
    assert before == {"WORKBENCH_ISA": "portable", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", processor.LIBRARIES["portable"]["ATEN_CPU_CAPABILITY"])
    assert processor.limits() == before
