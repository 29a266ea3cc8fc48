"""The answer of a page to "which one?": recipes by name, for size, accuracy and speed; what to avoid, and what cannot
be told apart."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import NamedTuple

from eval.record.metrics import fmt
from eval.record.noise import Z
from eval.record.rows import Step
from reports.compare.noise import ahead, better
from reports.compare.pareto import Axis, PlaneModels, Spot
from reports.compare.variants import Variant, drift
from reports.parts.caches import WHEN
from reports.parts.text import clean, listed, measured_up_to, plural

ALLOWED_LOSS = 0.05
_MOST = 3  # recipes in a sentence about several
STRENGTHS = ("bits", "ratio", "budget")  # knobs that say how much is taken
_BOUNDS = {  # kind of the measure: its bound in words, from the allowed loss as a share
    "task": lambda loss: f"at least {100 * (1 - loss):.3g} % of the baseline’s accuracy",
    "perplexity": lambda loss: f"at most +{100 * loss:.3g} % perplexity",
    "kl": lambda loss: f"a KL of at most {loss:.3g} nats per token",
    "exact": lambda loss: f"at most {100 * loss:.3g} points fewer exact answers",
}


class Suggestion(NamedTuple):
    """One answer: for what, which recipe, and its numbers, each as text. name: "" if there is no such recipe, and then
    `purpose` is a sentence."""

    purpose: str
    name: str = ""
    numbers: str = ""


@dataclass(frozen=True)
class Decision:
    """The answers for the models of one pair of weights. about: their name if the page has several."""

    about: str
    choices: tuple[Suggestion, ...]
    remarks: tuple[str, ...]

    def __str__(self) -> str:
        told = "; ".join(f"{c.purpose}: {c.name} ({c.numbers})" if c.name else c.purpose for c in self.choices)
        return " ".join((f"{told}.", *self.remarks))


@dataclass(frozen=True)
class Field:
    """The models that a decision is about, by one measure of accuracy: in the plane of their bytes, and in those of
    their speed. names: of every model on the page, by its run and its name there."""

    axis: Axis
    sizes: list[Spot]
    speeds: list[list[Spot]]
    names: Mapping[tuple[str, str], str]

    def name(self, spot: Spot) -> str:
        own = spot.variant
        if own.baseline:
            return "the full 16-bit cache" if self.axis.amount == "cache" else "the 16-bit baseline"
        return clean(self.names[own.run.key, own.name], 110)

    def accuracy(self, cost: float) -> str:
        unit = {"perplexity": " perplexity", "kl": " nats", "exact": " points", "task": " of the accuracy"}
        return self.axis.written(cost) + unit[self.axis.quantities[0].kind]

    def size(self, spot: Spot) -> str:
        ratio = next((n.ratio for q, n in spot.variant.numbers.items() if q.kind == self.axis.amount and n.ratio), None)
        return f"{fmt(spot.amount.value, ',.1f', 1e-6)} MB" + (f", {1 / ratio:.2f}× smaller" if ratio else "")

    def numbers(self, spot: Spot) -> str:
        return f"{self.size(spot)}, {self.accuracy(spot.effect.cost)}"


def decisions(planes: Sequence[PlaneModels], loss: float = ALLOWED_LOSS, *, numbered: bool = True) -> list[Decision]:
    """The decision between the models of the most runs, and that between their caches if these were compressed.

    Args:
        loss: the loss of accuracy, as a share, that the smallest recipe may have (`_BOUNDS` has its meaning).
        numbered: whether names begin with the numbers of the leaderboard's rows, and the largest model is named, which
            the page of a single run says itself.
    """
    weights = [one.spots[0].variant.weights for one in planes]
    fields: dict[str, Field] = {}
    names = short_names(planes, numbered)
    for axis, kind, spots, _ in (one for one, of in zip(planes, weights, strict=True) if of == weights[0]):
        own = fields.setdefault(axis.amount, Field(axis, [], [], names))
        if own.axis == axis and kind == axis.amount:
            own.sizes.extend(spots)
        elif own.axis == axis:
            own.speeds.append(spots)
    about = clean(planes[0].spots[0].variant.model, 60) if len(set(weights)) > 1 else ""
    made = [_decide(field, about, loss) for field in fields.values() if field.sizes]
    if not numbered or not made:
        return made
    largest = measured_up_to(s.variant.run.measured.model.parameters for one in planes for s in one.spots)
    return [*made[:-1], replace(made[-1], remarks=(*made[-1].remarks, *largest))]


def short_names(planes: Sequence[PlaneModels], numbered: bool) -> dict[tuple[str, str], str]:
    """Names for sentences: the methods of each recipe, with the knobs that tell it from others of the same methods, and
    with those that say how much is taken."""
    own = {(v.run.key, v.name): v for one in planes for v in (s.variant for s in one.spots) if not v.baseline}
    steps = {key: v.run.measured.recipes.get(v.name, v.run.measured.recipe) for key, v in own.items()}
    alike: dict[tuple[str, ...], list[tuple[Step, ...]]] = {}
    for of in steps.values():
        alike.setdefault(tuple(step.method for step in of), []).append(of)
    names = {}
    for key, v in own.items():
        others = alike[tuple(step.method for step in steps[key])]
        name = " + ".join(_short(step, [of[i] for of in others]) for i, step in enumerate(steps[key])) or v.recipe
        names[key] = f"#{v.number} {name}" if numbered else name
    return names


def _short(step: Step, others: Sequence[Step]) -> str:
    told = [knob for knob in step.knobs if len({repr(other.knobs.get(knob)) for other in others}) > 1]
    told += [knob for knob in STRENGTHS if f"{knob}=" in step.text and knob not in told]
    shown = [f"{knob}={_value(step.knobs[knob])}" for knob in step.knobs if knob in told]
    return f"{step.method}({', '.join(shown)})" if shown else step.method


def _value(value: object) -> str:
    """A knob's value; of a path only the file's name."""
    return PurePath(value).stem if isinstance(value, str) and "/" in value else str(value) or "''"


def _decide(field: Field, about: str, loss: float) -> Decision:
    own = [s for s in field.sizes if not s.variant.baseline]
    best = min(own, key=lambda s: (s.effect.cost, s.amount.value))
    smallest = _smallest(own, allowed(field.axis, loss))
    bound = _BOUNDS[field.axis.quantities[0].kind](loss)
    choices = [Suggestion(f"No recipe has {bound}")]
    if smallest:
        purpose = f"Smallest with {bound}{', and most accurate' * (smallest is best)}"
        choices = [
            Suggestion(purpose, field.name(smallest), field.numbers(smallest) + _at_worst(field, smallest, loss))
        ]
    if smallest is not best:
        choices.append(Suggestion("most accurate", field.name(best), field.numbers(best)))
    choices += [fast for spots in field.speeds if (fast := _fastest(field, spots))]
    remarks = [f"Avoid {avoid}." for avoid in _avoided(field)] + _alike(field, own, best) + _asked(field.axis)
    return Decision(about, tuple(choices), tuple(remarks))


def _asked(axis: Axis) -> list[str]:
    """When the questions came, if the measure is answers about a compressed cache."""
    what = axis.quantities[0]
    return [f"The answers are those {WHEN.get(what.of, what.of)}."] if what.kind == "exact" else []


def allowed(axis: Axis, loss: float) -> float:
    """The cost on an axis that a loss allows, which is a share: of the accuracy, of the perplexity, of the exact
    answers; for KL, nats per token."""
    return math.log1p(loss) if axis.quantities[0].kind == "perplexity" else loss


def _smallest(own: Sequence[Spot], most: float) -> Spot | None:
    """Of the models that lose at most `most`, the smallest; of several of about this size, the most accurate."""
    inside = [s for s in own if s.effect.cost <= most]
    if not inside:
        return None
    least = min(inside, key=lambda s: s.amount.value)
    return min((s for s in inside if not ahead(least.amount, s.amount)), key=lambda s: s.effect.cost)


def _at_worst(field: Field, spot: Spot, loss: float) -> str:
    """The end of the interval of a model's accuracy, if it lies beyond the allowed loss."""
    end = spot.effect.cost + Z * (spot.effect.stderr or 0.0)
    return f", at the end of its interval {field.axis.written(end)}" if end > allowed(field.axis, loss) else ""


