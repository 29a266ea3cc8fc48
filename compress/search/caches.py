"""Caches among the choices of a search: their bytes, and what is lost behind a context."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import isfinite
from statistics import fmean

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from compress.allocation.predictions import divergence
from compress.kv import CompressedCache, attach, attached
from compress.kv.attach import check_attach, slots_of
from compress.kv.policy import CacheMethod
from compress.kv.timed import check_sized, check_timed_model
from compress.linear import sharing_copy
from compress.method import settle
from compress.recipe import parse_recipes
from compress.result import Result
from compress.search.library import Times
from compress.search.program import Costs
from compress.walk.capture import device_of
from eval.record.search import SearchCaches
from kernels.linear import fast_linear
from kernels.support.deploy import cast
from kernels.support.errors import check_positive
from kernels.support.modes import evaluating
from kernels.support.positions import positions

PLACE = "cache"  # the name of the cache among the layers of a search
FULL = "full"  # the name of the cache in 16 bits
STANDARD = "standard"
STANDARD_CACHES = (
    "float8: kv_fp8; 8 bits: kv_int(bits=8); 4 bits: kv_int(bits=4, rotate_keys=True); "
    "4 bits of half: kvzip(budget=0.5, piece=256), kv_int(bits=4, rotate_keys=True)"  # short pieces need little room
)
SCORED = 128  # tokens behind each context on which predictions are compared

# A model, its caches by name, and a number of tokens: {name: tokens per second of decoding behind so many tokens}.
CacheTimer = Callable[[PreTrainedModel, Mapping[str, Sequence[CacheMethod]], int], Mapping[str, float]]


@dataclass(frozen=True)
class CacheChoices:
    """What a search may choose for the cache. methods: by name, the full cache in 16 bits first. context: tokens that
    every sequence has. batch: sequences whose caches count."""

    context: int
    batch: int = 1
    methods: dict[str, list[CacheMethod]] = field(default_factory=lambda: {FULL: []})

    def check(self, model: PreTrainedModel, timed: bool) -> None:
        """Raise ValueError, before any work, if a cache does not fit the model, or, with `timed`, cannot be timed."""
        if self.context + SCORED > (most := positions(model)):
            raise ValueError(
                f"`context` (={self.context}) and {SCORED} tokens behind it need {self.context + SCORED} positions; "
                f"the model has {most}"
            )
        for name, methods in self.methods.items():
            try:
                check_attach(model, methods)
                for method in methods:
                    method.check(model)
            except ValueError as error:
                raise ValueError(f"`caches` ({name}): {error}") from error
        if timed:
            try:
                check_timed_model(model)
            except ValueError as error:
                said = str(error).partition("; leave out")[0]
                raise ValueError(f"{said}; leave out the limit of speed, or `context`") from error


def cache_choices(caches: str = STANDARD, *, context: int, batch: int = 1) -> CacheChoices | None:
    """The caches that parameters of a notebook or a command line name; None if there is no context.

    Args:
        caches: recipes of caches, separated by semicolons, as text for `parse_recipes`, or "standard"; the full cache
            in 16 bits is always among the choices.
        context: tokens of every sequence; 0: the cache is not counted. batch: sequences whose caches count.

    Raises:
        ValueError: a number has no meaning, or a text is no recipe of caches whose size follows from shapes.
    """
    if context < 0:
        raise ValueError(f"`context` (={context}) must be a number of tokens, or 0 for a search without a cache")
    check_positive(batch=batch)
    if batch > 1 and not context:
        raise ValueError(f"`batch` (={batch}) counts sequences of `context` tokens, and `context` is 0: give both")
    caches = STANDARD_CACHES if caches.strip() == STANDARD else caches
    methods: dict[str, list[CacheMethod]] = {FULL: []}
    for name, recipe in (parse_recipes(caches, parameter="caches") if caches.strip() else {}).items():
        if name == FULL:
            raise ValueError(f"`caches` (={caches!r}): {FULL!r} is what the cache in 16 bits is called; name it anew")
        if foreign := [method for method in recipe if not isinstance(method, CacheMethod)]:
            raise ValueError(f"`caches`: {foreign[0]} is not a method of the cache; `choices` takes those of weights")
        try:
            check_sized(settle(recipe))
        except ValueError as error:
            raise ValueError(f"`caches` ({name}): {error}") from error
        methods[name] = recipe
    return CacheChoices(context, batch, methods) if context else None


@dataclass(frozen=True)
class Caches:
    """The choices of the cache with what was measured of them. expected: predictions behind the contexts with the full
    cache and the original weights. rates: tokens per second of decoding behind the context with these weights, by
    cache; None: nothing was timed."""

    asked: CacheChoices
    texts: list[Tensor]
    costs: dict[str, Costs]
    expected: list[Tensor]
    rates: Mapping[str, float] | None
    timer: CacheTimer | None

    @classmethod
    def measure(
        cls, model: PreTrainedModel, asked: CacheChoices, texts: list[Tensor], timer: CacheTimer | None
    ) -> "Caches":
        """Measure all of them; texts: as for `measure_caches`. timer: None if no speed matters."""
        rates = timer(model, asked.methods, asked.context) if timer else None
        for name, rate in (rates or {}).items():
            if not 0 < rate < float("inf"):
                raise ValueError(f"`cache_timer` gave {rate} for {name}, which is no number of tokens per second")
        return cls(asked, texts, *measure_caches(model, asked, texts, rates), rates, timer)

    def times(self, times: Times | None) -> Times | None:
        """The times of weights, relative to the original's time behind the context, which is longer."""
        if times is None or self.rates is None:
            return times
        share = self.rates[FULL] / times.original[0]
        decode = {text: 1 + share * (time - 1) for text, time in times.decode.items()}
        return replace(times, original=(self.rates[FULL], times.original[1]), decode=decode)

    def speeds(self, model: PreTrainedModel, made: PreTrainedModel, chosen: str) -> tuple[float, float] | None:
        """Tokens per second of decoding behind the context: of the original with the full cache, timed before and after
        the other, and of the model that was made with the chosen cache."""
        if self.timer is None:
            return None
        full, own = {FULL: self.asked.methods[FULL]}, {FULL: [], chosen: self.asked.methods[chosen]}
        before = self.timer(model, full, self.asked.context)[FULL]
        found = self.timer(made, own, self.asked.context)[chosen]
        return (before + self.timer(model, full, self.asked.context)[FULL]) / 2, found

    def logits(self, model: PreTrainedModel, name: str) -> list[Tensor]:
        """Predictions behind the contexts, which this cache keeps."""
        return logits_behind(model, self.asked.methods[name], self.texts, self.asked.context)

    def attach(self, result: Result, name: str) -> Result:
        """The result with this cache attached to its model."""
        return with_cache(result, self.asked.methods[name])

    def record(self, chosen: str) -> SearchCaches:
        """For the record of a search."""
        return SearchCaches(
            context=self.asked.context,
            batch=self.asked.batch,
            scored=SCORED,
            texts=len(self.texts),
            chosen=chosen,
            recipes={name: ", ".join(map(str, methods)) for name, methods in self.asked.methods.items()},
            bytes={name: costs.bytes for name, costs in self.costs.items()},
            loss={name: costs.loss for name, costs in self.costs.items()},
            decode_ratio={} if self.rates is None else {n: rate / self.rates[FULL] for n, rate in self.rates.items()},
        )


