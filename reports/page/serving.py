"""Weights and caches within a memory: what was asked, predicted and measured, and every combination."""

from dataclasses import replace
from typing import Any

from eval.record.metrics import number
from eval.record.reading import is_complete
from eval.record.rows import RunRecord
from eval.record.serving import Combination, ServingRecord, fastest, largest
from reports.page.search import WishRow, as_row, megabytes, whole
from reports.parts.text import clean


def context(run: RunRecord) -> dict[str, Any]:
    """The data for templates/serving.html from a record; {} if nothing was served, or a needed value is missing."""
    made = run.serving
    if made is None or not is_complete(made) or not made.rounds or not 0 <= made.kept < len(made.found):
        return {}
    if made.rounds[-1].sequences < 1:
        return {}
    marks = (
        ("chosen", made.found[made.kept]),
        ("most sequences", largest(made.found)),
        ("most tokens/s", fastest(made.found)),
    )
    return {
        "said": [clean(sentence, 600) for sentence in made.sentences()],
        "wishes": _wishes(made),
        "found": [_cells(one, [mark for mark, best in marks if one is best]) for one in made.found],
        "recipes": [
            (kind, clean(name, 60), clean(text, 300))
            for kind, of in (("weights", made.weights), ("cache", made.caches))
            for name, text in of.items()
        ],
        "device": clean(made.device, 40),
        "here": made.device == "here",
        "windows": made.windows,
        "scored": made.scored,
        "tried": made.tried,
        "factor": made.factor,
    }


def _wishes(made: ServingRecord) -> list[WishRow]:
    """What was predicted: bytes from shapes, the divergence as the sum of measured losses, the speed by the cost
    model."""
    last, kept, shapes = made.rounds[-1], made.found[made.kept], made.by_shapes
    cache = last.cache_bytes / last.sequences
    timed = last.tokens_per_s if made.device == "here" else None  # another device's prediction is not compared
    held = shapes.weight_bytes + last.sequences * shapes.cache_bytes + shapes.room  # of those that were decoded
    together = as_row(f"tokens/s together, {clean(made.device, 40)}", None, shapes.tokens_per_s, timed, whole)
    if last.sequences != shapes.batch:
        together = replace(together, off="")  # the speed was predicted for another number of sequences
    return [
        as_row(f"memory with {last.sequences:,} sequences, MB", made.memory, held, last.peak_bytes, megabytes),
        as_row("sequences", made.batch, shapes.batch or shapes.sequences, last.sequences, whole, most=False),
        as_row("weights, MB", None, shapes.weight_bytes, kept.weight_bytes, megabytes),
        as_row("cache of one sequence, MB", None, shapes.cache_bytes, cache, lambda size: f"{size / 1e6:.2f}"),
        as_row("divergence, nats per token", made.max_kl, kept.loss or 0.0, made.divergence, number),
        together,
    ]


def _cells(one: Combination, marks: list[str]) -> tuple[str, ...]:
    """The cells of a combination."""
    loss = "" if one.loss is None else number(one.loss)
    if not one.fits:
        marks = [*marks, f"one needs {megabytes(one.least)} MB"]
    speeds = (whole(one.alone), whole(one.tokens_per_s)) if one.fits else ("", "")
    sizes = megabytes(one.weight_bytes), f"{one.cache_bytes / 1e6:.2f}", megabytes(one.room)
    return clean(one.weights, 80), clean(one.cache, 80), *sizes, loss, f"{one.sequences:,}", *speeds, ", ".join(marks)
