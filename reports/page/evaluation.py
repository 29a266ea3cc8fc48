"""What the page of a run shows of tasks and of generations."""

from typing import Any

from reports.parts.intervals import Interval, Panel, forest, spread
from reports.parts.metrics import described, with_error
from reports.parts.text import clean, link, listed, plural

MAX_MODELS = 6  # with flips or texts on the page; the files have all
MAX_FOREST = 48  # rows of the figure
MAX_TEXT, MAX_PROMPT, MAX_ANSWER = 1000, 500, 250  # characters
_OPEN = 2  # samples that are shown without being asked for


def context(record: dict[str, Any]) -> dict[str, Any]:
    """What templates/evaluation.html shows of a record's `tasks` and `generation`; {} where it has neither."""
    tasks, generation = _tasks(record), _generation(record)
    return {"tasks": tasks, "generation": generation} if tasks or generation else {}


def mean_recovery(record: dict[str, Any], model: str = "compressed") -> tuple[float, int] | None:
    """Mean over tasks of what a model keeps of the baseline's score, as a share, and of how many tasks; None if none
    were.

    Shares of right answers are averaged with one another only; other metrics count where there are none. A group of
    tasks counts as one, its parts do not.
    """
    tasks = record.get("tasks") or {}
    compared, parts = (tasks.get("compared") or {}).get(model) or {}, _parts(tasks)
    metrics = {row["task"]: row["metric"] for row in tasks.get("rows") or []}
    found = [
        (described(metrics.get(task, ""))[1] == "%", one["recovery"])
        for task, one in compared.items()
        if task not in parts and one.get("recovery") is not None
    ]
    shares = [recovery for share, recovery in found if share] or [recovery for _, recovery in found]
    return (sum(shares) / len(shares), len(shares)) if shares else None


def _parts(tasks: dict[str, Any]) -> set[str]:
    """Tasks that are parts of a group that is scored as a whole."""
    there = {row["task"] for row in tasks.get("rows") or []}
    return {part for group, of in (tasks.get("groups") or {}).items() if group in there for part in of if part != group}


def _tasks(record: dict[str, Any]) -> dict[str, Any]:
    found = record.get("tasks") or {}
    if not found.get("rows"):
        return {}
    compared, files = found.get("compared") or {}, found.get("files") or {}
    models = list(dict.fromkeys(("baseline", *(name for name in record["scores"] if name in compared), *compared)))
    all_groups, inner = [_group(record, row, models, compared) for row in found["rows"]], _parts(found)
    groups, parts = ([one for one in all_groups if (one["task"] in inner) == part] for part in (False, True))
    wholes = {name: [one for task, one in of.items() if task not in inner] for name, of in compared.items()}
    flips = [_flips(name, of, wholes.get(name, [])) for name, of in (found.get("flips") or {}).items() if of]
    return {
        "groups": groups,
        "parts": parts,
        "notes": found.get("notes") or [],
        "said": _said(groups),
        "forest": _forest(groups),
        "forest_rows": MAX_FOREST if sum(len(one["rows"]) - 1 for one in groups) > MAX_FOREST else None,
        "flips": flips[:MAX_MODELS],
        "flips_left": len(flips[MAX_MODELS:]),
        "settings": _settings(found.get("settings") or {}),
        "files": [
            {"model": model, "files": [(task, _beside(path)) for task, path in of.items()]}
            for model, of in files.items()
        ],
        "card": _card(mean_recovery(record)),
    }


def _beside(path: str) -> str:
    """A link to a file beside the page: a leading slash would lead elsewhere."""
    return link(path.lstrip("/"))


def _card(mean: tuple[float, int] | None) -> tuple[str, str] | None:
    if mean is None:
        return None
    share, count = mean
    return f"{share * 100:.1f} %", f"of the baseline’s score on {plural(count, 'task')}{', mean' if count > 1 else ''}"


def _group(record: dict[str, Any], row: dict[str, Any], models: list[str], compared: dict[str, Any]) -> dict[str, Any]:
    """One task: what was asked, and a row per model."""
    task, metric = row["task"], row["metric"]
    label, unit, scale = described(metric)
    higher = row.get("higher_is_better") is not False
    before = next((of[task].get("baseline") for of in compared.values() if of.get(task)), None)
    rows = []
    for model in models:
        own, of = record["scores"].get(model) or {}, (compared.get(model) or {}).get(task)
        value = own.get(f"{metric}_{task}", before if model == "baseline" else (of or {}).get("value"))
        shown, stderr = with_error(value, own.get(f"{metric}_{task}_stderr"), scale)
        against = _against(of, scale, higher)
        rows.append({"model": model, "main": model == "compressed", "value": shown, "stderr": stderr, **against})
    return {
        "task": task,
        "label": label,
        "unit": unit,
        "n": row.get("n"),
        "fewshot": row.get("num_fewshot"),
        "higher": higher,
        "version": row.get("version"),
        "rows": rows,
    }


