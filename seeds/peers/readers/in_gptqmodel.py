"""A GPTQ checkpoint read by GPTQModel on a CPU."""

from importlib.metadata import version

from shared import Answer, Task, serve


def read(task: Task) -> Answer:
    import torch
    from gptqmodel import GPTQModel
    from torch_model import carry_out, keep_weights

    model = GPTQModel.load(task.checkpoint, device="cpu", dtype=getattr(torch, task.dtype)).model.eval()
    linears = {n: m for n, m in model.named_modules() if hasattr(m, "qweight")}
    kernels = sorted({type(m).__name__ for m in linears.values()})
    answer = Answer(f"GPTQModel {version('gptqmodel')} ({', '.join(kernels)})", task.dtype)
    keep_weights(task, {name: linear.dequantize_weight().T for name, linear in linears.items()})
    carry_out(task, model, answer)
    return answer


if __name__ == "__main__":
    serve(read)
