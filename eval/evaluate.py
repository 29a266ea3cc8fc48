"""evaluate: measures a compressed model against its baseline, in one process."""

import math
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from eval.machine.memory import peak_memory
from eval.machine.size import bits_per_weight, parameter_count, size
from eval.record.html import CELL_COLOURS
from eval.record.measured import Sample
from eval.record.metrics import Change, metric_table
from eval.record.rows import typed
from eval.record.speed import Speed
from eval.speed.lossless import LOOKED_UP, lossless_speed_ups
from eval.speed.speed import BY_COMPILER, BY_GRAPH, PLAIN, measure_speed, standard_variants
from eval.text.divergence import compare_on_text
from eval.text.names import text_name
from eval.text.perplexity import perplexity
from eval.text.through_cache import remark
from eval.text.typos import with_typos
from eval.text.windows import LogitSource, mean_and_stderr, windows
from eval.writing.free_running import PASSAGE_TOKENS, free_running, passages
from eval.writing.generation import PROMPTS, end_tokens, generate_samples, written_beside
from kernels.registry import recording
from kernels.support.deploy import deployed
from kernels.support.errors import first_line
from kernels.support.positions import positions

_TIMED_PASSAGES = 4  # of the baseline's own texts, for the speed that a model gives it as its draft


@dataclass
class Scores:
    """The measured scores.

    Attributes:
        metrics: {"baseline": {metric: value}, "compressed": {...}, and one entry per further model}; units are in the
            names, the standard error of m is m_stderr.
        difference: {name: {metric: compressed - baseline}} if windows were paired, with standard errors.
        texts: {corpus: {tokens, window, bos, windows}}.
        notes: measurements that were not possible, with the reasons.
        device, dtype, deploy_dtype: device and dtype of the models that were scored on text, and dtype of the models
            whose speed and size were measured.
    """

    metrics: dict[str, dict[str, float]]
    difference: dict[str, dict[str, float]] = field(default_factory=dict)
    texts: dict[str, dict[str, Any]] = field(default_factory=dict)
    speed: dict[str, Speed] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    kernels: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    device: str = ""
    dtype: str = ""
    deploy_dtype: str = ""
    seconds: float = 0.0

    def _repr_html_(self) -> str:
        models = list(self.metrics)
        run = typed({"scores": self.metrics, "difference": self.difference, "speed": self.speed})
        table = metric_table(models, self.metrics, run.counts)
        head = "".join(f"<th>{escape(name)}</th>" for name in ("", *models))
        rows = "".join(
            f"<tr><th style='text-align:left'>{escape(' on '.join(filter(None, (row.label, row.detail))))} "
            f"<small>{escape(row.unit)}</small></th>{''.join(map(_cell, row.cells, row.changes))}</tr>"
            for row in table.rows
        )
        noisy = [f"Noisy: {run.disturbed}. Speeds are not compared."] if run.disturbed else []
        notes = "".join(f"<p>{escape(note)}</p>" for note in (*noisy, *self.notes))
        legend = "± is one standard error. Below each number is its change from the baseline; ≈ marks noise."
        return (
            f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
            f"<p><small>{legend}</small></p>{notes}{written_beside(self.samples)}"
        )


def _cell(value: tuple[str, str], change: Change) -> str:
    number, error = map(escape, value)
    color = CELL_COLOURS.get(change.kind, "inherit")
    below = f"<br><small style='color:{color}'>{escape(change.text)}</small>" if change.text else ""
    return f"<td>{number}{f' <small>{error}</small>' if error else ''}{below}</td>"