def _against(of: dict[str, Any] | None, scale: float, higher: bool) -> dict[str, Any]:
    """A model against the baseline on one task, as text; `kind` is bad or good where the interval leaves 0 out."""
    if not of:
        nothing = ("", "")
        return {
            "recovery": nothing,
            "difference": nothing,
            "kind": "",
            "wrong": None,
            "right": None,
            "p": "",
            "of": None,
        }
    low, high, kind = of.get("difference_low"), of.get("difference_high"), ""
    if low is not None and high is not None and (low > 0 or high < 0):
        kind = "good" if (low > 0) == higher else "bad"
    p = of.get("mcnemar_p")
    return {
        "recovery": _between(of, "recovery", 100, lambda v: f"{v:.1f}", " %"),
        "difference": _between(of, "difference", scale, lambda v: signed(v, 1 if scale == 100 else 3), ""),
        "kind": kind,
        "wrong": of.get("right_to_wrong"),
        "right": of.get("wrong_to_right"),
        "p": "" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}",
        "of": of,
    }


def _between(of: dict[str, Any], what: str, scale: float, text: Any, unit: str) -> tuple[str, str]:
    """A value and its interval, as text."""
    value, low, high = (
        None if of.get(key) is None else of[key] * scale for key in (what, f"{what}_low", f"{what}_high")
    )
    interval = "" if low is None or high is None else f"{text(low)} to {text(high)}"
    return ("–" if value is None else text(value) + unit, interval)


def signed(value: float, digits: int) -> str:
    """A difference with its sign, whichever it is: +1.2, −0.3, 0.0."""
    text = f"{value:+.{digits}f}".replace("-", "−")
    return text[1:] if float(f"{value:.{digits}f}") == 0 else text


def _said(groups: list[dict[str, Any]]) -> list[str]:
    """On which tasks the model that the page is about differs from the baseline by more than noise."""
    rows = [(group["task"], row) for group in groups for row in group["rows"] if row["main"] and row["of"]]
    if not rows:
        return []
    found = {"worse": "bad", "better": "good"}
    tasks = {how: [clean(task, 60) for task, row in rows if row["kind"] == kind] for how, kind in found.items()}
    said = [
        f"Beyond noise, the compressed model is {how} than the baseline on {listed(of)}."
        for how, of in tasks.items()
        if of
    ]
    within = len(rows) - sum(map(len, tasks.values()))
    if within:
        some = f"all {len(rows)}" if within == len(rows) else f"{within} of {len(rows)}"
        where = "the one task" if len(rows) == 1 else f"{some} tasks"
        said.append(f"On {where} the difference to the baseline is within the noise at this number of questions.")
    return said


def _forest(groups: list[dict[str, Any]]) -> str:
    """Differences of shares in percentage points; of other metrics, what is lost or won as per cent of the baseline."""
    panels: dict[str, dict[str, list[Interval]]] = {}
    count = 0
    for group in groups:
        share = group["unit"] == "%"
        label = "difference to the baseline, percentage points" if share else "score kept of the baseline’s, less 100 %"
        what, shift = ("difference", 0) if share else ("recovery", 1)
        found = []
        for row in group["rows"]:
            of = row["of"] or {}
            if of.get(what) is None or count == MAX_FOREST:
                continue
            ends = [None if of.get(key) is None else 100 * (of[key] - shift) for key in (f"{what}_low", f"{what}_high")]
            found.append(Interval(row["model"], 100 * (of[what] - shift), *ends, row["main"]))
            count += 1
        if found:
            panels.setdefault(label, {})[f"{group['task']}, {group['n'] or '?'} questions"] = found
    summary = "Difference of every model to the baseline on every task, with 95 % intervals; right of 0 is better."
    return forest(panels, key="tasks", summary=summary) if panels else ""


def _flips(model: str, flips: list[dict[str, Any]], compared: list[dict[str, Any]]) -> dict[str, Any]:
    counts = {
        way: sum(of.get(key) or 0 for of in compared)
        for way, key in (("right to wrong", "right_to_wrong"), ("wrong to right", "wrong_to_right"))
    }
    rows = [
        {
            "task": _short(flip.get("task"), 80),
            "doc": _short(flip.get("doc_id"), 80),
            "direction": _short(flip.get("direction"), 80),
            "question": _short(flip.get("question"), MAX_PROMPT),
            "gold": _short(flip.get("gold"), MAX_ANSWER),
            "before": _short(flip.get("baseline_answer"), MAX_ANSWER),
            "after": _short(flip.get("answer"), MAX_ANSWER),
        }
        for flip in flips
    ]
    return {"model": model, "rows": rows, "counts": counts}


def _short(text: Any, limit: int) -> str:
    """Text of at most so many characters; of a long one the end, where a prompt asks its question, and some of its
    beginning."""
    text = "" if text is None else clean(text, 10 * limit).strip()
    return text if len(text) <= limit else f"{text[: limit // 4].rstrip()} […] {text[-(limit * 3 // 4) :].lstrip()}"


