"""A checkpoint read by transformers, with compressed-tensors where its configuration names that library."""

import json
from importlib.metadata import version
from pathlib import Path

from shared import Answer, Task, serve


def read(task: Task) -> Answer:
    import torch
    from torch_model import carry_out, keep_weights
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    more = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if asymmetric(task.checkpoint) else {}
    model = AutoModelForCausalLM.from_pretrained(task.checkpoint, dtype=getattr(torch, task.dtype), **more).eval()
    reader = f"transformers {version('transformers')}, compressed-tensors {version('compressed-tensors')}"
    answer = Answer(reader, task.dtype)
    carry_out(task, model, answer)
    linears = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"}
    keep_weights(task, {name: linear.weight for name, linear in linears.items()})
    return answer


def asymmetric(folder: str) -> bool:
    """Whether weights have zero points: transformers 5.23 reads these only where it dequantises on the way in."""
    config = json.loads((Path(folder) / "config.json").read_text()).get("quantization_config", {})
    groups = config.get("config_groups", {}).values()
    return any(not (group.get("weights") or {}).get("symmetric", True) for group in groups)


if __name__ == "__main__":
    serve(read)
