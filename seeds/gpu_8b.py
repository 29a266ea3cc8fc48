"""A model of 8 billion parameters on a GPU, as a user of the workbench compresses and times it.

    python seeds/gpu_8b.py gptq --layers 2 --samples 128 --seqlen 2048      # seconds a layer, and peak memory
    python seeds/gpu_8b.py speed --recipe "rtn(bits=4, group_size=128)"     # what the pages' measurement gives there
    python seeds/gpu_8b.py recover --shape llama-1b --updates 30            # training: tokens a second, peak memory
    python seeds/gpu_8b.py replays --rounds 8 --limit 60 --core gpu.core    # where steps from a graph stop, if they do

The model has the shape of Llama-3.1-8B, or another `--shape`, and random weights, which say nothing of accuracy;
shapes, bytes and work are those of a real model. Each measurement is one line of JSON, which is written to `--out` as
well. `--shape toy --device cpu` tries the first three without a GPU. The time of GPTQ for the whole model is that of a
layer, times the number of layers.
"""

import argparse
import faulthandler
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from compress import apply
from eval.machine.load import LoadMeter
from eval.speed.speed import GraphDecoder, contestants, in_turns, make, make_ready, measure_speed, serve
from kernels.harness.model_weights import SHAPES
from kernels.harness.roofline import environment


def random_model(shape: str, device: str, layers: int | None) -> PreTrainedModel:
    """A model with random weights in bfloat16, with all its layers or with the first few."""
    cls, make = SHAPES[shape]
    config = make()
    config.num_hidden_layers = layers or config.num_hidden_layers
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return cls(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)


