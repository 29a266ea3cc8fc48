"""Is what a reader gives the same as what the workbench gives, and the table of it."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import torch
from interop_work import Case, Here, gap, mean, weights_here
from readers.shared import Answer
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

# Of the largest weight of 32 in a row. A reader that computes in bfloat16 rounds a scale that we keep in float32, and
# its product with a code, by 2^-8 each. An 8-bit code that is off by one gives 1 / 127, which is just more.
RELATIVE = 2 * 2**-8 + 2**-16
BLOCK = 32
# What rounding may do, by how the reader computes: the share by which perplexity may differ, and the largest gap
# between two logits of ours that a reader may take for the other order. Logits are around 20, where bfloat16 numbers
# lie 0.125 apart.
SIXTEEN_BITS, EIGHT_BITS = (0.01, 0.5), (0.02, 1.0)


@dataclass(frozen=True)
class Difference:
    """The first greedy token that differs: behind which prompt, at which step, and the gap between our two logits."""

    prompt: int
    step: int
    ours: int
    theirs: int
    gap: float


@dataclass
class Row:
    """One checkpoint in one reader.

    Attributes:
        nbytes: of the files with weights. tokens, same: greedy tokens, and how many of them come before a difference.
        perplexity: (here, there). nll_rms: root mean square of the difference per token, nats.
        weights: how many were compared; worst: largest |difference|, as a share of the
            largest |weight| of the BLOCK in a row that it stands in; first_tensor: the first that differs.
        decode, prefill: tokens per second, (here, there).
        problems: why this is not the same model; empty if it is.
    """

    model: str
    recipe: str
    save_format: str
    reader: str
    nbytes: int = 0
    tokens: int = 0
    same: int = 0
    differences: list[Difference] = field(default_factory=list)
    perplexity: tuple[float, float] | None = None
    nll_rms: float | None = None
    weights: int = 0
    worst: float = 0.0
    first_tensor: str = ""
    decode: tuple[float, float] | None = None
    prefill: tuple[float, float] | None = None
    problems: list[str] = field(default_factory=list)


def rounds_to_eight_bits(case: Case, reader: str) -> bool:
    """Whether the reader rounds activations to 8 bits: llama.cpp does for every block type but floats."""
    return reader == "llamacpp" or "8" in case.recipe.rsplit(",", 1)[-1]


def compare(row: Row, case: Case, prompts: list[list[int]], ours: Here, theirs: Answer, model: nn.Module) -> None:
    """Fill the row with tokens, perplexities, and what is wrong with them."""
    share, largest = EIGHT_BITS if rounds_to_eight_bits(case, row.reader.split(" ")[0]) else SIXTEEN_BITS
    for i, (prompt, mine, given) in enumerate(zip(prompts, ours.tokens, theirs.tokens, strict=True)):
        row.tokens += len(mine)
        step = next((j for j, pair in enumerate(zip(mine, given, strict=True)) if pair[0] != pair[1]), len(mine))
        row.same += step
        if step < len(mine):
            apart = gap(model, prompt, mine[:step], mine[step], given[step])
            row.differences.append(Difference(i, step, mine[step], given[step], apart))
    row.perplexity = math.exp(mean(ours.token_nll)), math.exp(mean(theirs.token_nll))
    pairs = [(a, b) for x, y in zip(ours.token_nll, theirs.token_nll, strict=True) for a, b in zip(x, y, strict=True)]
    row.nll_rms = math.sqrt(sum((a - b) ** 2 for a, b in pairs) / len(pairs))
    for d in row.differences:
        if not abs(d.gap) <= largest:  # also below 0: tokens come from cached steps, the gap from one whole pass
            where = f"prompt {d.prompt}, step {d.step}"
            row.problems.append(f"{where}: token {d.theirs}, and {d.ours} here, whose logit is {d.gap:.2f} larger")
    here, there = row.perplexity
    if not abs(there / here - 1) <= share:
        row.problems.append(f"perplexity {there:.2f}, and {here:.2f} here")


def compare_tensors(row: Row, theirs: dict[str, Tensor] | None, file: Path | None, model: nn.Module) -> None:
    """Compare dequantised weights, of a state dict or of a file, with ours; the row names the first that differs."""
    for name, ours in weights_here(model):
        if theirs is not None:
            given = theirs.get(f"{name}.weight")
        else:
            with safe_open(file, "pt") as stored:
                given = stored.get_tensor(name) if name in set(stored.keys()) else None
        row.weights += 1
        if given is None or given.shape != ours.shape:
            worst = math.inf
        else:
            size = BLOCK if ours.shape[1] % BLOCK == 0 else ours.shape[1]
            largest = ours.abs().unflatten(1, (-1, size)).amax(2).clamp(min=torch.finfo(torch.float16).tiny)
            worst = float(((ours - given.float()).abs().unflatten(1, (-1, size)).amax(2) / largest).max())
        row.worst = max(row.worst, worst)
        if not worst <= RELATIVE and not row.first_tensor:
            row.first_tensor = name
            row.problems.append(
                f"{name}.weight differs by {worst:.1%} of its block's range; it is the first tensor that does"
            )


def gguf_weights(file: Path) -> dict[str, Tensor]:
    """All weights of a GGUF file through gguf's decoder, under transformers' names."""
    loaded = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    return loaded.state_dict()


def markdown(rows: list[Row], facts: dict, speeds: dict[str, dict[str, dict]]) -> str:
    """The published note: what was measured, and one table a model."""
    out = ["# Checkpoints in the libraries that read them", "", introduction(facts), ""]
    for model in dict.fromkeys(row.model for row in rows):
        mine = [row for row in rows if row.model == model]
        out += [f"**{model}**{here(speeds.get(model, {}))}", "", HEAD]
        out += [*(line(row) for row in mine if row.perplexity), ""]
        if silent := [f"`{row.recipe}` as {row.save_format} in {row.reader}" for row in mine if not row.perplexity]:
            out += [f"Without an answer in this run: {'; '.join(silent)}.", ""]
        notes = [f"- `{r.recipe}`, {r.save_format}, {r.reader}: {p}" for r in mine if r.perplexity for p in r.problems]
        out += ["Mismatches:", "", *notes, ""] if notes else []
    return "\n".join(out).rstrip() + "\n"


HEAD = (
    "| recipe | format | MB | reader | greedy tokens | perplexity here | there | decode here, tokens/s | there "
    "| prefill here, tokens/s | there |\n| --- | --- | ---: | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"
)


def introduction(facts: dict) -> str:
    return f"""\