@torch.no_grad()
def evaluate(
    model: nn.Module | LogitSource,
    tokenizer: PreTrainedTokenizerBase,
    *,
    baseline: nn.Module | LogitSource | None,
    texts: dict[str, Tensor],
    others: dict[str, nn.Module] | dict[str, LogitSource] | None = None,
    window: int = 2048,
    max_windows: int | None = None,
    beginning: Sequence[int] = (),
    bos: str = "once",
    typos: float = 0.0,
    prompts: Sequence[str] = PROMPTS,
    write_tokens: int = 48,
    speed_prompt_tokens: int | None = None,
    speed_new_tokens: int = 32,
    speed_rounds: int = 5,
    timed: Sequence[str] = (),
) -> Scores:
    """Score a compressed model against the uncompressed model.

    Args:
        model, baseline: transformers decoders in the dtype in which the texts are to be scored. If the models' weights
            are not in memory, all models are given as sources of logits, and only the texts are scored. Without a
            baseline there is no divergence, and the bits are those per weight of the model itself.
        texts: {corpus: held-out ids [1, n]} for perplexity, divergence and agreement; a file has a short name in the
            metrics (`eval.text.names.text_name`).
        others: further models to score on the same texts (round-to-nearest on the same grid, say).
        window, max_windows, beginning, bos: the division of texts (`eval.text.windows.windows`).
        typos: share of letters that are typos (`eval.text.typos.corrupted`) in a copy of each text, which is scored,
            too; 0: there is no copy.
        prompts, write_tokens: greedy generations shown side by side, and the most tokens by which all models continue
            passages of the texts (`eval.writing.free_running`); none with 0 tokens.
        speed_*: see `eval.speed.speed.measure_speed`; with 0 rounds nothing is timed. Unless its length is given, the
            prompt of speed and memory has 512 tokens, or `window`, or half of the model's positions if that is less.
            If texts are written, the baseline is timed with each of the timed models as its draft, too.
        timed: names among `others` whose speed and size are measured too, in turns with the rest, on bfloat16 copies.

    Written texts, speed, memory and size are measured on bfloat16 copies, the dtype in which such models are deployed;
    the speed of the baseline is that of the strongest 16-bit baseline.
    """
    others, scored = others or {}, with_typos(texts, tokenizer, typos)
    if not isinstance(model, nn.Module):
        how = {"window": window, "max_windows": max_windows, "beginning": beginning, "bos": bos}
        return _evaluate_texts({"compressed": model, **others}, baseline, scored, **how)
    check_evaluation(
        model,
        scored,
        window=window,
        max_windows=max_windows,
        bos=bos,
        speed_rounds=speed_rounds,
        write_tokens=write_tokens,
        others=others,
        timed=timed,
    )
    start = time.perf_counter()
    longest = min(512, window, positions(model) // 2, positions(model) - speed_new_tokens)
    prompt_tokens = speed_prompt_tokens or max(1, longest)
    models = {"compressed": model} if baseline is None else {"baseline": baseline, "compressed": model}
    parameters = parameter_count(next(iter(models.values())))
    metrics: dict[str, dict[str, float]] = {name: {} for name in ("baseline", "compressed", *others)}
    scores = Scores(
        metrics,
        device=str(next(model.parameters()).device.type),
        dtype=str(model.dtype).removeprefix("torch."),
        deploy_dtype="bfloat16",
    )
    with recording() as kernels:
        for corpus, ids in scored.items():
            _score_text(
                scores,
                corpus,
                ids,
                baseline,
                {"compressed": model, **others},
                window,
                max_windows,
                beginning,
                bos,
            )
        scores.notes += [] if baseline is not None else ["There is no baseline: nothing is compared."]
        scores.notes += remark({"compressed": model, **others})
        if write_tokens:
            writing = ({} if baseline is None else {"baseline": baseline}) | {"compressed": model, **others}
            ends = end_tokens(next(iter(models.values())), tokenizer)
            how = {"new_tokens": write_tokens, "ends": ends, "beginning": beginning}
            for name, own in free_running(writing, list(texts.values()), **how).items():
                metrics[name] |= own
        half = {name: deployed(one) for name, one in models.items()}
        if write_tokens:
            scores.samples = generate_samples(half, tokenizer, prompts, new_tokens=write_tokens)
        for name, one in half.items():
            metrics[name] |= _weighed(one, parameters) | {
                "peak_memory_bytes": peak_memory(one, prompt_tokens=prompt_tokens)
            }
        del half, one  # frees memory before the copies for the contest are made
        for name in timed:
            metrics[name] |= _weighed(deployed(others[name]), parameters)
        variants = standard_variants(baseline, model, {name: others[name] for name in timed})
        try:
            if speed_rounds:
                lengths = {"prompt_tokens": prompt_tokens, "new_tokens": speed_new_tokens}
                scores.speed = measure_speed(variants, **lengths, rounds=speed_rounds)
                del variants
                if write_tokens and baseline is not None:
                    drafts = {"compressed": model} | {name: others[name] for name in timed}
                    _draft(scores, baseline, drafts, texts, beginning, write_tokens, min(speed_rounds, 3))
            else:
                scores.notes.append("Speed was not measured: `speed_rounds` is 0.")
        except Exception as error:  # earlier scores are kept
            scores.notes.append(f"Speed was not measured: {type(error).__name__}: {first_line(error)}")
            warnings.warn(scores.notes[-1], stacklevel=2)
        for name in metrics.keys() & scores.speed.keys():
            metrics[name] |= {
                "prefill_tokens_per_s": scores.speed[name].prefill_tokens_per_s,
                "decode_tokens_per_s": scores.speed[name].decode_tokens_per_s,
                "step_tokens_per_s": scores.speed[name].step_tokens_per_s,
                "time_to_first_token_s": scores.speed[name].time_to_first_token_s,
            }
    scores.notes += _not_finite(metrics)
    scores.kernels = {op: sorted(used) for op, used in kernels.items()}
    scores.seconds = time.perf_counter() - start
    return scores


def _draft(
    scores: Scores,
    baseline: nn.Module,
    drafts: dict[str, nn.Module],
    texts: dict[str, Tensor],
    beginning: Sequence[int],
    new_tokens: int,
    rounds: int,
) -> None:
    """Time the baseline's own texts with each model as its draft."""
    room = min(map(positions, (baseline, *drafts.values()))) - len(beginning) - new_tokens - LOOKED_UP
    prompts = passages(list(texts.values()), min(PASSAGE_TOKENS, room), beginning)
    if not len(prompts):
        return
    prompts = [ids[None] for ids in prompts[:: len(prompts) // _TIMED_PASSAGES or 1][:_TIMED_PASSAGES]]
    found, refused = lossless_speed_ups(baseline, drafts, prompts, new_tokens=new_tokens, rounds=rounds)
    for name, own in found.items():
        scores.metrics[name] |= own
    scores.notes += [f"Models were not timed as drafts of the baseline: {'; '.join(refused)}."] if refused else []


def _evaluate_texts(
    models: dict[str, LogitSource], baseline: LogitSource | None, texts: dict[str, Tensor], **how: Any
) -> Scores:
    """The scores of `evaluate` for models whose weights are not all in memory: perplexity, divergence, agreement."""
    start, scores = time.perf_counter(), Scores({"baseline": {}, **{name: {} for name in models}})
    with recording() as kernels:
        for corpus, ids in texts.items():
            _score_text(scores, corpus, ids, baseline, models, *how.values())
    scores.kernels = {op: sorted(used) for op, used in kernels.items()}
    scores.notes += _not_finite(scores.metrics)
    scores.notes.append("Speed, memory, size and writings were not measured: the models' weights lie on disk.")
    scores.device, scores.dtype = models["compressed"].device.type, models["compressed"].dtype
    scores.deploy_dtype, scores.seconds = scores.dtype, time.perf_counter() - start
    return scores


def score_text(
    model: nn.Module | LogitSource,
    baseline: nn.Module | LogitSource,
    texts: dict[str, Tensor],
    *,
    window: int = 2048,
    max_windows: int | None = None,
    beginning: Sequence[int] = (),
    bos: str = "once",
) -> dict[str, float]:
    """Perplexity, and divergence from and agreement with the baseline, under the names used by `evaluate`; nothing is
    timed."""
    scores = Scores({})
    for corpus, ids in texts.items():
        _score_text(scores, corpus, ids, baseline, {"compressed": model}, window, max_windows, beginning, bos)
    _not_finite({"compressed": scores.metrics["compressed"]})
    return scores.metrics["compressed"]


def _not_finite(metrics: dict[str, dict[str, float]]) -> list[str]:
    """A warning for each value that is not finite. The values stay, so that comparisons count them against the model;
    only their standard errors are removed."""
    notes = []
    for name, found in metrics.items():
        for metric in [m for m, value in found.items() if not math.isfinite(value)]:
            if metric.endswith("_stderr"):
                del found[metric]
                continue
            notes.append(f"{metric} of {name} is not finite ({found[metric]}), which counts against it.")
            warnings.warn(notes[-1], stacklevel=3)
    return notes


def _weighed(model: nn.Module, parameters: int) -> dict[str, float]:
    taken = size(model)
    return {
        "stored_bytes": taken.stored_bytes,
        "resident_bytes": taken.resident_bytes,
        "bits_per_weight": bits_per_weight(taken.stored_bytes, parameters),
    }


def _score_text(
    scores: Scores,
    corpus: str,
    ids: Tensor,
    baseline: nn.Module | LogitSource | None,
    models: dict[str, nn.Module] | dict[str, LogitSource],
    window: int,
    max_windows: int | None,
    beginning: Sequence[int],
    bos: str,
) -> None:
    corpus = text_name(corpus)
    how: dict[str, Any] = {"window": window, "limit": max_windows, "beginning": beginning, "bos": bos}
    if baseline is None:
        perplexities, divergences = {name: perplexity(model, ids, **how) for name, model in models.items()}, {}
    else:
        perplexities, divergences = compare_on_text(baseline, models, ids, **how)
    reference = next(iter(perplexities.values()))
    scores.texts[corpus] = {
        "tokens": reference.tokens,
        "window": window,
        "bos": bos,
        "windows": len(reference.counts),
    }
    for name, p in perplexities.items():
        found = {f"perplexity_{corpus}": p.value, f"perplexity_{corpus}_stderr": p.stderr}
        if name in divergences:
            d = divergences[name]
            found |= {
                f"kl_{corpus}": d.kl,
                f"kl_{corpus}_stderr": d.kl_stderr,
                f"top1_agreement_{corpus}": d.top1_agreement,
                f"top1_agreement_{corpus}_stderr": d.top1_agreement_stderr,
            }
            paired = [a - b for a, b in zip(p.sums, reference.sums, strict=True)]
            nll, stderr = mean_and_stderr(paired, p.counts)
            more = {f"nll_{corpus}": nll, f"nll_{corpus}_stderr": stderr}
            scores.difference.setdefault(name, {}).update({k: v for k, v in more.items() if v is not None})
        scores.metrics.setdefault(name, {}).update({k: v for k, v in found.items() if v is not None})


def check_evaluation(
    model: nn.Module,
    texts: dict[str, Tensor],
    *,
    window: int,
    max_windows: int | None = None,
    bos: str = "once",
    speed_rounds: int = 1,
    write_tokens: int = 1,
    others: Iterable[str] = (),
    timed: Sequence[str] = (),
) -> None:
    """Raise ValueError if the texts cannot be scored like this; quick, so that it can be called before long work.

    Args: as in `evaluate`; for `others` the names are enough.
    """
    others = list(others)
    if taken := {"baseline", "compressed", *PLAIN, BY_GRAPH, BY_COMPILER} & set(others):
        raise ValueError(
            f"`others` (={others}) must not be called {', '.join(sorted(taken))}: these are models of every run"
        )
    if unknown := set(timed) - set(others):
        raise ValueError(
            f"`timed` (={list(timed)}) must be among `others` (={others}), which {', '.join(sorted(unknown))} is not"
        )
    if type(speed_rounds) is not int or speed_rounds < 0:
        raise ValueError(f"`speed_rounds` (={speed_rounds!r}) must be a positive integer, or 0 to time nothing")
    if type(write_tokens) is not int or write_tokens < 0:
        raise ValueError(f"`write_tokens` (={write_tokens!r}) must be a positive integer, or 0 to write nothing")
    if window > positions(model):
        raise ValueError(f"`window` (={window}) must be at most {positions(model)}, the positions that this model has")
    for ids in texts.values():
        windows(ids, window=window, limit=max_windows, bos=bos)
