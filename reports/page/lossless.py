"""Guesses that the original verifies: how many of its tokens each draft guesses, and how fast it writes by guesses."""

from typing import Any

from eval.record.measured import GuessingSpeed
from eval.record.metrics import fmt, kind_of, with_error
from eval.record.rows import RunRecord
from reports.parts.text import clean, listed


def context(run: RunRecord) -> dict[str, Any]:
    """The data for templates/lossless.html from a record; {} if no guesses were measured."""
    made = run.lossless
    if made is None or not made.drafts and not made.speeds:
        return {}
    lengths = sorted({k for one in made.drafts.values() for k in one.lengths})
    drafts = []
    for name, one in made.drafts.items():
        share = with_error(one.acceptance, one.acceptance_stderr, 100)
        drafts.append((clean(name, 60), *share, [fmt(one.lengths.get(k)) for k in lengths]))
    speeds = []
    for one in made.speeds:
        loss = "" if one.loss is None else f"{fmt(one.loss, '.3f')} and {fmt(one.plain_loss, '.3f')}"
        about = clean(one.kind, 60), clean(one.way_and_guesses, 80), fmt(one.tokens_per_s, ".1f")
        speeds.append((*about, *_ratio(one), loss))
    exact = [one for one in made.speeds if not one.rollback]
    other = [f"{clean(one.way, 60)} of {clean(one.kind, 60)}" for one in exact if one.same is False]
    return {
        "lengths": lengths,
        "drafts": drafts,
        "speeds": speeds,
        "approximate": any(row[-1] for row in speeds),
        "new_tokens": made.new_tokens,
        "rounds": made.rounds,
        "other": listed(other) if other else "",
        "why_not": clean(made.why_not, 1000),
    }


def _ratio(one: GuessingSpeed) -> tuple[str, str]:
    """A ratio to plain decoding as text, and its class: good, bad or noise."""
    if one.ratio is None or one.way == "plain":
        return fmt(None), ""
    spread = one.spread
    return f"{one.ratio:.2f}×", kind_of(one.ratio, spread is not None and abs(one.ratio - 1) > spread)
