"""Accuracy against bytes and against speed: the models on the front, the models within its noise, and the dominated
ones."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from eval.record.metrics import fmt, growth, percent
from reports.compare.noise import Amount, Effect, Standing, standings
from reports.compare.variants import Quantity, Variant, drift, shared
from reports.parts.labels import Point, label_points
from reports.parts.plots import ACCENT, INK, MUTED, PANEL, SECOND, drawn, svg
from reports.parts.text import clean, listed, plural

MAX_PLANES, MAX_POINTS, MAX_ROWS, MAX_LABELS, MAX_NUMBERED = 8, 150, 80, 10, 24
_STANDS = {"front": "on the front", "noise": "within the noise of the front", "dominated": "dominated"}


class Axis(NamedTuple):
    """A measure of accuracy: its name, label, the measurements whose mean it is, and the format of a cost."""

    name: str
    label: str
    quantities: tuple[Quantity, ...]
    shown: Callable[[float], float]
    written: Callable[[float], str]
    amount: str = "stored"  # the bytes that belong to it


@dataclass(frozen=True)
class Spot:
    """A model in a plane."""

    variant: Variant
    effect: Effect
    amount: Amount
    standing: Standing = field(default_factory=lambda: Standing("front"))


class PlaneRow(NamedTuple):
    """A model of a plane as text."""

    number: int
    recipe: str
    accuracy: str
    interval: str
    amount: str
    spread: str
    status: str
    standing: str


@dataclass(frozen=True)
class Plane:
    """One figure with its description and its table."""

    about: str
    model: str
    said: str  # the content of the figure in words
    brief: str
    order: str
    caption: str
    figure: str
    head: tuple[str, str]
    rows: list[PlaneRow]
    front: list[PlaneRow]  # those of the rows that are on it, in order
    hidden: int

    @property
    def title(self) -> str:
        return f"{self.about}, {self.model}"


class PlaneModels(NamedTuple):
    """The models of a plane before it is drawn; kind: stored, cache, or the kind of the speed."""

    axis: Axis
    kind: str
    spots: list[Spot]
    elsewhere: int  # models that were timed on other machines or with other settings


def plane_models(found: Sequence[Variant]) -> list[PlaneModels]:
    """Accuracy against bytes, then against decode speed, for every model that lost no measure of accuracy; speeds only
    if machine and settings are the same."""
    made, found = [], [v for v in found if not v.lost]
    for weights, _ in Counter(v.weights for v in found).most_common():
        own = [v for v in found if v.weights == weights]
        made += [PlaneModels(axis, *models) for axis in axes_of(own) for models in _models(own, axis)]
    return made


def planes(found: Sequence[PlaneModels], scale: float = 1.0) -> list[Plane]:
    """The first planes with their figures, descriptions and tables.

    Args:
        scale: of the numbers of points and rows, for a page that would be too large.
    """
    return [_plane(*models, scale, i) for i, models in enumerate(found[: max(1, round(MAX_PLANES * min(1.0, scale)))])]


def axes_of(own: Sequence[Variant]) -> list[Axis]:
    """The measures of accuracy for these models of the same weights: divergence, else perplexity; tasks if at least
    half of the models with a known size answered any; and exact answers, if caches were compressed."""
    own = [v for v in own if not v.baseline]
    weighed = [v for v in own if Quantity("stored") in v.numbers]
    asked = [v for v in weighed if any(w.kind == "task" for w in v.effects)]
    axes: list[Axis] = []
    for kind in ("kl", "perplexity"):
        if not axes:
            axes += [_by_text(what) for what in _texts(weighed, kind)]
    if len(asked) >= 2 and 2 * len(asked) >= len(weighed):
        tasks = shared(asked, "task")
        names = listed([clean(w.of.rpartition(" ")[0], 40) for w in tasks], 3)
        axes.append(
            Axis(
                f"accuracy on {names}",
                "recovery of accuracy, % of the baseline's",
                tasks,
                lambda cost: 100 * (1 - cost),
                lambda cost: f"{100 * (1 - cost):.1f} %",
            )
        )
    exact = [w for w, n in Counter(w for v in own for w in v.effects if w.kind == "exact").items() if n >= 2]
    if exact:
        first = min(exact, key=lambda w: (w.of != "agnostic", w))
        name = f"exact answers, {clean(first.of, 40)} ({clean(first.protocol, 80)})"
        axes.append(
            Axis(
                name,
                "exact answers, points to the full cache's",
                (first,),
                lambda cost: -100 * cost,
                lambda cost: f"{-100 * cost:+.0f}".replace("-", "−") if cost else "0",
                "cache",
            )
        )
    return axes


def _texts(weighed: Sequence[Variant], kind: str) -> list[Quantity]:
    """Texts on which at least two models were scored, without texts that would show the same models again."""
    counted = Counter(w for v in weighed for w in v.effects if w.kind == kind)
    shown: set[int] = set()
    texts = []
    for what, count in counted.most_common():
        models = {v.number for v in weighed if what in v.effects}
        if count >= 2 and not models <= shown:
            texts.append(what)
            shown |= models
    return texts


def _by_text(what: Quantity) -> Axis:
    name = f"{clean(what.of, 40)}{f' ({what.protocol})' if what.protocol else ''}"
    if what.kind == "kl":
        return Axis(
            f"KL on {name}",
            "KL to the baseline, nats per token",
            (what,),
            lambda cost: cost,
            lambda cost: f"{cost:.4f}",
        )
    return Axis(
        f"perplexity on {name}",
        "change of the perplexity, %",
        (what,),
        lambda cost: 100 * growth(cost),
        lambda cost: percent(growth(cost)) if cost else "0 %",
    )


def _models(own: Sequence[Variant], axis: Axis) -> Iterator[tuple[str, list[Spot], int]]:
    """The planes of an axis: against bytes, and against speed once per machine and settings; of at least two models."""
    found = [(v, effect) for v in own if (effect := _effect(v, axis)) is not None]

    def spots(pairs: list[tuple[Variant, Effect]], what: Quantity, sign: int) -> list[Spot]:
        made, seen = [], set()
        drifted = (
            max((drift(own, v, what) for v in {v.timing: v for v, _ in pairs}.values()), default=1.0)
            if sign > 0
            else 1.0
        )
        for v, effect in pairs:
            if what in v.numbers and not (v.baseline and v.timing in seen):
                seen |= {v.timing} if v.baseline else set()
                n = v.numbers[what]
                made.append(Spot(v, effect, Amount(n.value, sign, n.low, n.high, v.run.key)))
        stand = standings([(s.effect, s.amount) for s in made], drifted)
        return [Spot(s.variant, s.effect, s.amount, t) for s, t in zip(made, stand, strict=True)]

    for what in sorted({w for v, _ in found for w in v.numbers if w.kind == axis.amount}):
        once = [(v, e) for i, (v, e) in enumerate(found) if not v.baseline or not any(o.baseline for o, _ in found[:i])]
        if len([v for v, _ in once if what in v.numbers and not v.baseline]) >= 2:
            yield axis.amount, spots(once, what, -1), 0
    for what in sorted(
        {w for v, _ in found for w in v.numbers if w.kind == "decode" and bool(w.of) == (axis.amount == "cache")}
    ):
        for timing in dict.fromkeys(v.timing for v, _ in found if what in v.numbers and not v.baseline):
            same = [(v, e) for v, e in found if v.timing == timing]
            if len([v for v, _ in same if what in v.numbers and not v.baseline]) >= 2:
                elsewhere = sum(what in v.numbers and not v.baseline and v.timing != timing for v, _ in found)
                yield what.of or "decode", spots(same, what, 1), elsewhere


def _effect(v: Variant, axis: Axis) -> Effect | None:
    """The mean over the axis's measurements; None if one of them is missing."""
    if v.baseline and all(w in v.numbers for w in axis.quantities):
        return Effect(0.0, 0.0)
    if any(w not in v.effects for w in axis.quantities):
        return Effect(0.0, 0.0) if v.baseline and axis.quantities[0].kind == "kl" else None
    own = [v.effects[w] for w in axis.quantities]
    stderr = None if any(e.stderr is None for e in own) else math.hypot(*(e.stderr for e in own)) / len(own)
    return Effect(sum(e.cost for e in own) / len(own), stderr)


