"""A GGUF file read by llama.cpp: the library through its Python bindings, its speed by its own llama-bench.

The environment variable LLAMA_CPP_LIB_PATH names the folder with libllama and, beside it, llama-bench.
"""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
from shared import Answer, Task, serve


def read(task: Task) -> Answer:
    import llama_cpp

    answer = Answer(f"llama.cpp of llama-cpp-python {llama_cpp.__version__}", task.dtype)
    if task.prompts or task.windows:
        llm = llama_cpp.Llama(
            task.checkpoint,
            n_ctx=task.longest,
            n_batch=task.longest,
            n_ubatch=task.longest,
            n_threads=task.threads,
            n_threads_batch=task.threads,
            logits_all=True,
            verbose=False,
        )
        answer.tokens = [greedy(llm, p, task.new_tokens) for p in task.prompts]
        answer.token_nll = [token_nll(llm, w) for w in task.windows]
    if task.speed_prompt:
        answer.decode_tokens_per_s = bench(task, "-p", "0", "-n", str(task.speed_tokens), "-d", prompt_length(task))
        answer.prefill_tokens_per_s = bench(task, "-p", prompt_length(task), "-n", "0")
    return answer


def greedy(llm: "llama_cpp.Llama", prompt: list[int], new_tokens: int) -> list[int]:  # noqa: F821
    llm.reset()
    llm.eval(prompt)
    tokens: list[int] = []
    for _ in range(new_tokens):
        tokens.append(int(llm.scores[llm.n_tokens - 1].argmax()))
        llm.eval(tokens[-1:])
    return tokens


def token_nll(llm: "llama_cpp.Llama", window: list[int]) -> list[float]:  # noqa: F821
    """Negative log-likelihood in nats of each token of a window but the first."""
    llm.reset()
    llm.eval(window)
    given = []
    for i, token in enumerate(window[1:]):
        logits = llm.scores[i].astype(np.float64)
        given.append(float(logits.max() + np.log(np.exp(logits - logits.max()).sum()) - logits[token]))
    return given


def bench(task: Task, *what: str) -> float:
    """Tokens per second, the median of llama-bench's rounds, for one of its tests."""
    program = Path(os.environ["LLAMA_CPP_LIB_PATH"]) / "llama-bench"
    options = ["-t", str(task.threads), "-r", str(task.rounds), "-o", "json"]
    out = subprocess.run(
        [program, "-m", task.checkpoint, *options, *what], check=True, capture_output=True, text=True
    ).stdout
    return float(np.median(json.loads(out)[0]["samples_ts"]))


def prompt_length(task: Task) -> str:
    return str(len(task.speed_prompt))


if __name__ == "__main__":
    serve(read)
