"""A checkpoint read by transformers, with compressed-tensors where its configuration names that library."""

from importlib.metadata import version

from shared import Answer, Task, serve


def read(task: Task) -> Answer:
    import torch
    from torch_model import carry_out, keep_weights
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(task.checkpoint, dtype=getattr(torch, task.dtype)).eval()
    reader = f"transformers {version('transformers')}, compressed-tensors {version('compressed-tensors')}"
    answer = Answer(reader, task.dtype)
    carry_out(task, model, answer)
    linears = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"}
    keep_weights(task, {name: linear.weight for name, linear in linears.items()})
    return answer


if __name__ == "__main__":
    serve(read)
