"""The workbench's own format: every stored weight unchanged, in safetensors, beside transformers' configuration."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from torch import Tensor, nn

from compress.checkpoint.files import CONFIG
from compress.checkpoint.load import COMPUTED, LAYOUT, NOT_FOR_OTHERS, load_compressed
from compress.checkpoint.on_disk import compare_blocks, load_compressed_on_disk, write_offloaded
from compress.checkpoint.save_format import Checkpoint, SaveFormat, Verification
from compress.checkpoint.shards import write_shards
from compress.checkpoint.tied import stored_once, true_config
from compress.dropped import dropped_parts
from compress.embedding import compressed_embeddings
from compress.kv.attach import attached_methods
from compress.linear import compressed_linears
from compress.transforms.stream import stream_of
from compress.walk.experts import SplitExperts
from compress.walk.offload import is_offloaded
from kernels.linear import fast_linear
from kernels.support.modes import evaluating

# Parts of the layout that only this workbench reads; without them, the folder is a plain one of transformers.
OURS = ("split_experts", "linears", "embeddings", "dropped", "stream")


class Workbench(SaveFormat):
    """Holds everything that the workbench makes; read by `load_compressed`."""

    name: ClassVar[str] = "workbench"
    readers: ClassVar[str] = "this workbench"
    library: ClassVar[str] = "model-compression-workbench"
    holds_caches: ClassVar[bool] = True
    holds_rotations: ClassVar[bool] = True
    takes_disk: ClassVar[bool] = True
    snippet: ClassVar[str] = """
```python
from compress import load_model

model, tokenizer = load_model("PATH", dtype="bfloat16")
```"""

    def problem(self, linear: dict[str, Any]) -> str:
        return ""

    def problem_of_model(self, model: nn.Module, linears: Mapping[str, dict[str, Any]]) -> str:
        if getattr(transformers, type(model).__name__, None) is type(model):
            return ""
        return (
            f"`model` is a {type(model).__module__}.{type(model).__name__}, which is not a class of transformers: it "
            "can be compressed and scored, but a saved one could not be loaded without its code"
        )

    def write(self, checkpoint: Checkpoint, folder: Path) -> None:
        model = checkpoint.model
        embeddings = {name: one.spec() for name, one in compressed_embeddings(model).items()}
        stream = stream_of(model)
        layout = {
            "format_version": 4 if stream else 3 if embeddings else 2,
            "class": type(model).__name__,
            "dtype": str(model.dtype).removeprefix("torch."),
            "split_experts": any(isinstance(m, SplitExperts) for m in model.modules()),
            "linears": {name: linear.spec() for name, linear in compressed_linears(model).items()},
            "embeddings": embeddings,
            "dropped": {name: part.spec() for name, part in dropped_parts(model).items()},
            **({"stream": stream.rotation.spec()} if stream else {}),
            "caches": [{"method": one.name, "knobs": one.values()} for one in attached_methods(model)],
        }
        (folder / LAYOUT).write_text(json.dumps(layout, indent=1))
        if is_offloaded(model):
            write_offloaded(model, folder, checkpoint.shard_bytes)
        else:
            write_shards(_tensors(model).items(), folder, shard_bytes=checkpoint.shard_bytes)
        write_configuration(checkpoint, folder)
        if any(layout.get(part) for part in OURS):
            config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
            (folder / CONFIG).write_text(json.dumps(config | NOT_FOR_OTHERS, indent=2), encoding="utf-8")

    @torch.no_grad()
    def verify(self, checkpoint: Checkpoint, folder: Path) -> Verification:
        model = checkpoint.model
        if is_offloaded(model):
            compare_blocks(model, load_compressed_on_disk(folder))
            return Verification("workbench", 0.0)
        again = load_compressed(folder)
        device = next(model.parameters()).device
        ids = (torch.arange(32) * 7919 % model.get_input_embeddings().num_embeddings)[None].to(device)
        if again.config._attn_implementation != model.config._attn_implementation:
            again.set_attn_implementation(model.config._attn_implementation)
        # Transformers' own cache does not serve every model; one that is attached is a part of the model.
        how = {} if attached_methods(model) else {"use_cache": False}
        with evaluating(model), fast_linear():
            expected, given = model(ids, **how).logits, again.to(device)(ids, **how).logits
        if not torch.equal(expected, given):
            worst = (expected - given).abs().max().item()
            raise RuntimeError(
                f"the saved model gives other logits than the one in memory (largest difference {worst:.2e})"
            )
        if attached_methods(again) != attached_methods(model):
            raise RuntimeError(
                f"the saved model keeps its cache by {attached_methods(again)}, the one in memory by "
                f"{attached_methods(model)}"
            )
        return Verification("workbench", 0.0)


def write_configuration(checkpoint: Checkpoint, folder: Path) -> None:
    """Write transformers' configuration, the settings of `generate`, and the tokenizer."""
    true_config(checkpoint.model).save_pretrained(folder)
    if checkpoint.model.generation_config is not None:  # as it is: `save_pretrained` refuses what loads with a warning
        checkpoint.model.generation_config.to_json_file(folder / "generation_config.json")
    if checkpoint.tokenizer is not None:
        checkpoint.tokenizer.save_pretrained(folder)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """The state dict, each shared tensor once, and computed buffers.

    Buffers that a model computes when it is made (rotary frequencies) are small, and a cast may have rounded them.
    """
    stored = model.state_dict()
    # Compressed linears make their other buffers again.
    own = tuple(f"{name}." for name in compressed_linears(model))
    own += tuple(f"{name}.parts." for name in compressed_embeddings(model))
    computed = {
        COMPUTED + n: b
        for n, b in model.named_buffers()
        if n not in stored and b.is_floating_point() and not n.startswith(own)
    }
    return dict(stored_once(model)) | computed
