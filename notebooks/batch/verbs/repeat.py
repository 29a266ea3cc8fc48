"""`workbench repeat`: a recorded run executed again from its own command, and which of its numbers came back."""

import argparse
import json
import math
import shlex
from dataclasses import dataclass
from pathlib import Path

BEYOND = "beyond noise"


def declare(command) -> argparse.ArgumentParser:
    """The options of `workbench repeat`; running is `workbench run`'s."""
    record = ("record", {"metavar": "RECORD.json", "help": "a record, such as one of reports/published"})
    return command("repeat", None, "execute a recorded run again, and say which of its numbers came back", record)


def command_of(file: str) -> tuple[str, list[list[str]]]:
    """The notebook and the parameters with which a record was made.

    Raises:
        ValueError: the file is no record, or its run had no command.
    """
    import yaml

    from eval.record.schema import read_record

    recorded = str((read_record(Path(file)).get("provenance") or {}).get("command") or "")
    words = shlex.split(recorded)
    if words[:1] != ["papermill"] or len(words) < 3:
        raise ValueError(f"`record` (={file!r}) does not say which command made it: {recorded[:200] or 'none'}")
    given, rest = [], words[3:]
    while rest:
        flag, rest = rest[0], rest[1:]
        if flag == "-p" and len(rest) >= 2:
            given, rest = [*given, rest[:2]], rest[2:]
        elif flag == "-y" and rest:
            given += [[name, json.dumps(value)] for name, value in yaml.safe_load(rest[0]).items()]
            rest = rest[1:]
        else:
            raise ValueError(f"`record` (={file!r}) has a command that cannot be read: {recorded[:200]}")
    return words[1], given


@dataclass(frozen=True)
class Repeated:
    """One metric of one model, before and now.

    said: "identical", "same" (the difference is noise), "beyond noise", or why the two are not compared.
    """

    model: str
    metric: str
    before: float
    now: float | None
    said: str


def compared(first, again) -> list[Repeated]:
    """Every metric of every model of the first record (`RunRecord`), beside the second's.

    Losses count against the baseline of the same record, on the same text, because that is how they were measured:
    a difference counts if the two paired differences are further apart than their errors allow. Speeds are compared as
    multiples of the baseline's, on the same processor only.
    """
    rows = []
    for model in first.models:
        for metric, before in first.scores[model].items():
            if metric.endswith("_stderr") or metric in UNCOMPARED or before is None:
                continue
            now = again.score(model, metric)
            rows.append(Repeated(model, metric, before, now, _said(first, again, model, metric, before, now)))
    return rows


UNCOMPARED = {"peak_memory_bytes", "resident_bytes", "time_to_first_token_s"}  # of the process, or told by the prefill
SIZES = ("stored_bytes", "bits_per_weight", "cache_bytes", "compression_rate")  # counted, so that they have no noise


def _said(first, again, model: str, metric: str, before: float, now: float | None) -> str:
    from eval.record import noise
    from eval.record.rows import PHASES

    if now is None:
        return "not measured"
    lost = [math.isnan(value) for value in (before, now)]
    if before == now or all(lost):
        return "identical"
    if any(lost):
        return BEYOND
    if metric in PHASES:
        return _of_speeds(first, again, model, PHASES[metric])
    gap, errors = now - before, [one.score(model, f"{metric}_stderr") for one in (first, again)]
    if metric.startswith("perplexity_"):
        loss = metric.replace("perplexity_", "nll_", 1)
        paired = [one.difference.get(model, {}) for one in (first, again)]
        if all(loss in one and f"{loss}_stderr" in one for one in paired):
            gap, errors = paired[1][loss] - paired[0][loss], [one[f"{loss}_stderr"] for one in paired]
    if None in errors:
        if not metric.startswith(SIZES):
            return "its noise is not known"
        beyond = abs(gap) > noise.SAME_SIZE * abs(before)
    else:
        beyond = noise.counts(*noise.difference(gap, math.hypot(*errors)))
    return BEYOND if beyond else "same"


def _of_speeds(first, again, model: str, phase: str) -> str:
    from eval.record import noise

    if first.provenance.processor != again.provenance.processor:
        return "another processor"
    if model == "baseline":
        return "the speeds below are multiples of this one"
    if first.by_generate != again.by_generate:
        return "decode was the step alone"
    shares = [_share(one.speed.get(model), one.speed.get("baseline"), phase) for one in (first, again)]
    if None in shares:
        return "too noisy to compare"
    return BEYOND if noise.counts(*noise.faster_by(*shares)) else "same"


def _share(own, baseline, phase: str) -> tuple[float, float] | None:
    """The interval of a model's speed as a multiple of the baseline's."""
    ends = [one.ends(phase) if one else None for one in (own, baseline)]
    if None in ends or min(ends[1]) <= 0:
        return None
    return ends[0][0] / ends[1][1], ends[0][1] / ends[1][0]


def table(rows: list[Repeated]) -> str:
    """The rows as aligned text, with a sentence that counts them."""
    cells = [("model", "metric", "recorded", "now", "")]
    cells += [
        (r.model[:60], r.metric, f"{r.before:.6g}", "-" if r.now is None else f"{r.now:.6g}", r.said) for r in rows
    ]
    widths = [max(len(row[i]) for row in cells) for i in range(5)]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    beyond = sum(r.said == BEYOND for r in rows)
    back = sum(r.said in ("identical", "same") for r in rows)
    total = f"{back} of {len(rows)} numbers came back, {beyond} differ by more than noise, {len(rows) - back - beyond} "
    return "\n".join([*lines, "", f"{total}were not compared."])


def status_of(rows: list[Repeated]) -> int:
    """0: nothing differs by more than noise. 1: something does."""
    return int(any(r.said == BEYOND for r in rows))
