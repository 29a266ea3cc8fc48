"""fit: a model and limits of bytes, speed and divergence -> the best choice for every layer and for the cache, made and
measured."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from math import isfinite, log
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from compress.allocation.budget import bytes_beside, megabytes
from compress.allocation.predictions import divergence
from compress.apply import apply
from compress.inputs.calibration import Batches
from compress.linear import sharing_copy
from compress.plan import plan
from compress.recover.distil import Distil
from compress.result import Result
from compress.search.caches import (
    FULL,
    PLACE,
    SCORED,
    CacheChoices,
    Caches,
    CacheTimer,
)
from compress.search.choices import search_method
from compress.search.drops import dropping, kinds_of
from compress.search.library import (
    LEAST,
    ORIGINAL,
    PHASES,
    Library,
    Timer,
    Times,
    check_library,
    measure_library,
    measure_times,
    same_choices,
)
from compress.search.program import NAMES, Costs, LayersProgram
from compress.search.wishes import Wishes
from compress.walk.capture import device_of
from compress.walk.experts import is_fused_experts
from compress.walk.finite import NotFinite
from compress.weights.mixed import Mixed
from eval.record.search import CLOSE, PROMPT, SearchPoint, SearchRecord, SearchRound
from kernels.support.modes import evaluating
from kernels.support.positions import positions

VERIFIED = 4  # windows on which the divergence of a whole model is measured
ROUNDS = 3
TINY = 1e-9  # the least divergence that counts, nats per token
POINTS = 12  # of the front
NEAR = 2.0  # a model with one choice everywhere is made if it is predicted to be at most this much worse
TRAINED = 3  # models that are trained, and ranked again
PLACES = ("blocks", "embedding")


@dataclass(repr=False)
class Fit:
    """The model that was found.

    Attributes:
        result: of `apply`; its model is the compressed one.
        record: what was asked, predicted and measured, for the record and the page.
    """

    result: Result
    record: SearchRecord
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def model(self) -> PreTrainedModel:
        """The compressed model."""
        return self.result.model

    def found(self) -> SearchRecord:
        """For the run record."""
        return self.record

    def __repr__(self) -> str:
        return "\n".join(self.record.sentences())

    def _repr_html_(self) -> str:
        return "".join(f"<p>{escape(sentence)}</p>" for sentence in self.record.sentences())


def fit(
    model: PreTrainedModel,
    batches: Sequence[Tensor],
    wishes: Wishes,
    *,
    method: Mixed | None = None,
    timer: Timer | None = None,
    minutes: float = 0.0,
    drops: str = "",
    caches: CacheChoices | None = None,
    cache_timer: CacheTimer | None = None,
    device: str | None = None,
    work_path: str | Path | None = None,
) -> Fit:
    """Find the best choice of every layer within the wishes, compress a copy of the model, and measure it.

    If a speed is limited or optimised, models in which all linears have one choice are timed, and with `drops` models
    without a quarter of these parts; a layer's time is its share of the weights. The losses of all choices are measured
    layer by layer and are assumed to add up. The divergence of the chosen whole model is measured on other text, and
    its speed if speeds matter; if it is beyond a limit, the search is repeated with predictions in proportion to what
    was measured, at most three times in all. The best model with one choice for all linears, and one for the embedding
    and the head, is made as well if it may be as good, and wins if it is better.

    With `caches`, the cache of sequences of a given length counts among the bytes, and its method is chosen together
    with those of the weights. Speeds of decoding are those behind this context (prompts are timed as without `caches`,
    with the full cache), and the divergence is measured on the
    tokens behind it, with the compressed weights and the chosen cache together.

    Args:
        model: a decoder of transformers; it is not changed.
        batches: calibration tokens, as for `apply`; with `caches`, of `calibration`, which has further text.
        method: the choices, of `search_method`; None: a standard set.
        timer: times models that decode, in turns (`eval.speed.speed.timer`); needed if a speed is limited or
            optimised, and not used otherwise.
        minutes: if above 0, the best models that keep the limits, at most three, are made again and trained so long by
            `distil`, on other text than their divergence is measured on, and ranked again.
        drops: parts of blocks that may be left out, too: "attention", "mlp", "attention, mlp", or "" for none.
        caches: of `cache_choices`; None: the cache is not counted.
        cache_timer: times caches behind a context; needed with `caches` if a speed is limited or optimised.
        device, work_path: as for `apply`. Measured losses and times of weights are kept in the user's cache folder.

    Raises:
        ValueError: before any work, if the model or a choice cannot be handled; after the measurements, if no choices
            keep all limits: the message says for each limit how near one can come.
    """
    if wishes.timed and timer is None:
        raise ValueError(
            "`timer` must be given for limits of speed (`min_decode`, `min_prefill`, `max_ttft`), or to optimise it"
        )
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError("`fit` times models, and several processes would find different choices: run one process")
    if wishes.timed and caches and cache_timer is None:
        raise ValueError("`cache_timer` must be given for limits of speed with `caches`, or to optimise it")
    _check_prompt(model, wishes, timer)
    method = method or search_method()
    how: dict[str, Any] = {"device": device, "work_path": work_path}
    training, kinds = training_of(minutes), kinds_of(drops)
    check_library(model, batches, method, most=wishes.max_bytes, device=device, kinds=kinds)
    if training:
        plan([*dropping(kinds), method, training], model, batches, device=device)
    texts = None
    if caches:
        if "attention" in kinds:
            raise ValueError(
                f"`drops` (={drops!r}) and `context` (={caches.context}): a dropped attention layer keeps no cache, "
                "which the sizes and times of caches do not know; leave out one of them, or take drops=mlp"
            )
        caches.check(model, wishes.timed)
        texts, batches = _texts_of(batches, caches)
    times = _times(model, method, wishes, timer, {"batches": batches, "kinds": kinds, "device": device})
    if times and not kinds and not caches:  # which may make a model faster than any with one choice
        _check_speeds(method, model, wishes, times)
    held = Caches.measure(model, caches, texts, cache_timer if times else None) if caches and texts else None
    if held and wishes.max_bytes and not kinds:
        _check_bytes(method.smallest_size(model), held, wishes.max_bytes)
    library = measure_library(model, batches, method, device=device, kinds=kinds)
    return _Search(model, batches, wishes, library, times, timer, training, held, how).run()


def _check_prompt(model: PreTrainedModel, wishes: Wishes, timer: Timer | None) -> None:
    """Raise ValueError if prompts of this length cannot be timed, or, with a limit of the time until the first token,
    are not timed. The standard length is shortened for models with few positions, where no time depends on it."""
    limited = wishes.max_ttft is not None
    if (limited or (wishes.timed and wishes.prompt > PROMPT)) and wishes.prompt >= (most := positions(model)):
        raise ValueError(f"`prompt` (={wishes.prompt}) must be less than {most}, the positions of the model")
    timed = getattr(timer, "keywords", {}).get("prompt_tokens", wishes.prompt)
    if limited and timed != wishes.prompt:
        raise ValueError(f"`timer` times prompts of {timed} tokens, and `prompt` (={wishes.prompt}) is another length")


def _check_bytes(weights: int, held: Caches, most: float) -> None:
    """Raise ValueError if the smallest weights and the smallest cache take more bytes."""
    cache = min(costs.bytes for costs in held.costs.values())
    if weights + cache > most:
        raise ValueError(
            f"`max_bytes` (={most:.0f}) cannot be kept: with the smallest of `choices` the whole model takes "
            f"{megabytes(weights)}, and the smallest of `caches` {megabytes(cache)}"
        )


def _texts_of(batches: Sequence[Tensor], caches: CacheChoices) -> tuple[list[Tensor], Batches]:
    """Texts of a context and some tokens behind it, and the batches without them."""
    if not isinstance(batches, Batches):
        raise ValueError("`batches` must come from `calibration` for a search with `caches`, which reads further text")
    try:
        return batches.texts(caches.context + SCORED, VERIFIED)
    except ValueError as error:
        raise ValueError(f"`context` (={caches.context}): {error}") from error


def training_of(minutes: float) -> Distil | None:
    """The training of the best models, None for no minutes.

    Raises:
        ValueError: it is no number of minutes.
    """
    return Distil(minutes=minutes) if minutes else None


def _times(
    model: PreTrainedModel, method: Mixed, wishes: Wishes, timer: Timer | None, more: dict[str, Any]
) -> Times | None:
    """The times of all choices, before losses are measured, which takes longer; more: arguments of `measure_times`.

    Raises:
        ValueError: a limit of speed for a model with experts.
    """
    if any(map(is_fused_experts, model.modules())):  # a step reads few of its experts, and time is not their share
        if wishes.timed:
            raise ValueError(
                "the layers of a model with experts are not timed, so that no speed can be limited or optimised: leave "
                "out `min_decode`, `min_prefill` and `max_ttft`, and give only one of `max_bytes` and `max_kl`"
            )
        return None
    if timer is None or not wishes.timed:
        return None
    return measure_times(method, model, timer, **more)


def _check_speeds(method: Mixed, model: PreTrainedModel, wishes: Wishes, times: Times) -> None:
    """Raise ValueError if no choices for the weights keep a limit of speed."""
    if not same_choices(method, model):  # a mixture may be faster than any model with one choice
        return
    for place, of in enumerate((times.decode, times.prefill)):
        rate = wishes.least_rate(place, times.original[place])
        if rate is None:
            continue
        parts = [[of[t] - 1 for t, one in method.methods.items() if where in one.places] for where in PLACES]
        fastest = times.original[place] / max(1 + sum(min(part, default=0.0) for part in parts), LEAST)
        if rate > fastest:
            raise ValueError(
                f"{wishes.asked_rate(PHASES[place], rate)} cannot be kept: the fastest choices reach about "
                f"{fastest:.0f} tokens/s here, and the original {times.original[place]:.0f}"
            )


class _Search:
    """Rounds of solving the program and measuring what was chosen."""

    def __init__(
        self,
        model: PreTrainedModel,
        batches: Sequence[Tensor],
        wishes: Wishes,
        library: Library,
        times: Times | None,
        timer: Timer | None,
        training: Distil | None,
        caches: Caches | None,
        how: Mapping[str, Any],
    ) -> None:
        self.model, self.batches, self.wishes, self.library, self.timer, self.how = (
            model, batches, wishes, library, timer, how,
        )  # fmt: skip
        self.training, self.caches = training, caches
        self.times = caches.times(times) if caches else times
        layers = library.costs(self.times) | ({PLACE: caches.costs} if caches else {})
        self.program = LayersProgram(layers, library.tied)
        self.factor = 1.0  # measured divergence of a whole model / sum of its layers' losses
        self.slower = 1.0, 1.0  # measured time of a whole model / predicted time, of decoding and of prompts
        further = getattr(batches, "further", lambda count: [])(VERIFIED)
        self.windows, self.held_out = further or list(batches[-VERIFIED:]), bool(further or caches)
        self.expected = caches.expected if caches else self._logits(model, FULL)
        self.rounds: list[SearchRound] = []
        self.made: list[tuple[Result, dict[str, str]]] = []

    def run(self) -> Fit:
        for number in tqdm(range(ROUNDS), desc="fit", unit="round"):
            chosen = self._choose()
            if self._is_made(chosen):
                break
            one = self._make(chosen)
            if one is None or (self._keeps(one) and (number > 0 or self._tight(one))):
                break
        kinds = [*self.library.kinds(), [PLACE] if self.caches else []]
        uniform = self.program.uniform(self._aim, self._limits(), kinds)
        if uniform and self._is_made(uniform):
            index = next(i for i, (_, before) in enumerate(self.made) if before == uniform)
            self.rounds[index] = replace(self.rounds[index], uniform=True)
        elif uniform and self._near(uniform):
            self._make(uniform, uniform=True)
        if self.training:
            for index in self._ranked()[:TRAINED]:
                self._train(index, self.training)
        return Fit(*self._best(uniform))

    @property
    def _aim(self) -> str:
        return self.wishes.minimises

    def _is_made(self, chosen: dict[str, str]) -> bool:
        return any(chosen == before for _, before in self.made)

    def _choose(self) -> dict[str, str]:
        """The best choices within the limits; if corrected limits cannot be kept, those nearest to the broken one."""
        limits = self._limits()
        chosen = self.program.best(self._aim, limits)
        if chosen is None and not self.made:
            raise ValueError(self._impossible())
        if chosen is None:
            name = max(self._excess(self.rounds[-1]).items(), key=lambda one: one[1])[0]
            chosen = self.program.best(name, {other: limit for other, limit in limits.items() if other != name})
        return chosen or self.made[-1][1]

    def _make(self, chosen: dict[str, str], *, uniform: bool = False) -> SearchRound | None:
        """Compress a copy of the model so, measure it, and correct the predictions by what it reached; None if its
        predictions are not finite."""
        result = apply(self.library.recipe(chosen, self.model), sharing_copy(self.model), self.batches, **self.how)
        choices = ", ".join(dict.fromkeys(chosen.values()))
        kl = self._divergence(result, chosen, f"each of its choices alone gives finite ones: {choices}")
        if kl is None:
            return None
        rates: tuple[float | None, float | None] = None, None
        costs, point = self.program.of(chosen), self._point(chosen)
        factor = self.factor
        if self.timer and self.times:
            found = dict(self.timer({ORIGINAL: self.model, "chosen": result.model}))
            if self.caches and (behind := self.caches.speeds(self.model, result.model, chosen[PLACE])):
                found = {name: (rate, found[name][1]) for name, rate in zip(found, behind, strict=True)}
            ratios = [after / before for before, after in zip(found[ORIGINAL], found["chosen"], strict=True)]
            if self.wishes.times:  # the limit is a ratio, and so is what was measured
                rates = tuple(rate * ratio for rate, ratio in zip(self.times.original, ratios, strict=True))
            else:
                rates = found["chosen"]
            predicted = max(1 + costs.decode, LEAST), max(1 + costs.prefill, LEAST)  # times; the original's is 1
            if not uniform:
                self.slower = tuple(1 / ratio / time for ratio, time in zip(ratios, predicted, strict=True))
        if not uniform:
            self.factor = max(kl, TINY) / max(costs.loss, TINY)
        self.rounds.append(SearchRound(point, factor, kl, self._bytes(result, chosen), *rates, uniform=uniform))
        self.made.append((result, chosen))
        return self.rounds[-1]

    def _train(self, index: int, training: Distil) -> None:
        """Make one of the models again, and train it on text without the windows on which it is measured."""
        before, (_, chosen) = self.rounds[index], self.made[index]
        text = self.batches.beyond(len(self.windows)) if hasattr(self.batches, "beyond") else self.batches
        recipe = [*self.library.recipe(chosen, self.model), training]
        result = apply(recipe, sharing_copy(self.model), text, **self.how)
        kl = self._divergence(result, chosen, f"they were before `minutes` (={training.minutes:g}) of training")
        if kl is None:
            return
        size = self._bytes(result, chosen)
        self.rounds.append(replace(before, divergence=kl, bytes=size, minutes=training.minutes))
        self.made.append((result, chosen))

    def _divergence(self, result: Result, chosen: Mapping[str, str], why: str) -> float | None:
        """Of a model that was made, in nats per token; None, with a warning, if it is not finite, and the search has
        other models. why: what is known of the cause.

        Raises:
            NotFinite: it is not finite, and there are no other models.
        """
        kl = divergence(self.expected, self._logits(result.model, chosen.get(PLACE, FULL)))
        if isfinite(kl):
            return kl
        said = f"the predictions of a model that was made are not finite (divergence {kl}); {why}"
        if not self.made:
            raise NotFinite(said)
        warnings.warn(f"{said}. It is left out", stacklevel=2)
        return None

    def _bytes(self, result: Result, chosen: Mapping[str, str]) -> int:
        """The bytes of a model that was made, and of its cache."""
        return bytes_beside(result.model, {}) + (round(self.caches.costs[chosen[PLACE]].bytes) if self.caches else 0)

    def _excess(self, one: SearchRound) -> dict[str, float]:
        """How far a model is beyond each limit that predictions can miss, as a logarithm; below 0: it is within."""
        excess = {}
        if self.wishes.max_kl is not None:
            excess["loss"] = log(max(one.divergence, TINY) / self.wishes.max_kl)
        for name, least in self._least_rates().items():
            if reached := getattr(one, name):
                excess[name] = log(least / reached)
        return excess

    def _keeps(self, one: SearchRound) -> bool:
        return all(beyond <= log(1 + CLOSE) for beyond in self._excess(one).values())

    def _tight(self, one: SearchRound) -> bool:
        """Whether nothing can be gained by a corrected limit of the divergence, which is nearly used up."""
        return self._aim == "loss" or self._excess(one).get("loss", 0.0) > log(0.9)

    def _near(self, uniform: dict[str, str]) -> bool:
        """Whether a model with one choice everywhere may be as good as the best that was made."""
        value = {"loss": lambda p: p.loss, "bytes": lambda p: p.bytes, "decode": lambda p: 1 / (p.decode or 1)}
        made = [chosen for one, (_, chosen) in zip(self.rounds, self.made, strict=True) if self._keeps(one)]
        best = min(value[self._aim](self._point(chosen)) for chosen in made or [chosen for _, chosen in self.made])
        return value[self._aim](self._point(uniform)) <= NEAR * best

    def _ranked(self) -> list[int]:
        """The numbers of the models that were made, the best first: of those that keep the limits, or, if none does, of
        all by how near they come."""
        rounds = self.rounds
        within = [i for i, one in enumerate(rounds) if self._keeps(one)]
        if not within:
            return sorted(range(len(rounds)), key=lambda i: max(self._excess(rounds[i]).values(), default=0.0))
        aim = {"loss": lambda one: 0, "bytes": lambda one: one.point.bytes,
               "decode": lambda one: -(one.decode or one.point.decode or 0)}[self._aim]  # fmt: skip
        return sorted(within, key=lambda i: (aim(rounds[i]), rounds[i].divergence))

    def _best(self, uniform: dict[str, str] | None) -> tuple[Result, SearchRecord]:
        rounds, index = self.rounds, self._ranked()[0]
        result, chosen = self.made[index]
        record = SearchRecord(
            max_bytes=self.wishes.max_bytes,
            min_decode=self._least_rates().get("decode"),
            min_prefill=self._least_rates().get("prefill"),
            max_ttft=self.wishes.max_ttft,
            prompt=self.wishes.prompt,
            max_kl=self.wishes.max_kl,
            minimised=self._aim,
            rounds=tuple(rounds),
            kept=index,
            front=tuple(self._front(rounds[index].factor)),
            choices=tuple(self.library.texts),
            decode_ratio=self._ratios("decode"),
            prefill_ratio=self._ratios("prefill"),
            original=None if self.times is None else self.times.original,
            timed_earlier=bool(self.times and self.times.earlier),
            held_out=self.held_out,
            layers=len(self.library.layers),
            used=_counts(self.library, chosen),
            uniform=None if uniform is None else _in_words(uniform),
            uniform_point=None if uniform is None else self._point(uniform),
            picked=tuple(self.library.picked(name, text) for name, text in chosen.items() if name != PLACE),
            caches=self.caches.record(chosen[PLACE]) if self.caches else None,
        )
        return self.caches.attach(result, chosen[PLACE]) if self.caches else result, record

    def _ratios(self, phase: str) -> dict[str, float]:
        """How many times as fast as the original a model is in which all layers have a choice."""
        times = {} if self.times is None else getattr(self.times, phase)
        return {text: 1 / time for text, time in times.items() if text in self.library.method.methods}

    def _limits(self) -> dict[str, float]:
        """The largest sums of the program."""
        wishes, limits = self.wishes, dict[str, float]()
        if wishes.max_bytes is not None:
            limits["bytes"] = wishes.max_bytes - self.library.beside
        if wishes.max_kl is not None:
            limits["loss"] = wishes.max_kl / self.factor
        for name, least in self._least_rates().items():
            place = PHASES.index(name)
            limits[name] = self.times.original[place] / least / self.slower[place] - 1
        return limits

    def _least_rates(self) -> dict[str, float]:
        """The least tokens per second of the phases whose speed is limited."""
        if self.times is None:
            return {}
        rates = {phase: self.wishes.least_rate(i, self.times.original[i]) for i, phase in enumerate(PHASES)}
        return {phase: rate for phase, rate in rates.items() if rate is not None}

    def _point(self, chosen: Mapping[str, str]) -> SearchPoint:
        return self._as_point(self.program.of(chosen), self.factor)

    def _as_point(self, costs: Costs, factor: float) -> SearchPoint:
        rates = [None, None]
        if self.times is not None:
            more = costs.decode, costs.prefill
            rates = [
                rate / max(1 + m, LEAST) / slower
                for rate, m, slower in zip(self.times.original, more, self.slower, strict=True)
            ]
        return SearchPoint(round(costs.bytes) + self.library.beside, costs.loss * factor, *rates)

    def _front(self, factor: float) -> list[SearchPoint]:
        """The least losses for sizes from the smallest to the largest, within the limits of speed, times a factor."""
        limits = {name: limit for name, limit in self._limits().items() if name in ("decode", "prefill")}
        return [self._as_point(costs, factor) for costs in self.program.front("loss", "bytes", limits, POINTS)]

    def _impossible(self) -> str:
        """For each limit, how near one can come while the others are kept."""
        limits, said = self._limits(), []
        names = {name: self.wishes.named(name) for name in NAMES}
        for name in limits:
            others = {other: limit for other, limit in limits.items() if other != name}
            best = self.program.best(name, others)
            if best is None:
                said.append(f"the other limits cannot be kept even without `{names[name]}`")
                continue
            point = self._point(best)
            reached = {
                "bytes": f"{point.bytes / 1e6:.1f} MB",
                "loss": f"{point.loss:.4f} nats per token",
                "decode": f"{point.decode or 0:.0f} tokens/s",
                "prefill": self._prompt_in_words(point.prefill or TINY),
            }
            said.append(f"`{names[name]}` can be {reached[name]} at best if the other limits are kept")
        return f"no choices keep all limits: {'; '.join(said)}"

    def _prompt_in_words(self, rate: float) -> str:
        """The speed of reading a prompt, as the user limits it."""
        return f"{rate:.0f} tokens/s" if self.wishes.max_ttft is None else f"{1e3 * self.wishes.prompt / rate:.1f} ms"

    @torch.no_grad()
    def _logits(self, model: PreTrainedModel, cache: str) -> list[Tensor]:
        """The predictions that are compared; cache: the name of its choice."""
        if self.caches:
            return self.caches.logits(model, cache)
        device = device_of(model)
        with evaluating(model):
            return [model(window.to(device), use_cache=False).logits.cpu() for window in self.windows]


def _in_words(uniform: Mapping[str, str]) -> str:
    """The choices of a model with one for all layers of a kind."""
    named = (f"cache: {text}" if name == PLACE else text for name, text in uniform.items())
    return ", ".join(dict.fromkeys(named))


def _counts(library: Library, chosen: Mapping[str, str]) -> dict[str, int]:
    """By choice, the number of linears that have it."""
    counts = dict.fromkeys(library.texts, 0)
    for name, text in chosen.items():
        if name == PLACE:
            continue
        counts[text] += len(library.layers[name].members)
    return counts