def _fastest(field: Field, spots: Sequence[Spot]) -> Suggestion | None:
    """The fastest of the models that were timed alike, unless it may be no faster than the baseline."""
    base = next((s for s in spots if s.variant.baseline), None)
    own = [s for s in spots if not s.variant.baseline]
    fastest = max(own, key=lambda s: s.amount.value)
    what, number = next((q, n) for q, n in fastest.variant.numbers.items() if n.value == fastest.amount.value)
    behind = f" {what.of}" if what.of else ""
    drifted = drift([s.variant for s in spots], fastest.variant, what)
    if base and not ahead(fastest.amount, base.amount, drifted):
        if why := next(filter(None, (s.variant.run.measured.disturbed for s in (fastest, base))), ""):
            return Suggestion(f"no speed{behind} counts, because {why}")
        return Suggestion(f"none decodes faster than {field.name(base)}{behind}, beyond noise")
    alike = [s for s in own if s is not fastest and not ahead(fastest.amount, s.amount, drifted)]
    noise = f"; within its noise {listed([field.name(s) for s in alike], 2)}" if alike else ""
    speed = f"{number.ratio:.2f}× the baseline’s speed" if number.ratio else f"{fastest.amount.value:,.1f} tokens/s"
    return Suggestion(f"fastest{behind}", field.name(fastest), f"{speed}, {field.accuracy(fastest.effect.cost)}{noise}")


