"""Answers that changed and texts that went apart: counts for all, a few of each to read, and links to the rest."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from reports.compare.outcome import RunOutcome
from reports.compare.variants import Variant
from reports.parts.text import clean, link

MAX_EXAMPLES, MAX_PROMPTS, MAX_TEXTS, MAX_ROWS = 24, 6, 8, 60
_FLIP = ("task", "direction", "question", "gold", "baseline_answer", "answer")
_GENERATED = ("temperature", "first_difference", "first_difference_stderr", "same_share", "repetition", "n")
PathOfSamples = Callable[[RunOutcome, str], str]


def samples_link(run: RunOutcome, file: str) -> str:
    """A link to a file of a run, relative to the page."""
    return link(run.href, file)


def flips(found: Sequence[Variant], path_of: PathOfSamples = samples_link, scale: float = 1.0) -> dict[str, Any]:
    """rows: how many answers changed, by recipe and task; examples, in turns from the recipes; and how many more there
    are."""
    rows, queues = [], []
    for v in (v for v in found if not v.baseline):
        told = (v.run.record or {}).get("tasks") or {}
        for task, own in ((told.get("compared") or {}).get(v.name) or {}).items():
            if own.get("right_to_wrong") is not None:
                file = ((told.get("files") or {}).get(v.name) or {}).get(task, "")
                href = path_of(v.run, file) if file else ""
                row = {"number": v.number, "recipe": v.recipe, "task": clean(task, 60), "href": href}
                rows.append(
                    row | {k: own.get(k) for k in ("n", "right_to_wrong", "wrong_to_right", "same", "mcnemar_p")}
                )
        queues.append([(v, one) for one in (told.get("flips") or {}).get(v.name) or []])
    most = max(2, round(MAX_EXAMPLES * scale))
    every = [pair for i in range(max(map(len, queues), default=0)) for queue in queues for pair in queue[i : i + 1]]
    examples = [
        {"number": v.number, "recipe": v.recipe} | {k: clean("" if one.get(k) is None else one[k], 300) for k in _FLIP}
        for v, one in every[:most]
    ]
    kept = max(4, round(MAX_ROWS * scale))
    return {
        "rows": rows[:kept],
        "hidden": len(rows) - len(rows[:kept]),
        "examples": examples,
        "more": len(every) - len(examples),
    }


def generations(found: Sequence[Variant], path_of: PathOfSamples = samples_link, scale: float = 1.0) -> dict[str, Any]:
    """rows: where generations go apart, by recipe and temperature; prompts: the baseline's text and those of the
    recipes; files."""
    rows, files = [], []
    prompts: dict[tuple, dict[str, Any]] = {}
    cut = max(120, round(600 * min(1.0, scale)))
    for v in found:
        told = (v.run.record or {}).get("generation") or {}
        rows += [
            {"number": v.number, "recipe": v.recipe} | {k: row.get(k) for k in _GENERATED}
            for row in told.get("rows") or []
            if row.get("model") == v.name and not v.baseline
        ]
        if told.get("file") and (href := path_of(v.run, told["file"])) and href not in [f["href"] for f in files]:
            files.append({"href": href, "run": clean(v.run.key, 100)})
        for sample in _samples(v):
            key = (sample["prompt"], sample.get("temperature") or 0, sample["texts"].get("baseline", ""))
            one = prompts.setdefault(
                key, {"prompt": clean(key[0], 300), "temperature": key[1], "baseline": clean(key[2], cut), "texts": []}
            )
            differs = sample.get("first_difference") or {}
            one["texts"].append(
                {
                    "number": v.number,
                    "recipe": v.recipe,
                    "at": differs.get(v.name),
                    "known": v.name in differs,
                    "text": clean(sample["texts"][v.name], cut),
                }
            )
    shown = sorted(prompts.values(), key=lambda one: -len(one["texts"]))[: max(1, round(MAX_PROMPTS * scale))]
    texts = max(2, round(MAX_TEXTS * scale))
    for one in shown:
        one["more"] = max(0, len(one["texts"]) - texts)
        one["texts"] = one["texts"][:texts]
    kept = max(4, round(MAX_ROWS * scale))
    return {
        "rows": rows[:kept],
        "hidden": len(rows) - len(rows[:kept]),
        "prompts": shown,
        "more": len(prompts) - len(shown),
        "files": files[: max(4, round(20 * scale))],
    }


def _samples(v: Variant) -> Iterator[dict[str, Any]]:
    record = v.run.record or {}
    for sample in (record.get("generation") or {}).get("samples") or record.get("samples") or []:
        if not v.baseline and v.name in (sample.get("texts") or {}):
            yield sample