def _settings(settings: dict[str, Any]) -> str:
    words = (
        ("limit", "at most {} questions"),
        ("num_fewshot", "{} examples"),
        ("batch_size", "batches of {}"),
        ("seed", "seed {}"),
        ("dtype", "{}"),
        ("device", "on {}"),
        ("lm_eval", "lm-eval {}"),
    )
    said = [text.format(settings[key]) for key, text in words if settings.get(key) is not None]
    text = ", ".join(said + ["deterministic algorithms"] * (settings.get("deterministic") is True))
    return text[:1].upper() + text[1:]


def _generation(record: dict[str, Any]) -> dict[str, Any]:
    found = record.get("generation") or {}
    if not found.get("rows"):
        return {}
    by: dict[float, list[dict[str, Any]]] = {}
    for row in found["rows"]:
        by.setdefault(row["temperature"], []).append(row)
    settings = found.get("settings") or {}
    samples = [_sample(sample) for sample in (found.get("samples") or [])]
    return {
        "groups": [{"name": _temperature(t), "rows": [_generated(row) for row in by[t]]} for t in sorted(by)],
        "figure": _against_temperature(by),
        "samples": samples[:_OPEN],
        "more": samples[_OPEN:],
        "file": _beside(found.get("file") or ""),
        "tokens": settings.get("new_tokens"),
        "prompts": _count(settings.get("prompts")),
        "seeds": _count(settings.get("seeds")),
        "dtype": listed(_distinct(settings.get("dtype"))),
    }


def _count(value: Any) -> int | None:
    return len(value) if isinstance(value, list) else value


def _distinct(dtypes: Any) -> list[str]:
    """What models were computed in, from one word for all or a word for each."""
    return list(dict.fromkeys(dtypes.values() if isinstance(dtypes, dict) else [dtypes] if dtypes else []))


def _temperature(value: float) -> str:
    return "Greedy" if not value else f"Temperature {value:g}"


def _generated(row: dict[str, Any]) -> dict[str, Any]:
    def share(key: str) -> tuple[str, str]:
        return with_error(row.get(key), row.get(f"{key}_stderr"), 100)

    plain = {key: with_error(row.get(key), row.get(f"{key}_stderr")) for key in ("first_difference", "length")}
    if row["model"] == "baseline":
        plain["first_difference"] = ("", "")
    return {
        "model": row["model"],
        "main": row["model"] == "compressed",
        "n": row.get("n"),
        **plain,
        "same": ("", "") if row["model"] == "baseline" else share("same_share"),
        "repetition": share("repetition"),
        "ended": share("ended_share"),
    }


def _against_temperature(by: dict[float, list[dict[str, Any]]]) -> str:
    """Divergence, repetition and length of every model against temperature; "" for one temperature."""
    if len(by) < 2:
        return ""
    measures = (
        ("first difference", "first_difference", 1, "tokens"),
        ("repeated 4-grams", "repetition", 100, "%"),
        ("length", "length", 1, "tokens"),
    )
    panels = []
    for title, key, scale, unit in measures:
        lines: dict[str, list] = {}
        for temperature, rows in sorted(by.items()):
            for row in rows:
                value, stderr = row.get(key), row.get(f"{key}_stderr") or 0.0
                if value is not None and not (key == "first_difference" and row["model"] == "baseline"):
                    lines.setdefault(row["model"], []).append(
                        (temperature, value * scale, max(0.0, value - stderr) * scale, (value + stderr) * scale)
                    )
        panels.append(Panel(title, unit, lines))
    summary = (
        "First difference from the baseline, repetition and length of the texts of every model against temperature."
    )
    return spread(panels, columns=3, key="temperatures", x_label="temperature (0 is greedy)", summary=summary)


def _sample(sample: dict[str, Any]) -> dict[str, Any]:
    """A prompt and what each model made of it: what it shares with the baseline's text, and the rest."""
    texts = {name: clean(str(text), MAX_TEXT) for name, text in list(sample["texts"].items())[:MAX_MODELS]}
    first, base = sample.get("first_difference") or {}, texts.get("baseline")
    shown = []
    for name, text in texts.items():
        shared = 0
        if name != "baseline" and base is not None:
            shared = next(
                (i for i, (a, b) in enumerate(zip(text, base, strict=False)) if a != b), min(len(text), len(base))
            )
        at = first.get(name)
        how = (
            ""
            if name not in first
            else "the same, token for token"
            if at is None
            else f"differs from token {at + 1} on"
        )
        shown.append({"model": name, "how": how, "shared": text[:shared], "rest": text[shared:]})
    how = _temperature(sample.get("temperature") or 0) + (
        "" if sample.get("seed") is None else f", seed {sample['seed']}"
    )
    return {
        "prompt": _short(sample["prompt"], MAX_PROMPT),
        "how": how,
        "texts": shown,
        "left": len(sample["texts"]) - len(shown),
    }