def with_cache(result: Result, methods: Sequence[CacheMethod]) -> Result:
    """The result with methods of the cache attached to its model, at the end of its recipe."""
    if not methods:
        return result
    attach(result.model, methods)
    notes = [remark for method in methods for remark in method.remarks(result.model.device)]
    recipe, asked = [*result.recipe, *methods], [*result.asked, *methods]
    return replace(result, recipe=recipe, asked=asked, notes=[*result.notes, *notes])


@torch.no_grad()
def measure_caches(
    model: PreTrainedModel,
    asked: CacheChoices,
    texts: Sequence[Tensor],
    rates: Mapping[str, float] | None,
) -> tuple[dict[str, Costs], list[Tensor]]:
    """The bytes of every cache behind the context, and what is lost by it with the weights as they are; and the
    predictions behind the contexts with the full cache, as `logits_behind` gives them.

    For the losses each context is read once for all caches, by one that also keeps all queries, and the inputs of all
    attentions.

    Args:
        texts: [1, context + scored] each: the first `context` tokens are read as a prompt, and predictions for the
            others are compared with those of the full cache.
        rates: tokens per second of decoding behind the context, by cache; None: nothing is timed.
    """
    expected, losses = list[Tensor](), {name: list[float]() for name in asked.methods}
    with evaluating(model), fast_linear(), attached(model) as attachment:
        for text in tqdm(texts, desc="contexts for caches", unit="context"):
            prompt, behind = text.to(device_of(model)).split([asked.context, text.shape[1] - asked.context], 1)
            seen, _ = read_prompt(model, attachment.cache(observes=True), prompt)
            for name, methods in asked.methods.items():
                cache = seen.compressed(*slots_of(methods))
                cache.paused = True
                logits = model(behind, past_key_values=cache, use_cache=True).logits.cpu()
                if name == FULL:  # the first one
                    expected.append(logits)
                losses[name].append(divergence(expected[-1:], [logits]))
    for name, of in losses.items():
        if not all(map(isfinite, of)):
            raise ValueError(f"`caches` ({name}): predictions behind the context are no numbers (losses {of})")
    found = dict[str, Costs]()
    with in_16_bits(model) as small, fast_linear():
        for name, methods in tqdm(asked.methods.items(), desc="sizes of caches", unit="cache"):
            with attached(small, methods) as attachment:
                prompt = texts[0][:, : asked.context].to(small.device)
                cache, token = read_prompt(small, attachment.cache(), prompt)
                small(token, past_key_values=cache, use_cache=True)
            slower = rates[FULL] / rates[name] - 1 if rates else 0.0
            found[name] = Costs(float(asked.batch * cache.nbytes), fmean(losses[name]), slower)
    return found, expected


@torch.no_grad()
def logits_behind(
    model: PreTrainedModel, methods: Sequence[CacheMethod], texts: Sequence[Tensor], context: int
) -> list[Tensor]:
    """Of every text [1, context + scored], logits [1, scored, vocabulary] behind the context, which is kept by these
    methods; without any, in full."""
    texts = [text.to(device_of(model)) for text in texts]
    with evaluating(model), fast_linear(), attached(model, methods) as attachment:
        caches = (read_prompt(model, attachment.cache(), text[:, :context])[0] for text in texts)
        return [
            model(text[:, context:], past_key_values=cache, use_cache=True).logits.cpu()
            for text, cache in zip(texts, caches, strict=True)
        ]


def read_prompt(model: PreTrainedModel, cache: CompressedCache, prompt: Tensor) -> tuple[CompressedCache, Tensor]:
    """Read a prompt [1, n], after which nothing is evicted any more; with the most likely next token [1, 1]."""
    logits = model(prompt, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    cache.paused = True
    return cache, logits[:, -1:].argmax(-1)


@contextmanager
def in_16_bits(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """A 16-bit copy of a model for caches of any methods. Whether they can be attached is checked before the model is
    cast: in 16 bits, rounding alone may differ by more than the check allows."""
    copied = sharing_copy(model)
    with attached(copied):
        yield cast(copied, torch.bfloat16).eval()