def _plane(axis: Axis, kind: str, spots: list[Spot], elsewhere: int, scale: float, index: int) -> Plane:
    by_size = kind in ("stored", "cache")
    x_label = {"stored": "stored megabytes", "cache": "megabytes of the cache"}.get(kind, "decoded tokens per second")
    against = {"stored": "stored bytes", "cache": "bytes of the cache", "decode": "decode speed"}.get(
        kind, f"decode speed {kind}"
    )
    model, machine = clean(spots[0].variant.model, 60), spots[0].variant.machine
    front = [s for s in spots if s.standing.status == "front"]
    front.sort(key=lambda s: s.amount.value, reverse=not by_size)
    counts = Counter(s.standing.status for s in spots)
    told = f" {plural(counts['noise'], 'other')} cannot be told from it at this n." if counts["noise"] else ""
    told += (
        f" {counts['dominated']} {'is' if counts['dominated'] == 1 else 'are'} dominated."
        if counts["dominated"]
        else ""
    )
    order = f"from the {'smallest' if by_size else 'fastest'}"
    said = f"{model}, {axis.name}, against {against}: of {plural(len(spots), 'model')}, "
    said += f"{counts['front']} on the front, {order}: "
    said += f"{listed([clean(_name(s.variant, axis), 90) for s in front], 8)}.{told}"
    brief = f"Of {plural(len(spots), 'model')} of {model}, {counts['front']} {'is' if counts['front'] == 1 else 'are'} "
    brief += f"on the front of {axis.name} against {against}.{told}"
    top = sorted(spots, key=lambda s: (s.standing.status != "front", s.variant.number))
    drawn = top[: max(12, round(MAX_POINTS * scale))]
    shown = top[: max(6, round(MAX_ROWS * scale))]
    rows = {s.variant.number: _row(s, spots, axis, by_size) for s in sorted(shown, key=lambda s: s.variant.number)}
    caption = "Bars: one standard error of the difference to the baseline"
    caption += (
        "."
        if by_size
        else f", and the interval within which speeds cannot be told apart. Measured on {clean(machine, 160)}."
    )
    if elsewhere:
        are = "was" if elsewhere == 1 else "were"
        caption += f" {plural(elsewhere, 'model')} {are} timed on another machine, or with other settings, and {are} "
        caption += "left out here."
    if len(drawn) < len(spots):
        caption += f" {len(spots) - len(drawn)} dominated ones are not drawn."
    figure = _draw(drawn, axis, by_size, x_label, f"pareto-{index}", said)
    about = f"{'Answers' if axis.amount == 'cache' else 'Accuracy'} against {against}"
    best = [rows[s.variant.number] for s in front if s.variant.number in rows]
    hidden, units = len(spots) - len(shown), (axis.label, x_label)
    return Plane(about, model, said, brief, order, caption, figure, units, list(rows.values()), best, hidden)


