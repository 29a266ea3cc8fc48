"""A model of 8 billion parameters, compressed and decoded within 6 GB of address space: what streaming takes.

    python seeds/stream_8b.py write FOLDER            # a Llama-shaped model of random weights, 16 GB of bfloat16 shards
    python seeds/stream_8b.py run FOLDER --recipe rtn --work WORK --out CHECKPOINT --record rtn.json
    python seeds/stream_8b.py run FOLDER --recipe gptq --blocks 3 --samples 4 --work WORK --record gptq.json
    python seeds/stream_8b.py decode FOLDER --max-memory 4.6GB --record decode.json
    python seeds/stream_8b.py decode FOLDER --max-memory "" --limit-gb 22 --record memory.json    # all of it in memory

Random weights say nothing of accuracy; shapes, bytes and work are those of a real model. `--limit-gb` sets RLIMIT_AS,
so that a larger allocation fails instead of passing unseen. `decode` reads what does not fit for every token, from the
disk itself: the system is told to keep nothing of the files in free memory.
"""

import argparse
import json
import os
import resource
import shlex
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, VOCABULARY = 4096, 14336, 32, 32, 8, 128256
BLOCKS_A_SHARD = 2
# What glibc reserves is address space, too: 64 MB for each thread, and what was freed in blocks of less than 32 MB.
ALLOCATOR = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}


def write(folder: Path, layers: int) -> None:
    """Write the model: a shard for the embedding, one for every two blocks, one for the norm and the head."""
    from transformers import AutoTokenizer, LlamaConfig

    from compress.checkpoint.shards import INDEX
    from compress.inputs.model import located
    from compress.walk.shards import write_tensors

    folder.mkdir(parents=True)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        vocab_size=VOCABULARY,
        rope_theta=500000.0,
        max_position_embeddings=8192,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(located("smollm2-135m")).save_pretrained(folder)
    groups = [["embed"], *([*range(i, min(i + BLOCKS_A_SHARD, layers))] for i in range(0, layers, BLOCKS_A_SHARD))]
    groups.append(["ends"])
    where, total = {}, 0
    for number, group in enumerate(groups, 1):
        tensors = {name: tensor for part in group for name, tensor in _tensors(part)}
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        write_tensors(folder / file, tensors)
        where |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
        print(f"{file}: {total / 1e9:.1f} GB", flush=True)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}))


def _tensors(part: str | int):
    """The tensors of a part of the model, by their names in it."""
    if part == "embed":
        yield "model.embed_tokens.weight", _random(VOCABULARY, HIDDEN, seed=1, scale=1.0)
        return
    if part == "ends":
        yield "model.norm.weight", torch.ones(HIDDEN, dtype=torch.bfloat16)
        yield "lm_head.weight", _random(VOCABULARY, HIDDEN, seed=2)
        return
    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (kv, HIDDEN),
        "self_attn.v_proj": (kv, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE),
    }
    for number, (name, shape) in enumerate(shapes.items()):
        yield f"model.layers.{part}.{name}.weight", _random(*shape, seed=100 + 10 * part + number)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield f"model.layers.{part}.{norm}.weight", torch.ones(HIDDEN, dtype=torch.bfloat16)


def _random(rows: int, columns: int, *, seed: int, scale: float = 0.02) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.empty(rows, columns, dtype=torch.bfloat16).normal_(0, scale, generator=generator)


def first_blocks(folder: Path, count: int, target: Path) -> Path:
    """A folder with the first blocks of the model alone: its own config and index, and links to the shards."""
    from compress.checkpoint.shards import INDEX

    target.mkdir(parents=True, exist_ok=True)
    index = json.loads((folder / INDEX).read_text())
    inside = {
        name: file
        for name, file in index["weight_map"].items()
        if not name.startswith("model.layers.") or int(name.split(".")[2]) < count
    }
    for file in {*inside.values(), "tokenizer.json", "tokenizer_config.json"}:
        (target / file).unlink(missing_ok=True)
        (target / file).symlink_to((folder / file).resolve())
    (target / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": inside}))
    config = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "num_hidden_layers": count}))
    return target