Measured on {facts["date"]} on {facts["hardware"]}, {facts["threads"]} threads: `{facts["command"]}`. Each model is
compressed and saved by this workbench (calibrated on {facts["calibration"]}), its other weights in bfloat16, and the
same checkpoint is run by the other library.

- Perplexity is on {facts["windows"]} windows of {facts["window"]} tokens of {facts["corpus"]}, the same token ids
  everywhere. "Here" is the compressed model in float32 arithmetic, on the weights as they are stored. "There" is the
  reader as it serves the model: in bfloat16, or with activations in 8 bits where the recipe says so; llama.cpp always
  rounds activations to 8 bits where weights are codes.
- Greedy tokens: {facts["prompts"]} prompts, {facts["new_tokens"]} new tokens each. Where a text parts from ours, the
  table gives the prompt and the step of the first different token and, in parentheses, by how much our model's logit
  for its own token is larger than that for the reader's. Later tokens of that text are not compared.
- A star behind the reader: its dequantised weights were compared with ours, tensor by tensor, and all are equal within
  the rounding of their scales to 16 bits. vLLM shows no weights.
- Speeds are medians of {facts["rounds"]} rounds: decoding {facts["speed_tokens"]} tokens after a prompt of
  {facts["speed_prompt"]}, and reading that prompt, at batch 1. Here the model runs in bfloat16 as fast as this
  workbench runs it: prompts and decoding natively where it takes what is stored (the line of a model
  says for how many recipes), else compiled; fp8 is emulated. Readers and workbench were timed one after the other.
  transformers is not timed: it dequantises at load, and is as fast as the uncompressed model."""


def here(speeds: dict[str, dict]) -> str:
    """What the workbench's own speeds [recipe, "baseline" among them] are of; "" where nothing was timed."""
    if not speeds:
        return ""
    speed, recipes = speeds["baseline"], [recipe for recipe in speeds if recipe != "baseline"]
    native = [recipe for recipe in recipes if speeds[recipe]["execution"].partition("; native step")[1]]
    return (
        f" (uncompressed here, 16 bits, as it runs fastest here: {speed['decode_tokens_per_s']:.0f} tokens/s decode, "
        f"{speed['prefill_tokens_per_s']:,.0f} prefill; {len(native)} of {len(recipes)} recipes decode in the native "
        "step)"
    )


def line(row: Row) -> str:
    tokens = f"{row.same} of {row.tokens}" if row.tokens else "–"
    if row.tokens and row.same == row.tokens:
        tokens = f"all {row.tokens} the same"
    elif row.differences:
        tokens += "; " + ", ".join(f"{d.prompt}:{d.step} ({d.gap:.2f})" for d in row.differences)
    reader = row.reader + (" *" if row.weights and not row.first_tensor else "")
    cells = [f"`{row.recipe}`", row.save_format, f"{row.nbytes / 1e6:.1f}", reader, tokens]
    cells += [f"{p:.2f}" for p in row.perplexity or ()] or ["–", "–"]
    for pair in (row.decode, row.prefill):
        cells += ["–" if x is None else f"{x:,.0f}" for x in pair or (None, None)]
    return "| " + " | ".join(cells) + " |"


def load_answer(path: Path) -> Answer | None:
    return Answer(**json.loads(path.read_text())) if path.is_file() else None
