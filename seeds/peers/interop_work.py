"""The workbench's side of `make interop`: recipes, checkpoints, and what the compressed models give here."""

import json
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from compress import apply, held_out, load_compressed, load_model
from compress.checkpoint.save import export_checkpoint, save_compressed
from compress.inputs.calibration import beginning, calibration
from compress.linear import compressed_linears
from compress.recipe import parse_recipe
from eval.speed.speed import contestants, measure_speed
from eval.text.perplexity import token_losses
from eval.text.windows import Window, predictions
from kernels.support.deploy import cast

MODELS = ("smollm2-135m", "gemma3-270m")
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 5, 48, 32
WINDOWS, WINDOW = 8, 512
SPEED_PROMPT, SPEED_TOKENS = 512, 64
SAMPLES, SEQLEN = 16, 512
SAVED = "workbench"  # the format that the others are made of


@dataclass(frozen=True)
class Case:
    """A recipe, a format that holds it, and the readers of that format that take it."""

    recipe: str
    save_format: str
    readers: tuple[str, ...]


GPTQ64, GPTQ32 = "gptq(bits=4, group_size=64)", "gptq(bits=4, group_size=32)"
AWQ = "awq(bits=4, group_size=32), gptq(bits=4, group_size=32, symmetric=False)"
INT8, FP8, PRUNED = "smoothquant, int8", "fp8", "sparsegpt(pattern='2:4')"
CASES = (
    Case(GPTQ64, "compressed-tensors", ("transformers", "vllm")),
    Case(GPTQ64, "gptq", ("gptqmodel", "vllm")),
    Case(GPTQ32, "gguf", ("llamacpp",)),
    Case(AWQ, "compressed-tensors", ("transformers", "vllm")),
    Case(AWQ, "gptq", ("gptqmodel",)),  # vLLM takes symmetric GPTQ checkpoints only
    Case(AWQ, "gguf", ("llamacpp",)),
    Case(INT8, "compressed-tensors", ("transformers", "vllm")),
    Case(FP8, "compressed-tensors", ("transformers", "vllm")),
    Case(PRUNED, "compressed-tensors", ("transformers", "vllm")),
    Case(PRUNED, "gguf", ("llamacpp",)),
)
FOLDERS = {GPTQ64: "gptq-g64", GPTQ32: "gptq-g32", AWQ: "awq-gptq", INT8: "int8", FP8: "fp8", PRUNED: "2of4"}


@dataclass(frozen=True)
class Here:
    """The results of a compressed model in the workbench, computed in float32.

    tokens: [prompts][NEW_TOKENS], greedy. token_nll: [windows][WINDOW - 1], nats.
    """

    tokens: list[list[int]]
    token_nll: list[list[float]]


def text_tokens(tokenizer: PreTrainedTokenizerBase, corpus: str) -> tuple[list[int], Tensor]:
    """The special tokens before every text, and the tokens of the scoring corpus; of the embedded one, if it is not
    here."""
    try:
        ids = held_out(tokenizer, corpus=corpus)
    except ValueError:
        ids = held_out(tokenizer)
    return beginning(tokenizer), ids[0]


def task_tokens(model_name: str, corpus: str) -> dict[str, list]:
    """prompts, windows and speed_prompt of every reader's task: token ids, so that no tokenizer takes part."""
    first, ids = text_tokens(load_model_and_tokenizer(model_name)[1], corpus)
    room, start = WINDOW - len(first), ids.numel() // 2
    prompts = [ids[start + i * 1000 :][: PROMPT_TOKENS - len(first)].tolist() for i in range(PROMPTS)]
    windows = [ids[i * room : (i + 1) * room].tolist() for i in range(WINDOWS)]
    return {
        "prompts": [first + p for p in prompts],
        "windows": [first + w for w in windows],
        "speed_prompt": first + ids[: SPEED_PROMPT - len(first)].tolist(),
    }


def load_model_and_tokenizer(model_name: str) -> tuple[nn.Module, PreTrainedTokenizerBase]:
    return load_model(model_name)


def make(work: Path, model_name: str, recipe: str, corpus: str) -> Path:
    """The compressed model in the workbench's own format, made if it is not there yet.

    Uncompressed weights are cast to bfloat16, the dtype in which models are served.
    """
    folder = work / model_name / FOLDERS[recipe] / SAVED
    if folder.is_dir():
        return folder
    model, tokenizer = load_model(model_name)
    methods = parse_recipe(recipe)
    batches = ()
    if any(method.needs_calibration for method in methods):
        try:
            batches = calibration(tokenizer, corpus=corpus, samples=SAMPLES, seqlen=SEQLEN)
        except ValueError:
            batches = calibration(tokenizer, samples=SAMPLES, seqlen=SEQLEN)
    result = apply(methods, model, batches)
    cast(result.model, torch.bfloat16)
    return save_compressed(result, folder, tokenizer)


def export(work: Path, model_name: str, case: Case) -> Path:
    """The checkpoint in the format of a case, made if it is not there yet."""
    folder = work / model_name / FOLDERS[case.recipe] / case.save_format
    return folder if folder.is_dir() else export_checkpoint(folder.parent / SAVED, folder, case.save_format)


def reference(folder: Path) -> nn.Module:
    """The compressed model, its weights exactly as they are stored, that computes in float32."""
    return cast(load_compressed(folder), torch.float32)


@torch.no_grad()
def here(model: nn.Module, tokens: dict[str, list]) -> Here:
    return Here(
        [greedy(model, prompt) for prompt in tokens["prompts"]],
        [token_losses(*predictions(model, whole(window))).tolist() for window in tokens["windows"]],
    )


def whole(window: list[int]) -> Window:
    return Window(torch.tensor([window]), len(window) - 1)


def greedy(model: nn.Module, prompt: list[int]) -> list[int]:
    """NEW_TOKENS greedy tokens; end tokens are treated like all others."""
    given: list[int] = []
    ids, cache = torch.tensor([prompt]), None
    for _ in range(NEW_TOKENS):
        out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        ids, cache = out.logits[:, -1:].argmax(-1), out.past_key_values
        given.append(int(ids))
    return given


@torch.no_grad()
def gap(model: nn.Module, prompt: list[int], common: list[int], ours: int, theirs: int) -> float:
    """How much larger the logit of our token is than that of theirs, after a prompt and the tokens in common."""
    logits = model(torch.tensor([prompt + common]), use_cache=False, logits_to_keep=1).logits[0, -1]
    return float(logits[ours] - logits[theirs])


def weights_here(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Name and dequantised weight [out, in] of every compressed linear."""
    for name, linear in compressed_linears(model).items():
        yield name, linear.dequantize()


def speeds(folders: dict[str, Path], baseline: str, rounds: int) -> dict[str, dict]:
    """Tokens per second of every compressed model and of the uncompressed one, in turns, in one process."""
    models = {"baseline": load_model(baseline)[0]} | {name: load_compressed(f) for name, f in folders.items()}
    measured = measure_speed(contestants(models), prompt_tokens=SPEED_PROMPT, new_tokens=SPEED_TOKENS, rounds=rounds)
    return {name: asdict(speed) for name, speed in measured.items()}


def checkpoint_file(folder: Path) -> Path:
    """A reader's input: the folder, or its GGUF file."""
    return next(folder.glob("*.gguf"), folder)


def nbytes(folder: Path) -> int:
    """Bytes of the files with weights."""
    return sum(f.stat().st_size for f in folder.iterdir() if f.suffix in (".safetensors", ".gguf"))


def mean(rows: list[list[float]]) -> float:
    return statistics.fmean(x for row in rows for x in row)


def kept_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content))