def run(arguments: argparse.Namespace) -> dict:
    """Compress the model, or its first blocks, on random tokens; what was taken, by step."""
    limit = int(arguments.limit_gb * 1e9)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    from compress import apply, load_model, save_compressed
    from compress.recipe import parse_recipe

    folder, seconds, start = arguments.folder, {}, time.perf_counter()
    if arguments.blocks:
        folder = first_blocks(folder, arguments.blocks, arguments.work / f"first-{arguments.blocks}")
    model, tokenizer = load_model(str(folder), dtype="bfloat16", weights="disk", offload_path=arguments.work)
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(VOCABULARY, (1, arguments.seqlen), generator=generator) for _ in range(arguments.samples)]
    seconds["load"] = time.perf_counter() - start
    marks: dict[str, float] = {}
    recipe = [_clocked(method, marks) for method in parse_recipe(arguments.recipe)]
    result = apply(recipe, model, batches, max_memory=limit)
    end = time.perf_counter()
    seconds["apply"] = result.seconds
    firsts = [*marks.values(), end]
    blocks = [round(after - before, 1) for before, after in zip(firsts, firsts[1:], strict=False)]
    seconds["before_the_first_block"] = firsts[0] - (end - result.seconds)
    if arguments.out:
        start = time.perf_counter()
        save_compressed(result, arguments.out, tokenizer)
        seconds["save_and_verify"] = time.perf_counter() - start
    usage, ends = asdict(result.usage), seconds["before_the_first_block"]
    whole = ends * LAYERS / len(blocks) + LAYERS * sum(blocks) / len(blocks)
    return {
        "command": "python seeds/stream_8b.py " + " ".join(sys.argv[1:]).replace(str(arguments.folder), "FOLDER"),
        "shape": {"hidden": HIDDEN, "intermediate": INTERMEDIATE, "blocks": len(blocks), "vocabulary": VOCABULARY},
        "calibration": {"samples": len(batches), "seqlen": arguments.seqlen} if batches else None,
        "threads": torch.get_num_threads(),
        "address_space_limit_bytes": limit,
        "address_space_peak_bytes": _status("VmPeak"),
        "usage": usage,
        "peak_against_predicted": None if not usage["peak"] else round(usage["peak"] / usage["predicted_peak"], 3),
        "bits_per_weight": round(result.bits_per_weight, 3),
        "checkpoint_bytes": sum(f.stat().st_size for f in arguments.out.iterdir()) if arguments.out else None,
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
        "seconds_by_block": blocks,
        "seconds_of_all_blocks_at_this_pace": round(whole),
    }