def _row(s: Spot, spots: list[Spot], axis: Axis, by_size: bool) -> PlaneRow:
    name, amount = _name(s.variant, axis).split(" ", 1)[1], fmt(s.amount.value, ",.1f", 1e-6 if by_size else 1)
    shown = (axis.written(s.effect.cost), _interval(s.effect, axis), amount, _spread(s.amount))
    return PlaneRow(s.variant.number, name, *shown, s.standing.status, _standing(s, spots, axis))


def _interval(effect: Effect, axis: Axis) -> str:
    if not effect.stderr:
        return ""
    ends = sorted((axis.shown(effect.cost - effect.stderr), axis.shown(effect.cost + effect.stderr)))
    return " to ".join(f"{e:.3g}" for e in ends).replace("-", "−")


def _spread(amount: Amount) -> str:
    return "" if amount.low is None or amount.high is None else f"{amount.low:,.1f}–{amount.high:,.1f}"


def _standing(spot: Spot, spots: list[Spot], axis: Axis) -> str:
    standing, said = spot.standing, _STANDS[spot.standing.status]
    if standing.by is not None:
        said += (
            f"{' by' if standing.status == 'dominated' else ':'} {clean(_name(spots[standing.by].variant, axis), 90)}"
        )
    if standing.alike and standing.status != "dominated":
        names = [_name(spots[i].variant, axis, short=True) for i in standing.alike]
        others = listed(names, count=standing.alike_count)
        said += f"; indistinguishable at this n from {others}"
    return said


