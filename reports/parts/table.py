"""The models of a run side by side: as rows, and as Markdown for a README that a command keeps true."""

import re
from collections.abc import Callable, Sequence
from typing import Any

from reports.page.caches import cache_rows, speed_rows
from reports.page.strengths import strength_tables

START, END = "<!-- workbench ", "<!-- end -->"
_KINDS = "table|strengths|cache|cache-speed|tasks"
_SECTION = re.compile(
    rf"({START}(?P<kind>{_KINDS}) (?P<paths>[^>]*?) -->\n)(?P<body>.*?)(?P<end>{END}|(?={START})|\Z)", re.S
)
_TOLD = ("bits", "group_size", "alpha")  # knobs that name a step in records that do not say how it is written


def rows(record: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per model of the record's scores: the baseline, "compressed", and the rest in their order.

    Each holds name, recipe (None where unknown), texts {corpus: {perplexity, perplexity_stderr, change, kl,
    kl_stderr}}, stored_bytes, bits_per_weight, decode, prefill (tokens per second) and decode_ratio, prefill_ratio (to
    the record's own 16-bit baseline); None for what was not measured.
    """
    scores = record["scores"]
    base = scores["baseline"]
    recipes = {"compressed": record["recipe"], **record.get("recipes", {})}
    found = []
    for name in dict.fromkeys(("baseline", "compressed", *scores)):
        own = scores[name]
        row = {"name": name, "recipe": recipe_text(recipes[name]) if name in recipes else None, "texts": {}}
        for corpus in corpora([record]):
            before, after = base.get(f"perplexity_{corpus}"), own.get(f"perplexity_{corpus}")
            row["texts"][corpus] = {
                "perplexity": after,
                "perplexity_stderr": own.get(f"perplexity_{corpus}_stderr"),
                "change": after / before - 1 if after and before and name != "baseline" else None,
                "kl": own.get(f"kl_{corpus}"),
                "kl_stderr": own.get(f"kl_{corpus}_stderr"),
            }
        row |= {key: own.get(key) for key in ("stored_bytes", "bits_per_weight")}
        for what in ("decode", "prefill"):
            metric = f"{what}_tokens_per_s"
            row[what] = own.get(metric)
            row[f"{what}_ratio"] = own[metric] / base[metric] if own.get(metric) and base.get(metric) else None
        found.append(row)
    return found


def corpora(records: Sequence[dict[str, Any]]) -> list[str]:
    """Every text on which a perplexity was measured."""
    names = (m for record in records for own in record["scores"].values() for m in own if m.startswith("perplexity_"))
    return list(dict.fromkeys(m.removeprefix("perplexity_") for m in names if not m.endswith("_stderr")))


def recipe_text(steps: Sequence[dict[str, Any]]) -> str:
    """A recipe as one would write it: smoothquant(alpha=0.7), int8."""
    return ", ".join(step.get("text") or _text(step) for step in steps)


def _text(step: dict[str, Any]) -> str:
    knobs = ", ".join(f"{knob}={value!r}" for knob, value in step["knobs"].items() if knob in _TOLD)
    return f"{step['method']}({knobs})" if knobs else step["method"]


def number(value: float | None, digits: int = 2) -> str:
    """A number with so many decimals, with separators; a dash for none."""
    return "–" if value is None else f"{value:,.{digits}f}"


def percent(share: float | None) -> str:
    """A change as +12.3 %, with more digits where it is small; a dash for none."""
    return "–" if share is None else f"{share * 100:+.{1 if abs(share) >= 0.01 else 2}f} %".replace("-", "−")


def markdown(records: Sequence[dict[str, Any]]) -> str:
    """A table of all models of these records; speeds as ratios too, each to the baseline of its own record.

    Raises:
        ValueError: a record without scores, such as that of a kernel benchmark.
    """
    for record in records:
        if not record["scores"]:
            raise ValueError(f"the record of {record['run']['key']} has no scores of models to put into a table")
    texts = corpora(records)
    several = len({record["model"]["name"] for record in records}) > 1
    head = [*(["model"] if several else []), "recipe"]
    head += [column for corpus in texts for column in (f"perplexity, {corpus}", f"KL, {corpus}")]
    head += ["stored MB", "decode, tokens/s", "prefill, tokens/s"]
    lines = [head, ["---"] * (1 + several) + ["---:"] * (len(head) - 1 - several)]
    for record in records:
        lines += [([record["model"]["name"]] if several else []) + _cells(row, texts) for row in rows(record)]
    return _written(lines)


def _cells(row: dict[str, Any], texts: Sequence[str]) -> list[str]:
    shown = "16-bit baseline" if row["name"] == "baseline" else f"`{row['recipe']}`" if row["recipe"] else row["name"]
    cells = [f"**{shown}**" if row["name"] == "compressed" else shown]
    for corpus in texts:
        text = row["texts"].get(corpus, {})
        change = "" if text.get("change") is None else f" ({percent(text['change'])})"
        cells.append(_with_error(text.get("perplexity"), text.get("perplexity_stderr"), 2) + change)
        cells.append(_with_error(text.get("kl"), text.get("kl_stderr"), 4 if (text.get("kl") or 0) >= 0.01 else 5))
    cells.append(number(row["stored_bytes"] and row["stored_bytes"] / 1e6, 1))
    for what in ("decode", "prefill"):
        ratio = None if row["name"] == "baseline" else row[f"{what}_ratio"]
        cells.append(
            number(row[what], 1 if (row[what] or 0) < 100 else 0) + ("" if ratio is None else f" ({ratio:.2f}×)")
        )
    return cells


def strengths_markdown(records: Sequence[dict[str, Any]]) -> str:
    """Tables of perplexities: a row per recipe that was scored at several strengths, a column per strength; one per
    text and set of strengths.

    Raises:
        ValueError: a record without such scores.
    """
    made = []
    for record in records:
        tables = strength_tables(record.get("strengths") or {})
        if not tables:
            raise ValueError(f"the record of {record['run']['key']} has no scores at several strengths")
        for table in tables:
            base = record["scores"]["baseline"].get(f"perplexity_{table['corpus']}")
            lines = [
                [
                    f"perplexity, {table['corpus']}; baseline {number(base)}",
                    *(value.strip("'") for value in table["values"]),
                ]
            ]
            lines += [["---", *["---:"] * len(table["values"])]]
            lines += [
                [f"`{row['recipe']}`", *(number(c, 2 if c and c < 1000 else 0) for c in row["cells"])]
                for row in table["rows"]
            ]
            made.append(_written(lines))
    return "\n".join(made)


def cache_markdown(records: Sequence[dict[str, Any]]) -> str:
    """A table per record of a run on KV caches: bytes of each cache, and exact answers by visibility.

    Raises:
        ValueError: a record of another kind of run.
    """
    made = []
    for record in records:
        found = cache_rows(_cache_of(record))
        visibilities = list(found[0]["by"])
        head = [
            "cache",
            "bytes, % of full",
            *(f"exact, {v}" for v in visibilities),
            *(f"KL, {v}" for v in visibilities),
        ]
        lines = [head, ["---", *["---:"] * (len(head) - 1)]]
        for row in found:
            cells = [row["by"][v] for v in visibilities]
            exact = [f"{cell['exact'] * 100:.0f} % ± {cell['stderr'] * 100:.0f}" for cell in cells]
            lines.append(
                [
                    _cache_name(record, row["name"]),
                    number(row["share"] and row["share"] * 100, 1),
                    *exact,
                    *("–" if row["name"] == "full" else f"{cell['kl']:.3f}" for cell in cells),
                ]
            )
        made.append(_written(lines))
    return "\n".join(made)


def cache_speed_markdown(records: Sequence[dict[str, Any]]) -> str:
    """A table per such record: tokens per second of the whole model behind every context, and how much faster attention
    is.

    Raises:
        ValueError: a record of another kind of run, or one that was not timed.
    """
    made = []
    for record in records:
        speed = _cache_of(record).get("speed")
        if not speed:
            raise ValueError(f"the record of {record['run']['key']} was not timed")
        contexts = sorted(map(int, speed["tokens_per_s"]["full"]))
        lines = [
            ["tokens/s of the model (attention alone)", *(f"{c:,} tokens" for c in contexts)],
            ["---", *["---:"] * len(contexts)],
        ]
        for row in speed_rows(speed):
            cells = [
                ("" if c["tokens"] is None else f"{c['tokens']:.1f} ") + f"({c['ratio']:.2f}×)" for c in row["cells"]
            ]
            lines.append([_cache_name(record, row["name"]), *cells])
        made.append(_written(lines))
    return "\n".join(made)


def tasks_markdown(records: Sequence[dict[str, Any]]) -> str:
    """A table per record: the score of every model on every task, what it keeps of the baseline's, and how many answers
    turned.

    Raises:
        ValueError: a record in which no task was answered.
    """
    made = []
    for record in records:
        tasks = record.get("tasks")
        if not tasks:
            raise ValueError(f"the record of {record['run']['key']} has no tasks")
        recipes = {"compressed": record["recipe"], **record.get("recipes", {})}
        lines = [
            [
                "recipe",
                *(f"{row['task'].removesuffix('_local')}, {row['metric']}, n {row['n']}" for row in tasks["rows"]),
                "kept of the baseline's",
                "right to wrong, wrong to right",
            ]
        ]
        lines.append(["---", *["---:"] * (len(lines[0]) - 1)])
        for model in ("baseline", *tasks["compared"]):
            own = [record["scores"][model].get(f"{row['metric']}_{row['task']}") for row in tasks["rows"]]
            errors = [record["scores"][model].get(f"{row['metric']}_{row['task']}_stderr") for row in tasks["rows"]]
            cells = [_with_error(v and 100 * v, e and 100 * e, 1) for v, e in zip(own, errors, strict=True)]
            lines.append(
                [
                    "16-bit baseline" if model == "baseline" else f"`{recipe_text(recipes[model])}`",
                    *cells,
                    *_kept(tasks["compared"].get(model, {})),
                ]
            )
        made.append(_written(lines))
    return "\n".join(made)


def _kept(compared: dict[str, dict[str, Any]]) -> list[str]:
    """Recovery of every task, and flips over all of them."""
    if not compared:
        return ["", ""]
    shares = [f"{100 * one['recovery']:.0f}" for one in compared.values() if one["recovery"] is not None]
    flips = [sum(one[way] or 0 for one in compared.values()) for way in ("right_to_wrong", "wrong_to_right")]
    return [f"{', '.join(shares)} %", f"{flips[0]}, {flips[1]}"]


def _cache_of(record: dict[str, Any]) -> dict[str, Any]:
    if not record.get("cache"):
        raise ValueError(f"the record of {record['run']['key']} is not of a run on KV caches")
    return record["cache"]


def _cache_name(record: dict[str, Any], name: str) -> str:
    """A variant as a table names it: its recipe where it is named otherwise."""
    if name.startswith("full"):
        return name.replace("full", "full 16-bit cache", 1)
    text = f"`{recipe_text(record['recipes'].get(name, []) or record['recipe'])}`"
    return f"**{text}**" if name == "compressed" else text


def _written(lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines) + "\n"


_MADE = {
    "table": markdown, "strengths": strengths_markdown, "cache": cache_markdown, "cache-speed": cache_speed_markdown,
    "tasks": tasks_markdown,
}  # fmt: skip


def _with_error(value: float | None, stderr: float | None, digits: int) -> str:
    return number(value, digits) + (f" ± {stderr:.{digits}f}" if value is not None and stderr is not None else "")


def updated(text: str, read: Callable[[str], dict[str, Any]]) -> str:
    """The text with every table between `<!-- workbench table PATHS -->` and `<!-- end -->` made anew from these
    records.

    `table` gives the models of the records side by side (`markdown`), `strengths`, `cache`, `cache-speed` and `tasks`
    what the functions of these names do.

    Args:
        read: a record by its path, as the text names it; several are apart by spaces.

    Raises:
        ValueError: a table that names no record, or does not end.
    """

    def made(section: re.Match) -> str:
        paths = section["paths"].split()
        if not paths or not section["end"]:
            lacks = "must name records" if not paths else f"has no {END} after it"
            raise ValueError(f"{START}{section['kind']} {section['paths']} --> {lacks}")
        return f"{section[1]}\n{_MADE[section['kind']]([read(path) for path in paths])}\n{END}"

    return _SECTION.sub(made, text)
