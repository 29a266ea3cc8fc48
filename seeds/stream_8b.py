"""A model of 8 billion parameters compressed within 6 GB of address space: what streaming takes, in time and memory.

    python seeds/stream_8b.py write FOLDER            # a Llama-shaped model of random weights, 16 GB of bfloat16 shards
    python seeds/stream_8b.py run FOLDER --recipe "rtn" --out CHECKPOINT --record rtn.json
    python seeds/stream_8b.py run FOLDER --recipe "gptq" --blocks 3 --samples 4 --seqlen 256 --record gptq.json

Random weights say nothing of accuracy; shapes, bytes and work are those of a real model. `--limit-gb` sets RLIMIT_AS,
so that a larger allocation fails instead of passing unseen.
"""

import argparse
import json
from pathlib import Path

import torch

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, VOCABULARY = 4096, 14336, 32, 32, 8, 128256
BLOCKS_A_SHARD = 2


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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("write")
    one.add_argument("folder", type=Path)
    one.add_argument("--layers", type=int, default=LAYERS)
    arguments = parser.parse_args()
    if arguments.command == "write":
        write(arguments.folder, arguments.layers)