@drawn
def _draw(spots: list[Spot], axis: Axis, by_size: bool, x_label: str, key: str, said: str) -> str:
    factor = 1e-6 if by_size else 1.0
    points = [(s, s.amount.value * factor, axis.shown(s.effect.cost)) for s in spots]
    figure = Figure(figsize=(9.6, 4.6))
    ax = figure.add_axes((0.105, 0.12, 0.88, 0.85))
    low, high = min(x for _, x, _ in points), max(x for _, x, _ in points)
    room = (high - low or high or 1) * 0.12
    ax.set_xlim(low - room, high + room)
    y = [value for *_, value in points]
    bent = axis.quantities[0].kind == "perplexity" and max(y) > 20
    if bent:
        ax.set_yscale("symlog", linthresh=1, linscale=0.6)
    ax.yaxis.set_major_formatter(lambda v, _: f"{v:,g}".replace("-", "−"))
    ax.axhline(axis.shown(0.0), color=MUTED, lw=0.8, ls=":")
    front = sorted(((x, value) for s, x, value in points if s.standing.status == "front"))
    if front:
        look = {"color": ACCENT, "lw": 1.2, "alpha": 0.6, "drawstyle": "steps-post" if by_size else "steps-pre"}
        ax.plot(*zip(*front, strict=True), zorder=1.2, **look)
    _bars(ax, points, axis, factor)
    titles = _marks(ax, points, axis, "MB" if by_size else "tokens/s")
    ax.margins(y=0.14)
    ax.grid(True, lw=0.6)
    ax.minorticks_off()
    ax.set_xlabel(x_label)
    ax.set_ylabel(axis.label)
    ax.autoscale_view()
    label_points(ax, _labels(points, axis))
    return svg(figure, key, said, titles)


def _bars(ax: Axes, points: list[tuple[Spot, float, float]], axis: Axis, factor: float) -> None:
    """All bars as one line with gaps."""
    ends: list[tuple[float, float]] = []
    for spot, x, y in points:
        if spot.effect.stderr:
            ends += [(x, axis.shown(spot.effect.cost + side * spot.effect.stderr)) for side in (-1, 1)] + [
                (math.nan, math.nan)
            ]
        if spot.amount.low is not None and spot.amount.high is not None:
            ends += [(spot.amount.low * factor, y), (spot.amount.high * factor, y), (math.nan, math.nan)]
    if ends:
        ax.plot(*zip(*ends, strict=True), color=MUTED, lw=0.8, zorder=1.5)


def _marks(ax: Axes, points: list[tuple[Spot, float, float]], axis: Axis, unit: str) -> dict[str, list[str]]:
    """Draw the marks, and give what a browser shows for each: the recipe with its numbers and its standing."""
    kinds: dict[tuple[bool, str], list[tuple[Spot, float, float]]] = {}
    for point in points:
        kinds.setdefault((point[0].variant.baseline, point[0].standing.status), []).append(point)
    titles = {}
    for (baseline, status), of in kinds.items():
        solid, below = status == "front", status == "dominated"
        colour, gid = INK if baseline else SECOND if below else ACCENT, f"marks-{status}-{'base' * baseline}"
        ax.plot(
            [x for _, x, _ in of],
            [y for *_, y in of],
            "D" if baseline else "o",
            ms=6.5 if solid else 5,
            color=colour,
            zorder=5 + solid,
            mfc=colour if solid or below else PANEL,
            alpha=0.75 if below else 1,
            gid=gid,
        )
        titles[gid] = [
            f"{clean(_name(s.variant, axis), 90)}: {x:,.1f} {unit}, {axis.written(s.effect.cost)}; {_STANDS[status]}"
            for s, x, _ in of
        ]
    return titles


def _labels(points: list[tuple[Spot, float, float]], axis: Axis) -> list[Point]:
    """Labels: names for the front, numbers for the others, none for dominated models if there are many."""
    named = [p for p in points if p[0].standing.status == "front"][:MAX_LABELS]
    rest = [
        p for p in points if p not in named and (len(points) <= MAX_NUMBERED or p[0].standing.status != "dominated")
    ]
    labels = [Point(clean(_name(s.variant, axis), 70), x, y, s.variant.name == "compressed") for s, x, y in named]
    return labels + [Point(str(s.variant.number or "baseline"), x, y) for s, x, y in rest[:MAX_NUMBERED]]


def _name(v: Variant, axis: Axis, short: bool = False) -> str:
    if v.number:
        return f"#{v.number}" if short else f"#{v.number} {v.recipe}"
    return "the full 16-bit cache" if axis.amount == "cache" else "the 16-bit baseline"
