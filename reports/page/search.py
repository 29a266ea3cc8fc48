"""The search for the best choice of every layer: what was asked, predicted and measured, and the front of sizes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from eval.record.metrics import number, percent
from eval.record.reading import is_complete
from eval.record.rows import RunRecord, typed
from eval.record.search import CLOSE, SearchCaches, SearchLayer, SearchRecord
from reports.page.allocation import bits_by_depth
from reports.parts import plots
from reports.parts.figures import Figures
from reports.parts.text import clean


@dataclass(frozen=True)
class WishRow:
    """A row of the table of wishes; texts for readers.

    off: how far the measurement is from the prediction. kept: whether the limit is kept, "" if there is none.
    """

    name: str
    asked: str
    predicted: str
    measured: str
    off: str
    kept: str


def figures(found: Any) -> Figures:
    """The front of a search (`compress.fit`), for a notebook."""
    record = typed({"search": found.record}).search
    said = " ".join(record.sentences()) if record else "Nothing was searched."
    drawn = _front(record) if record else ""
    return Figures(said, {"Least divergence for each size": drawn} if drawn else {})


def context(run: RunRecord) -> dict[str, Any]:
    """The data for templates/search.html from a record; {} if nothing was searched, or a needed value is missing."""
    made = run.search
    if made is None or not is_complete(made) or not 0 <= made.kept < len(made.rounds):
        return {}
    if made.minimised not in ("loss", "bytes", "decode"):
        return {}
    return {
        "said": [clean(sentence, 4000) for sentence in made.sentences()],
        "wishes": _wishes(run, made),
        "choices": [_choice(made, text) for text in made.choices],
        "caches": _caches(made.caches) if made.caches else [],
        "sequences": "one sequence"
        if made.caches and made.caches.batch == 1
        else (f"{made.caches.batch:,} sequences" if made.caches else ""),
        "context": made.caches.context if made.caches else 0,
        "timed": made.original is not None,
        "timed_earlier": made.timed_earlier,
        "front": _front(made),
        "bits": bits_by_depth(run.layers),
        "layers": [_layer(one) for one in made.picked],
        "model": clean(run.model.name, 100),
        "recipe": clean(run.recipe_of("compressed", whole=True) or "", 40_000),
        "uniform": made.rounds[made.kept].uniform,
        "factor": made.rounds[made.kept].factor,
    }


def _wishes(run: RunRecord, made: SearchRecord) -> list[WishRow]:
    kept, score = made.rounds[made.kept], run.score
    point = kept.point
    name = "stored, MB" if made.caches is None else "stored, with the cache, MB"
    size = score("compressed", "stored_bytes") if made.caches is None else kept.bytes
    rows = [as_row(name, made.max_bytes, point.bytes, size, megabytes)]
    if made.caches:
        behind = f"divergence behind {made.caches.context:,} tokens, nats per token"
        rows.append(as_row(behind, made.max_kl, point.loss, kept.divergence, number, close=CLOSE))
        if made.original and point.decode and kept.decode:
            decoding = f"decoding behind {made.caches.context:,} tokens, tokens/s"
            about = {"most": False, "close": CLOSE}
            rows.append(as_row(decoding, made.min_decode, point.decode, kept.decode, whole, **about))
            if point.prefill and kept.prefill:
                rows.append(as_row("prompts, tokens/s", made.min_prefill, point.prefill, kept.prefill, whole, **about))
        return [*rows, *_first_token(made)]
    for corpus in run.corpora:
        if (got := score("compressed", f"kl_{corpus}")) is None:  # a task, of which only the perplexity is known
            continue
        rows.append(
            as_row(
                f"divergence on {clean(corpus, 40)}, nats per token", made.max_kl, point.loss, got, number, close=CLOSE
            )
        )
    for phase, name, wish, predicted, place in (
        ("decode", "decoding", made.min_decode, point.decode, 0),
        ("prefill", "prompts", made.min_prefill, point.prefill, 1),
    ):
        before = made.original[place] if made.original and len(made.original) == 2 else None
        if not before or predicted is None:
            continue
        metric = f"{phase}_tokens_per_s"
        ratio = run.ratio(metric)
        asked = wish and wish / before
        rows.append(
            as_row(
                f"{name}, times the original's speed", asked, predicted / before, ratio, _times, most=False, close=CLOSE
            )
        )
        rows.append(
            as_row(f"{name}, tokens/s", wish, predicted, score("compressed", metric), whole, most=False, close=CLOSE)
        )
    return [*rows, *_first_token(made)]


def _first_token(made: SearchRecord) -> list[WishRow]:
    """The time until the first token as the search measured it, if it is limited."""
    kept = made.rounds[made.kept]
    limit = made.first_token_limit
    if limit is None or not kept.point.prefill or not kept.prefill:
        return []
    name = f"first token after {made.prompt:,} tokens with the full cache, ms (in the search)"
    times = (1e3 * made.prompt / rate for rate in (kept.point.prefill, kept.prefill))
    return [as_row(name, 1e3 * limit, *times, number, close=CLOSE)]


def as_row(
    name: str,
    asked: float | None,
    predicted: float,
    got: float | None,
    write: Callable[[float], str],
    *,
    most: bool = True,
    close: float = 0.0,
) -> WishRow:
    """A row of the table of wishes. most: is the limit the largest value, and not the least? close: share by which it
    may be missed."""
    off = "" if got is None or not predicted else percent(got / predicted - 1)
    kept = ""
    if asked and got is not None:
        beyond = got / asked if most else asked / got if got else float("inf")
        kept = "yes" if beyond <= 1 else f"within {100 * close:.0f} %" if beyond <= 1 + close else "no"
    return WishRow(name, write(asked) if asked else "", write(predicted), "" if got is None else write(got), off, kept)


def whole(rate: float) -> str:
    return f"{rate:,.0f}"


def megabytes(size: float) -> str:
    return f"{size / 1e6:.1f}"


def _times(ratio: float) -> str:
    return f"{ratio:.2f}×"


def _choice(made: SearchRecord, text: str) -> tuple[str, int, str, str]:
    """A choice, the number of linears that have it, and the speeds of a model in which all have it."""
    ratios = [one.get(text) for one in (made.decode_ratio, made.prefill_ratio)]
    return clean(text, 120), made.used.get(text, 0), *("" if one is None else _times(one) for one in ratios)


def _caches(made: SearchCaches) -> list[tuple[str, str, str, str, str, str]]:
    """The choices of the cache: recipe, megabytes, loss, speed beside the full cache, and which was chosen."""
    return [
        (
            clean(name, 60),
            clean(recipe, 120),
            megabytes(made.bytes[name]) if name in made.bytes else "",
            number(made.loss[name]) if name in made.loss else "",
            _times(made.decode_ratio[name]) if name in made.decode_ratio else "",
            "yes" if name == made.chosen else "",
        )
        for name, recipe in made.recipes.items()
    ]


def _layer(one: SearchLayer) -> tuple[str, str, str, str, str, str, str]:
    """A layer, its choice, kilobytes, loss, losses with the next fewer and more bytes, and the cost of a megabyte."""
    kept = [
        number(loss) if loss is not None else ""
        for loss in (one.loss, *(e[1] if len(e) == 2 else None for e in (one.fewer, one.more)))
    ]
    less = one.bytes - one.fewer[0] if len(one.fewer) == 2 else 0
    saves = (one.fewer[1] - one.loss) / less if less else None
    price = "" if saves is None else number(1e6 * saves)
    return clean(one.name, 80), clean(one.choice, 80), f"{one.bytes / 1e3:,.1f}", *kept, price


def _front(made: SearchRecord) -> str:
    points = [(point.bytes / 1e6, point.loss) for point in made.front]
    kept = made.rounds[made.kept]
    if len(points) < 3:
        return ""
    lines = {"best choices for each size": points, "made": [(kept.point.bytes / 1e6, kept.divergence)]}
    return plots.against(
        {"": lines},
        key="search",
        x_label=f"megabytes of the whole model{' and its cache' if made.caches else ''}",
        y_label="divergence, nats per token",
        summary="Least predicted divergence against the model's size, log scale, and the model that was made.",
    )