def decode(arguments: argparse.Namespace) -> dict:
    """Decode some tokens with a window of the weights in memory, or with all of them; what it took, and what bandwidths
    predict."""
    limit = int(arguments.limit_gb * 1e9)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    from transformers import DynamicCache

    from compress import load_model
    from compress.walk.offload import offloaded_parts
    from compress.walk.window import in_window
    from kernels.linear import fast_linear

    weights = "disk" if arguments.max_memory else "memory"
    model, _ = load_model(str(arguments.folder), dtype="bfloat16", weights=weights)
    parts = offloaded_parts(model)
    found = _prediction(parts, arguments.max_memory) if parts else {}
    held = in_window(model, arguments.max_memory, cached=False) if parts else fast_linear()
    ids = torch.arange(arguments.prompt)[None] * 7919 % VOCABULARY
    tokens, seconds, waited = [], [], []
    with torch.no_grad(), held as window:
        cache = DynamicCache(config=model.config)
        for _ in range(arguments.tokens + 1):  # the first pass reads the prompt
            before, start = window.waited_s if window else 0.0, time.perf_counter()
            ids = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1:].argmax(-1)
            seconds.append(round(time.perf_counter() - start, 2))
            waited.append(round(window.waited_s - before, 2) if window else 0.0)
            tokens.append(ids.item())
    return {
        "run": {"command": shlex.join(["python", "seeds/stream_8b.py", *_said(arguments)])},
        "threads": torch.get_num_threads(),
        "address_space_limit_bytes": limit,
        "resident_peak_bytes": _status("VmHWM"),
        "weights_bytes": sum(part.nbytes for part in parts.values()) or sum(p.nbytes for p in model.parameters()),
        **found,
        "seconds_of_passes": seconds,
        "waited_s": waited,
        "median_s": sorted(seconds[1:])[len(seconds[1:]) // 2],
        "tokens": tokens,
    }


def _said(arguments: argparse.Namespace) -> list[str]:
    """The command line, with other names of the folder and the record."""
    names = {str(arguments.folder): "FOLDER", str(arguments.record): "decode.json"}
    return [names.get(part, part) for part in sys.argv[1:]]


def _prediction(parts, memory: str) -> dict:
    """The seconds of a pass: what is read at the disk's rate, or the products of all blocks at the rate of one of them,
    whichever is longer; both measured before."""
    from compress.walk.window import plan_window
    from kernels.linear import fast_linear
    from kernels.support.units import bytes_of

    window = plan_window({name: part.nbytes for name, part in parts.items() if not part.is_table}, bytes_of(memory))
    if not window.streamed:
        raise SystemExit("all weights fit into --max-memory: nothing is read while the model decodes")
    spread = window.streamed[:: max(len(window.streamed) // 4, 1)]
    start = time.perf_counter()
    for name in spread:
        for tensor in parts[name].where.values():
            tensor.read(cached=False)
    rate = sum(parts[name].nbytes for name in spread) / (time.perf_counter() - start)
    name, times = window.streamed[0], []
    with torch.no_grad(), parts[name].loaded(parts[name].home), fast_linear():
        linears = [m for m in parts[name].module.modules() if isinstance(m, torch.nn.Linear)]
        inputs = [torch.randn(1, 1, m.in_features, dtype=torch.bfloat16) for m in linears]
        for _ in range(5):
            start = time.perf_counter()
            for linear, x in zip(linears, inputs, strict=True):
                linear(x)
            times.append(time.perf_counter() - start)
    computing = sorted(times)[2] * (window.held_bytes + window.streamed_bytes) / parts[name].nbytes
    return {
        "held_bytes": window.held_bytes,
        "streamed_bytes": window.streamed_bytes,
        "window_peak_bytes": window.peak_bytes,
        "disk_bytes_per_s": round(rate),
        "computing_s": round(computing, 2),
        "predicted_s": round(window.seconds(rate, computing), 2),
    }


def _clocked(method, marks: dict[str, float]):
    """The method, which notes when it comes to the first linear of each block."""

    class Clocked(type(method)):
        def solve(self, W, statistics):
            marks.setdefault(statistics.name.split(".self_attn.")[0].split(".mlp.")[0], time.perf_counter())
            return super().solve(W, statistics)

    return Clocked(**method.values())


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("write")
    one.add_argument("folder", type=Path)
    one.add_argument("--layers", type=int, default=LAYERS)
    one = commands.add_parser("run")
    one.add_argument("folder", type=Path)
    one.add_argument("--recipe", default="rtn")
    one.add_argument("--blocks", type=int, default=0, help="only so many from the first one on; 0: all")
    one.add_argument("--samples", type=int, default=0)
    one.add_argument("--seqlen", type=int, default=256)
    one.add_argument("--limit-gb", type=float, default=6.0)
    one.add_argument("--work", type=Path, required=True, help="folder for intermediate files")
    one.add_argument("--out", type=Path, help="where the checkpoint is saved; not saved unless given")
    one.add_argument("--record", type=Path, required=True)
    one = commands.add_parser("decode")
    one.add_argument("folder", type=Path)
    one.add_argument("--max-memory", default="4.6GB", help="bytes of weights in memory at once; empty: all of them")
    one.add_argument("--tokens", type=int, default=4)
    one.add_argument("--prompt", type=int, default=16)
    one.add_argument("--limit-gb", type=float, default=6.0)
    one.add_argument("--record", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.command == "write":
        write(arguments.folder, arguments.layers)
    else:
        if os.environ.keys().isdisjoint(ALLOCATOR):  # read by glibc when a process starts
            os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ALLOCATOR})
        if arguments.command == "run":
            arguments.work.mkdir(parents=True, exist_ok=True)
        found = run(arguments) if arguments.command == "run" else decode(arguments)
        arguments.record.write_text(json.dumps(found, indent=1))
        print(json.dumps(found, indent=1))
