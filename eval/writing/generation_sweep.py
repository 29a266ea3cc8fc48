"""Greedy and sampled texts of several models over temperatures: where they differ, lengths and repetition.

Sampled texts of two models can be held against each other token by token only if chance is the same for both. Here it
is: to the logits of a step, divided by the temperature, one adds a number from the Gumbel distribution for each token
    of the vocabulary, and
writes the token with the highest sum; that is a sample of softmax(logits / temperature). The numbers depend on the
prompt, the
seed, the step and the token, and on nothing else: not on the model, its device or the temperature. So the same logits
give the same token, exactly; and where two models' distributions are at a total variation TV, their tokens differ with
a probability between TV and 2 TV / (1 + TV) (Daliri, Musco and Suresh, arXiv:2408.07978), wherever in the vocabulary
the difference lies. One uniform number put through each model's cumulative distribution has no such bound: a small
change of an early token moves all later ones.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import LogitsProcessor, PreTrainedTokenizerBase

from eval.record.files import write_whole
from eval.text.windows import mean_and_stderr
from eval.writing.generation import Written, encode_prompt, end_tokens, first_difference, settings_aside, write

SWEEP_PROMPTS = (
    "Which planet of the solar system has the most moons, and how are moons discovered?",
    "Write a Python function that tells whether a word reads the same backwards.",
    "A baker sells 17 loaves in the morning and 28 in the afternoon, for 3 euros each. What does she take? Go step by "
    "step.",
    "Tell a short story about a lighthouse keeper who finds a message in a bottle.",
    "List seven things to pack for a weekend in the mountains.",
    "Translate into French: The train leaves at nine, and my sister is late.",
    "Is this review good or bad? Answer with one word: The soup was cold, and the waiter forgot us twice.",
    "Explain to a child why ice floats on water.",
    "Write a SQL query for the ten customers who spent the most last year.",
    "When was the printing press invented, and what changed because of it?",
    "Continue with five more numbers: 3, 6, 12, 24,",
    "Write a poem of four lines about the first snow of the year.",
    "Describe a bicycle as a JSON object with its brand, colour, weight and number of gears.",
    "Wie viele Tage hat ein Schaltjahr, und warum gibt es Schaltjahre?",
    "Name three advantages and three disadvantages of working from home.",
    "Write a polite email that moves a meeting from Tuesday to Thursday.",
)
BASELINE = "baseline"
FILE = "samples/generations.jsonl"
_SHOWN = 12  # samples in the record; all are in the file
_COLDEST = 0.01  # below, logits / temperature runs out of float32's range
_GRAM = 4


@dataclass(frozen=True)
class Generation:
    """What one model wrote once.

    Attributes:
        temperature, seed: 0 and None: greedy.
        tokens, text: without the token that ends the text.
        first_difference: index of the first token that is not the baseline's, or at which one of the two has ended;
            None: the same from beginning to end, or the baseline itself.
        repetition: share of its runs of four tokens that occurred in it before; None: it has none.
    """

    model: str
    prompt: str
    temperature: float
    seed: int | None
    tokens: list[int]
    ended: bool
    text: str
    first_difference: int | None
    repetition: float | None


@dataclass(repr=False)
class Generations:
    """What was written.

    Attributes:
        settings: new_tokens, prompts (their number) and prompts_sha256, temperatures, seeds, batch_size, chat,
            end_tokens, dtype and device {model: ...}, aside {model: settings of its own that were not used}.
        written: by prompt, temperature, model and seed, in this order; the baseline first.
        file: where `save` put all of it, relative to the run's folder; None: nowhere.
    """

    settings: dict[str, Any]
    written: list[Generation] = field(default_factory=list)
    file: str | None = None

    def __repr__(self) -> str:
        return f"Generations({len(self.written)} of {len(self.settings['dtype'])} models)"

    def _repr_html_(self) -> str:
        head = "".join(
            f"<th>{h}</th>"
            for h in (
                "model",
                "temperature",
                "first difference, tokens",
                "the same",
                "length, tokens",
                "repetition",
                "ended",
            )
        )
        body = ""
        for row in self.rows():
            cells = [
                f"{row['temperature']:g}" if row["temperature"] else "greedy",
                _cell(row, "first_difference"),
                _cell(row, "same_share", 100, " %"),
                _cell(row, "length"),
                _cell(row, "repetition", 100, " %"),
                _cell(row, "ended_share", 100, " %"),
            ]
            shown = "".join(f"<td>{cell}</td>" for cell in cells)
            body += f"<tr><th style='text-align:left'>{escape(row['model'])}</th>{shown}</tr>"
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    def rows(self) -> list[dict[str, Any]]:
        """A row for each temperature and model, with means over its generations.

        first_difference: tokens until the first that is not the baseline's; a generation without any counts its length,
            so that
        `new_tokens` bounds it. length, likewise, is at most `new_tokens`. Standard errors have prompts as clusters:
        seeds of one prompt resemble each other; None for a single prompt. What is null: the baseline's against itself,
        repetition where all texts are shorter than four tokens.
        """
        rows = []
        for temperature in (0.0, *self.settings["temperatures"]):
            for model in self.settings["dtype"]:
                mine = [g for g in self.written if (g.model, g.temperature) == (model, temperature)]
                other = model != BASELINE
                agreed = [len(g.tokens) if g.first_difference is None else g.first_difference for g in mine]
                row: dict[str, Any] = {"model": model, "temperature": temperature, "n": len(mine)}
                for name, values in (
                    ("first_difference", agreed if other else [None] * len(mine)),
                    ("same_share", [g.first_difference is None if other else None for g in mine]),
                    ("length", [len(g.tokens) for g in mine]),
                    ("repetition", [g.repetition for g in mine]),
                    ("ended_share", [g.ended for g in mine]),
                ):
                    row[name], row[f"{name}_stderr"] = _over_prompts(zip([g.prompt for g in mine], values, strict=True))
                rows.append(row)
        return rows

    @property
    def metrics(self) -> dict[str, dict[str, float]]:
        """{model: {metric: value}} for the record, with _stderr: first_difference_tokens, same_share (not of the
        baseline), length_tokens, repetition_share and ended_share, each with _greedy or _t<temperature> behind."""
        units = {
            "first_difference": "first_difference_tokens",
            "same_share": "same_share",
            "length": "length_tokens",
            "repetition": "repetition_share",
            "ended_share": "ended_share",
        }
        found: dict[str, dict[str, float]] = {}
        for row in self.rows():
            mine = found.setdefault(row["model"], {})
            at = f"t{row['temperature']:g}" if row["temperature"] else "greedy"
            for name, metric in units.items():
                for end in ("", "_stderr"):
                    if row[f"{name}{end}"] is not None:
                        mine[f"{metric}_{at}{end}"] = row[f"{name}{end}"]
        return found

    def found(self) -> dict[str, Any]:
        """Everything as JSON, as the record keeps it under `generation`: settings, rows, samples, and the file once it
        is saved.

        samples: [{prompt, temperature, seed, texts: {model: text}, first_difference: {model: tokens or None}}], the
            first twelve
        in the order of seeds, prompts and temperatures, whatever was written.
        """
        asked = dict.fromkeys((g.seed or 0, g.prompt, g.temperature, g.seed) for g in self.written)
        order = list(dict.fromkeys(g.prompt for g in self.written))
        samples = []
        for _, prompt, temperature, seed in sorted(asked, key=lambda one: (one[0], order.index(one[1])))[:_SHOWN]:
            own = [g for g in self.written if (g.prompt, g.temperature, g.seed) == (prompt, temperature, seed)]
            samples.append(
                {
                    "prompt": prompt,
                    "temperature": temperature,
                    "seed": seed,
                    "texts": {g.model: g.text for g in own},
                    "first_difference": {g.model: g.first_difference for g in own if g.model != BASELINE},
                }
            )
        return {"settings": self.settings, "rows": self.rows(), "samples": samples, "file": self.file}

    def save(self, folder: str | Path) -> Path:
        """Write all texts and tokens to samples/generations.jsonl in a run's folder: a line for each, with Generation's
        fields."""
        lines = "".join(json.dumps(vars(one), allow_nan=False) + "\n" for one in self.written)
        path = write_whole(lines, Path(folder) / FILE)
        self.file = FILE
        return path


def _cell(row: Mapping[str, Any], name: str, times: float = 1, unit: str = "") -> str:
    if row[name] is None:
        return ""
    stderr = row[f"{name}_stderr"]
    return f"{row[name] * times:.3g}{'' if stderr is None else f' ± {stderr * times:.2g}'}{unit}"


def _over_prompts(values: Iterable[tuple[str, float | None]]) -> tuple[float | None, float | None]:
    """Mean of what is there of (prompt, value), and its standard error with prompts as clusters."""
    by_prompt: dict[str, list[float]] = {}
    for prompt, value in values:
        if value is not None:
            by_prompt.setdefault(prompt, []).append(float(value))
    if not by_prompt:
        return None, None
    return mean_and_stderr([sum(own) for own in by_prompt.values()], [len(own) for own in by_prompt.values()])


def repetition(tokens: Sequence[int]) -> float | None:
    """Share of the runs of four tokens in a text that occurred in it before; None if it is shorter than four."""
    grams = [tuple(tokens[i : i + _GRAM]) for i in range(len(tokens) - _GRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else None


class SharedChance(LogitsProcessor):
    """logits / temperature plus noise that is the same for every model: the highest is a sample (the module says why
    so).

    Args:
        prompt, seeds: what the noise depends on, beside step and token; row i of a batch has the i-th of the seeds.
        start: tokens of the prompt, from which steps are counted.
    """

    def __init__(self, prompt: str, seeds: Sequence[int], temperature: float, start: int) -> None:
        self.prompt, self.seeds, self.temperature, self.start = prompt, seeds, temperature, start

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        step = input_ids.shape[1] - self.start
        noise = torch.stack(
            [gumbel(self.prompt, seed, step, scores.shape[1]) for seed in self.seeds]
        )  # [rows, vocabulary]
        return scores / self.temperature + noise.to(scores.device)


def gumbel(prompt: str, seed: int, step: int, n: int) -> Tensor:
    """n independent numbers [n], float32, from the standard Gumbel distribution, that these arguments determine on any
    device."""
    key = int.from_bytes(hashlib.sha256(prompt.encode("utf-8", "surrogatepass")).digest()[:16], "big")
    uniform = np.random.Generator(np.random.PCG64((key, seed, step))).random(
        n
    )  # 53 bits: 24 would cut the tail, which decides
    return torch.from_numpy(-np.log(-np.log(np.clip(uniform, 1e-300, None))).astype(np.float32))


def compare_generations(
    models: Mapping[str, nn.Module],
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str] = SWEEP_PROMPTS,
    *,
    temperatures: Sequence[float] = (),
    new_tokens: int = 48,
    seeds: int = 3,
    batch_size: int | None = None,
) -> Generations:
    """Let models write, greedily and at each temperature, with the same chance for all.

    Args:
        models: {name: transformers decoder, in any dtype, on any device, with a compressed cache attached or not}; one
            is "baseline", which the others are held against, and whose end tokens are everybody's.
        prompts: chats' first turns where the tokenizer has a template for it.
        temperatures: to sample at, beside greedy, which is always done.
        new_tokens: at which texts that do not end are cut.
        seeds: samples of each prompt at each temperature.
        batch_size: how many of a prompt's samples are written at once, in rows of equal length, so that no padding
            makes a difference; None: all. 16-bit results can depend on it.

    Raises:
        ValueError: as `check_generations`; no baseline, or models of different vocabularies.
    """
    _check_models(models)
    for model in models.values():
        check_generations(
            model,
            tokenizer,
            prompts,
            temperatures=temperatures,
            new_tokens=new_tokens,
            seeds=seeds,
            batch_size=batch_size,
        )
    models = {BASELINE: models[BASELINE], **models}
    ends = end_tokens(models[BASELINE], tokenizer)
    made = Generations(_settings(models, tokenizer, prompts, temperatures, new_tokens, seeds, batch_size, ends))
    progress = tqdm(total=len(prompts) * len(models) * (1 + len(temperatures) * seeds), desc="generations", unit="text")
    for prompt in prompts:
        ids = encode_prompt(tokenizer, prompt)
        for temperature in (0.0, *map(float, temperatures)):
            asked = list(range(seeds)) if temperature else [None]
            texts: dict[str, list[Written]] = {}
            for name, model in models.items():
                progress.set_postfix_str(f"{name}, temperature {temperature:g}")
                texts[name] = []
                for some in _parts(asked, batch_size):
                    chance = [SharedChance(prompt, some, temperature, ids.shape[1])] if temperature else []
                    texts[name] += write(
                        model, ids.expand(len(some), -1), ends=ends, new_tokens=new_tokens, processors=chance
                    )
                    progress.update(len(some))
            for name, own in texts.items():
                for seed, (tokens, ended), reference in zip(asked, own, texts[BASELINE], strict=True):
                    text = tokenizer.decode(tokens, skip_special_tokens=True).strip()
                    made.written.append(
                        Generation(
                            name,
                            prompt,
                            temperature,
                            seed,
                            tokens,
                            ended,
                            text,
                            first_difference(reference.tokens, tokens),
                            repetition(tokens),
                        )
                    )
    progress.close()
    return made


def _parts(asked: list[Any], size: int | None) -> list[list[Any]]:
    size = size or len(asked)
    return [asked[at : at + size] for at in range(0, len(asked), size)]


def _settings(
    models: Mapping[str, nn.Module],
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    temperatures: Sequence[float],
    new_tokens: int,
    seeds: int,
    batch_size: int | None,
    ends: list[int],
) -> dict[str, Any]:
    return {
        "new_tokens": new_tokens,
        "prompts": len(prompts),
        "prompts_sha256": hashlib.sha256(json.dumps(list(prompts)).encode()).hexdigest(),
        "temperatures": [float(t) for t in temperatures],
        "seeds": seeds,
        "batch_size": batch_size,
        "chat": bool(tokenizer.chat_template),
        "end_tokens": ends,
        "dtype": {name: str(model.dtype).removeprefix("torch.") for name, model in models.items()},
        "device": {name: next(model.parameters()).device.type for name, model in models.items()},
        "aside": {name: json.loads(json.dumps(settings_aside(model), default=str)) for name, model in models.items()},
    }


def _check_models(models: Mapping[str, nn.Module]) -> None:
    if BASELINE not in models:
        raise ValueError(
            f"`models` (={list(models)}) must have one by the name of {BASELINE!r}, with which the others are compared"
        )
    sizes = {name: model.config.get_text_config().vocab_size for name, model in models.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"`models` must share a vocabulary, token by token; theirs have these sizes: {sizes}")


def check_generations(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str] = SWEEP_PROMPTS,
    *,
    temperatures: Sequence[float] = (),
    new_tokens: int = 48,
    seeds: int = 3,
    batch_size: int | None = None,
) -> None:
    """Raise ValueError if a model cannot write like this; quick, so that it can be asked before long work.

    Args: as of `compare_generations`, for one of the models.
    """
    for name, value in (
        ("new_tokens", new_tokens),
        ("seeds", seeds),
        ("batch_size", 1 if batch_size is None else batch_size),
    ):
        if type(value) is not int or value < 1:
            raise ValueError(f"`{name}` (={value!r}) must be a positive integer")
    bad = [
        t for t in temperatures if isinstance(t, bool) or not isinstance(t, int | float) or not _COLDEST <= t < math.inf
    ]
    if bad:
        raise ValueError(
            f"`temperatures` (={list(temperatures)}) must be numbers of {_COLDEST} or more, which {bad[0]!r} is not; "
            "greedy, the temperature 0, is always done"
        )
    if len({f"{t:g}" for t in temperatures}) < len(temperatures):
        raise ValueError(f"`temperatures` (={list(temperatures)}) has one twice; give each value once")
    if isinstance(prompts, str) or not prompts or not all(isinstance(p, str) and p for p in prompts):
        raise ValueError(f"`prompts` (={prompts!r}) must be a list of texts, none of them empty")
    if len(set(prompts)) < len(prompts):
        twice = next(p for p in prompts if list(prompts).count(p) > 1)
        raise ValueError(
            f"`prompts` has {twice!r} twice, which gives no new texts; give each prompt once, and use `seeds` for more "
            "texts"
        )
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 30
    for prompt in prompts:
        taken = encode_prompt(tokenizer, prompt).shape[1]
        if not taken:
            raise ValueError(f"`prompts`: {prompt!r} has no tokens in this tokenizer; some text would do")
        if taken + new_tokens > positions:
            raise ValueError(
                f"`new_tokens` (={new_tokens}) after a prompt of {taken} tokens is more than this model's {positions} "
                f"positions; {max(positions - taken, 0)} would do"
            )