def _alike(field: Field, own: Sequence[Spot], best: Spot) -> list[str]:
    """A sentence on the models whose accuracy cannot be told from the best one's."""
    alike = [s for s in own if s is not best and not better(best.effect, s.effect)]
    if not alike:
        return []
    if len(alike) == len(own) - 1:
        return [f"At this n, no recipe of these {len(own)} is more accurate than another beyond noise."]
    names = listed([field.name(s) for s in alike], _MOST)
    return [f"At this n, {names} cannot be told from {field.name(best)} by accuracy."]


def _avoided(field: Field) -> list[str]:
    """Models that are dominated in every plane that has them, the worst first, each group with a model to take
    instead."""
    useful = {id(s.variant) for spots in field.speeds for s in spots if s.standing.status != "dominated"}
    bad = [s for s in field.sizes if s.standing.status == "dominated" and id(s.variant) not in useful]
    groups: dict[tuple[str, str], list[Spot]] = {}
    for spot in sorted((s for s in bad if not s.variant.baseline), key=lambda s: -s.effect.cost):
        instead = field.sizes[spot.standing.by]
        groups.setdefault((field.name(instead), _reason(instead, spot)), []).append(spot)
    largest = sorted(groups.items(), key=lambda pair: -len(pair[1]))[:2]
    return [f"{listed([field.name(s) for s in of], _MOST)}: {name} is {reason}" for (name, reason), of in largest]


def _reason(instead: Spot, spot: Spot) -> str:
    """In what another model is better than this one."""
    more = "smaller" if spot.amount.sign < 0 else "faster"
    if not ahead(instead.amount, spot.amount):
        return f"as {'small' if more == 'smaller' else 'fast'} and more accurate"
    return f"{more} and {'more' if better(instead.effect, spot.effect) else 'as'} accurate"


def standing(planes: Sequence[PlaneModels], found: Sequence[Variant], name: str) -> list[str]:
    """What one model is against the others of its page: good or bad for its bytes, and for its speed, at its accuracy;
    if no others have a known size, sentences on its accuracy alone.

    Args:
        planes: of the models of one run.
        found: these models.
        name: of the model in the record.
    """
    judged: dict[str, tuple[str, str]] = {}
    names = short_names(planes, False)
    for axis, kind, spots, _ in planes:
        mine = next((s for s in spots if s.variant.name == name), None)
        if mine and kind not in judged and len(spots) > 2:
            judged[kind] = _judged(Field(axis, spots, [], names), mine, spots, kind)
    if not judged:
        return _by_accuracy(found, name)
    words = [word for word, _ in judged.values()]
    turns = [i > 0 and words[i] != words[i - 1] for i in range(len(words))]
    said = "; ".join("but " * turn + text for turn, (_, text) in zip(turns, judged.values(), strict=True))
    return [f"{said[0].upper()}{said[1:]}."]


def _judged(field: Field, mine: Spot, spots: Sequence[Spot], kind: str) -> tuple[str, str]:
    """Good, bad or neither, and why, for the bytes or the speed of a model."""
    known = {"stored": "its size", "cache": "the size of its cache", "decode": "its speed"}
    named = known.get(kind, f"its speed {kind}")
    if mine.standing.status == "front":
        others = plural(len(spots) - 1, "other model")
        like = "as small" if mine.amount.sign < 0 else "as fast"
        return "good", f"good for {named}: none of the {others} of this page is {like} and as accurate"
    instead = spots[mine.standing.by]
    if mine.standing.status == "noise":
        return "neither", f"neither good nor bad for {named}: {field.name(instead)} looks better, within the noise"
    return "bad", f"bad for {named}: {field.name(instead)} is {_reason(instead, mine)}"


def _by_accuracy(found: Sequence[Variant], name: str) -> list[str]:
    """A sentence on the accuracy of one model against the others' that are no baselines."""
    mine = next((v for v in found if v.name == name), None)
    what = next(
        (q for kind in ("kl", "task", "perplexity") for q in (mine.effects if mine else ()) if q.kind == kind), None
    )
    others = [] if what is None else [v for v in found if what in v.effects and v is not mine and not v.baseline]
    if not others:
        return []
    groups = {"More accurate than": [], "Less accurate than": [], "Not to be told by accuracy from": []}
    for v in others:
        ways = better(mine.effects[what], v.effects[what]), better(v.effects[what], mine.effects[what])
        list(groups.values())[0 if ways[0] else 1 if ways[1] else 2].append(clean(v.name, 60))
    return [f"{words} {listed(of)} of this page ({what.words})." for words, of in groups.items() if of]
