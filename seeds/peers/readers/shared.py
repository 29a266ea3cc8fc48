"""What all readers share: the task that they are given, and the answer that they write.

A reader is a script that runs in the environment of another library, so nothing here imports the workbench or torch:

    python seeds/peers/readers/in_vllm.py TASK.json ANSWER.json
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Task:
    """A reader's task for a checkpoint.

    Attributes:
        checkpoint: folder, or a GGUF file.
        dtype: of activations: float32 or bfloat16.
        threads: number of threads that the reader may use.
        prompts, new_tokens: token ids, each continued greedily by exactly `new_tokens` tokens, also after an end token.
        windows: token ids, for the negative log-likelihood of each token except the first.
        speed_prompt, speed_tokens, rounds: token ids, the number of tokens that continue them, and the number of timed
            rounds. An empty prompt: nothing is timed.
        weights: file for the dequantised weights that the reader uses; None: not requested.
        longest: number of tokens of the longest sequence for which the reader must have room.
    """

    checkpoint: str
    dtype: str
    threads: int
    prompts: list[list[int]] = field(default_factory=list)
    new_tokens: int = 0
    windows: list[list[int]] = field(default_factory=list)
    speed_prompt: list[int] = field(default_factory=list)
    speed_tokens: int = 0
    rounds: int = 0
    weights: str | None = None
    longest: int = 0


@dataclass
class Answer:
    """A reader's results.

    Attributes:
        reader: library, its version, and how it computed.
        tokens: of each prompt. token_nll: of each window, in nats.
        decode_tokens_per_s, prefill_tokens_per_s: medians over the rounds; None where nothing was timed.
        seconds: from the start of the script to the end of the task.
        not_run: why the library, which loaded the checkpoint, cannot run it on this machine; "" if it did.
    """

    reader: str
    dtype: str
    tokens: list[list[int]] = field(default_factory=list)
    token_nll: list[list[float]] = field(default_factory=list)
    decode_tokens_per_s: float | None = None
    prefill_tokens_per_s: float | None = None
    seconds: float = 0.0
    not_run: str = ""


def serve(read: Callable[[Task], Answer]) -> None:
    """Do the task of the first file named on the command line, and write the answer to the second."""
    start = time.perf_counter()
    task = Task(**json.loads(Path(sys.argv[1]).read_text()))
    os.environ["OMP_NUM_THREADS"] = str(task.threads)  # read when torch is imported, which `read` does
    os.environ["HF_HUB_OFFLINE"] = "1"
    answer = read(task)
    answer.seconds = time.perf_counter() - start
    Path(sys.argv[2]).write_text(json.dumps(asdict(answer)))


def rates(generate: Callable[[int], None], task: Task) -> tuple[float, float]:
    """Tokens per second of decoding and of reading the prompt: medians over the rounds, after one to warm up.

    Args:
        generate: continues the prompt by a given number of tokens. The first one takes the pass over the prompt; each
            further one takes a step.
    """
    generate(2)
    decode, prefill = [], []
    for _ in range(task.rounds):
        first, whole = (timed(generate, n) for n in (1, task.speed_tokens + 1))
        prefill.append(len(task.speed_prompt) / first)
        decode.append(task.speed_tokens / (whole - first))
    return statistics.median(decode), statistics.median(prefill)


def timed(generate: Callable[[int], None], new_tokens: int) -> float:
    start = time.perf_counter()
    generate(new_tokens)
    return time.perf_counter() - start