def gptq(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a layer of GPTQ: of two sizes of model, the difference, so that what is done once does not count."""
    seconds, peak = [], 0
    for layers in (1, 1 + options.layers):
        model = random_model(options.shape, options.device, layers)
        batches = _texts(model, options.samples, options.seqlen)
        _start(options.device)
        began = time.perf_counter()
        result = apply(options.recipe or "gptq(bits=4, group_size=128)", model, batches)
        seconds.append(_stop(options.device) - began)
        peak = torch.cuda.max_memory_allocated() if options.device == "cuda" else 0
        kernels = result.kernels
    layer = (seconds[1] - seconds[0]) / options.layers
    whole = SHAPES[options.shape][1]().num_hidden_layers * layer
    return {"seconds": seconds, "seconds_a_layer": layer, "seconds_whole_model": whole, "peak_bytes": peak,
            "kernels": kernels}  # fmt: skip


def recover(options: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second of training towards the original model. The first updates, in which torch learns the sizes of
    its tensors, count as well."""
    recipe = options.recipe or f"wanda(pattern='2:4'), distil(train=weights, steps={options.updates}, minutes=5)"
    model = random_model(options.shape, options.device, None)
    batches = _texts(model, options.samples, options.seqlen)
    _start(options.device)
    result = apply(recipe, model, batches)
    peak = torch.cuda.max_memory_allocated() if options.device == "cuda" else 0
    [recovery] = result.recoveries
    last = recovery.curve[-1]
    return {"tokens_a_second": last.tokens / last.seconds, "peak_bytes": peak, "usage": asdict(result.usage),
            "recovery": asdict(recovery)}  # fmt: skip


def speed(options: argparse.Namespace) -> dict[str, Any]:
    """The measurement of speed that every page shows, of the original and of the compressed model."""
    original = random_model(options.shape, options.device, None)
    compressed = random_model(options.shape, options.device, None)
    began = time.perf_counter()
    result = apply(options.recipe or "rtn(bits=4, group_size=128)", compressed)
    took = _stop(options.device) - began
    variants = contestants({"baseline": original, "compressed": result.model}, compiled=options.compiled)
    sizes = {"prompt_tokens": options.seqlen, "new_tokens": options.tokens, "rounds": options.rounds}
    speeds = measure_speed(variants, batch=options.batch, **sizes)
    return {"apply_seconds": took, "bits_per_weight": result.bits_per_weight} | {
        name: asdict(one) for name, one in speeds.items()
    }


@torch.no_grad()
def replays(options: argparse.Namespace) -> dict[str, Any]:
    """How many replays of the 16-bit model's graph end: alone, behind prompts, and as pages time them. `speed` adds a
    second model. Where one does not end, `--limit` shows the stage, its last round, and what the GPU runs."""
    variants = contestants({"baseline": random_model(options.shape, options.device, None)}, compiled=False)
    variant, size = variants["baseline"], (options.seqlen, options.tokens, options.batch)
    make_ready(variant, make(variant), *size)
    if not isinstance(variant.step, GraphDecoder):
        raise SystemExit(f"`--device` (={options.device}) has no graphs: steps are {variant.execution}")
    step = variant.step.step

    def alone() -> None:
        step.at(options.seqlen)
        for _ in range(options.tokens):
            step()
            _stop(options.device)

    def timed() -> None:  # each takes its steps twice, in the measurement's own loop and in `generate`
        in_turns(variants, *size, 1, tqdm(disable=True), LoadMeter())

    stages = {"alone": (alone, 1), "behind prompts": (lambda: serve(variant, *size), 1), "timed": (timed, 4)}
    seconds, replayed = {}, 0
    for stage, (call, times) in stages.items():
        began = time.perf_counter()
        for number in range(options.rounds):
            call()
            replayed += times * options.tokens
            print(f"{stage}, round {number}: {replayed} replays so far", file=sys.stderr, flush=True)
        seconds[stage] = _stop(options.device) - began
    return {"replays": replayed, "seconds": seconds, "execution": variant.execution}


MEASUREMENTS = {"gptq": gptq, "recover": recover, "speed": speed, "replays": replays}


def _texts(model: PreTrainedModel, samples: int, seqlen: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return list(torch.randint(model.config.vocab_size, (samples, 1, seqlen), generator=generator))


def _start(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()


def _stop(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _allow_core_dump(core: Path) -> None:
    """Let the driver write what the GPU runs into a file when asked to, without the contents of its memory."""
    core.parent.mkdir(parents=True, exist_ok=True)
    core.unlink(missing_ok=True)
    flags = "skip_abort,skip_global_memory,skip_shared_memory,skip_local_memory,skip_constbank_memory"
    os.environ |= {"CUDA_ENABLE_USER_TRIGGERED_COREDUMP": "1", "CUDA_COREDUMP_FILE": str(core),
                   "CUDA_COREDUMP_PIPE": f"{core}-{os.getpid()}", "CUDA_COREDUMP_GENERATION_FLAGS": flags}  # fmt: skip


def _end_after(seconds: float, core: Path | None) -> None:
    """End the process after so many seconds, and say where it was and what the GPU did.

    A GPU that is busy runs a kernel that does not end, which the core dump names; an idle one has lost a completion.
    """

    def end() -> None:
        try:
            faulthandler.dump_traceback(all_threads=True)
            fields = "utilization.gpu,utilization.memory,power.draw,clocks.sm,memory.used"
            _tell("nvidia-smi", f"--query-gpu={fields}", "--format=csv")
            if core is not None:
                os.write(os.open(f"{core}-{os.getpid()}", os.O_WRONLY | os.O_NONBLOCK), b"1")  # the driver reads it
                time.sleep(15)
                debugger = shutil.which("cuda-gdb") or "/usr/local/cuda/bin/cuda-gdb"
                _tell(debugger, "-batch", "-ex", f"target cudacore {core}", "-ex", "info cuda kernels")
        except Exception as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)

    faulthandler.dump_traceback_later(seconds + 60, exit=True)  # if this thread does not get to run
    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


def _tell(*command: str) -> None:
    """Run a command, if it is there, with its output among the errors."""
    if shutil.which(command[0]):
        subprocess.run(command, stdout=sys.stderr, timeout=30)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("measurement", choices=tuple(MEASUREMENTS))
    parser.add_argument("--shape", choices=tuple(SHAPES), default="llama-8b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--recipe", default="")
    parser.add_argument("--layers", type=int, default=2, help="gptq: layers beyond the first")
    parser.add_argument("--samples", type=int, default=128, help="gptq, recover: calibration texts")
    parser.add_argument("--updates", type=int, default=30, help="recover: updates of the training")
    parser.add_argument("--seqlen", type=int, default=2048, help="tokens of a calibration text; speed: of the prompt")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=64, help="speed: new tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compiled", action="store_true", help="speed: compile the pass over the prompt")
    parser.add_argument("--out", type=Path, default=None, help="file of JSON lines, to which this one is added")
    parser.add_argument("--limit", type=float, default=0, help="seconds after which it ends, and says where it was")
    parser.add_argument("--core", type=Path, default=None, help="file of a GPU core dump, written at the limit")
    options = parser.parse_args()
    core = options.core.resolve() if options.core is not None else None
    if core is not None:
        _allow_core_dump(core)
    if options.limit:
        _end_after(options.limit, core)
    line = {"measurement": options.measurement, "arguments": sys.argv[1:]}
    line |= MEASUREMENTS[options.measurement](options)
    line["environment"] = environment(torch.device(options.device))
    text = json.dumps(line)
    print(text, flush=True)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        with options.out.open("a") as out:
            out.write(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
