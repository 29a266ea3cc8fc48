"""The recipes that the notebook on KV caches compares, as variants of a scored model and of a timed model."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from torch import nn
from transformers import Cache, PreTrainedTokenizerBase

from compress import METHODS, Result
from compress.inputs.corpus import load_text
from compress.kv import CacheBatch, CompressedCache, attached, left_alone
from compress.kv.attach import slots_of
from compress.kv.policy import CacheMethod
from compress.kv.timed import FilledCache, check_timed, check_timed_model
from compress.method import Method, settle
from compress.plan import check_recipe
from compress.recipe import parse_recipe, parse_recipes
from compress.search.caches import CacheTimer, in_16_bits
from compress.walk.identity import code_sha256, tokens_sha256, weights_sha256
from eval.contexts.answers import LongContextScores
from eval.contexts.haystack import NOISE, ContextSample, samples
from eval.contexts.long_context import score_long_context
from eval.evaluate import Scores
from eval.record.files import write_whole
from eval.record.measured import CacheMeasurements
from eval.record.reading import read_json
from eval.record.speed import CacheSpeed
from eval.speed.cache_speed import FULL, measure_cache_speed
from kernels.support.errors import check_positive
from kernels.support.positions import positions
from notebooks.study.strengths import recipes_at

MAIN = "compressed"


@dataclass(frozen=True)
class CacheRecipes:
    """The recipes of a run: the main one, others that are timed with it, and policies at several budgets.

    recipes: {name: methods}, "compressed" first; timed: names of the timed recipes; curves: {policy with {} for its
    budget: [(budget, name)]}.
    """

    recipes: dict[str, list[Method]]
    timed: list[str]
    curves: dict[str, list[tuple[str, str]]]

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<li><b>{escape(name)}</b>: {escape(', '.join(map(str, of)))}</li>" for name, of in self.recipes.items()
        )
        return f"<p>{len(self.recipes)} recipes</p><ul>{rows}</ul>"


@dataclass(frozen=True)
class Haystacks:
    """The contexts of a run; shows the end of one context and its question in Jupyter."""

    samples: list[ContextSample]
    shown: str

    def _repr_html_(self) -> str:
        return f"<p>{len(self.samples)} contexts. The first:</p><blockquote>{escape(self.shown)}</blockquote>"


def haystacks(
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[str],
    *,
    haystack: str,
    lengths: Sequence[int],
    count: int,
    depths: Sequence[float] = (),
    seed: int = 0,
    beginning: Sequence[int] = (),
) -> Haystacks:
    """`eval.contexts.haystack.samples` of every task and length.

    Args:
        haystack: "noise", or a corpus by `compress.inputs.corpus.load_text`'s names.
    """
    documents = NOISE if haystack == "noise" else load_text(haystack, "evaluation")
    made = [
        sample
        for task in tasks
        for length in lengths
        for sample in samples(
            tokenizer,
            task,
            documents=documents,
            length=length,
            count=count,
            depths=list(depths) or None,
            seed=seed,
            beginning=beginning,
        )
    ]
    if not made:
        raise ValueError(f"`tasks` (={list(tasks)}) and `lengths` (={list(lengths)}) must each hold at least one value")
    question = made[0].questions[0]
    begin, end = question.needles[0] if question.needles else (0, 40)
    near = tokenizer.decode(made[0].context[max(0, begin - 40) : end + 40])
    return Haystacks(made, f"… {near} …{tokenizer.decode(question.ask)} →{tokenizer.decode(question.answer)}")


def cache_recipes(recipe: str, compare: str = "", curves: str = "", also: Sequence[type[Method]] = ()) -> CacheRecipes:
    """The recipes of these texts, checked.

    Args:
        recipe: the main recipe of the run, such as "snapkv(budget=0.25), kv_int(bits=4)".
        compare: further recipes, separated by semicolons, which are timed, too.
        curves: policies at several budgets: "snapkv(budget={0.5, 0.25}); kvzip(budget={0.5, 0.25})"; baseline policies
            (`Policy.reference`) that are not among them are added, at the budgets of the first policy.
        also: further methods that these texts may name, beside METHODS.

    Raises:
        ValueError: a method is not of the cache, or `parse_recipe` or `recipes_at` refuses a text.
    """
    main, others = parse_recipe(recipe, also=also), parse_recipes(compare, also)
    if taken := {"baseline", FULL, MAIN} & set(others):
        raise ValueError(
            f"`compare` (={compare!r}): {taken.pop()!r} is what another cache of the run is called; name it differently"
        )
    lines = recipes_at(curves, also)
    policies = [[policy for _, methods in line if (policy := slots_of(methods)[0])] for line in lines.values()]
    if first := next(filter(None, policies), None):
        budgets = ", ".join(dict.fromkeys(repr(policy.budget) for policy in first))
        there = {method.name for line in lines.values() for _, methods in line for method in methods}
        for name in (name for name, method in METHODS.items() if getattr(method, "reference", False)):
            lines |= {} if name in there else recipes_at(f"{name}(budget={{{budgets}}})")
    recipes = {MAIN: main, **others}
    points: dict[str, list[tuple[str, str]]] = {}
    for text, line in lines.items():
        for value, methods in line:  # a recipe that exists already is not scored twice
            name = next((name for name, of in recipes.items() if of == methods), text.replace("{}", value))
            recipes[name] = methods
            points.setdefault(text, []).append((value, name))
    for name, methods in recipes.items():
        settle(methods)
        if foreign := [m for m in methods if not isinstance(m, CacheMethod)]:
            raise ValueError(
                f"`recipe` (={name!r}): {foreign[0]} is no method of the cache; apply it to the model first"
            )
    return CacheRecipes(recipes, [MAIN, *others], points)


class Finished(MutableMapping[tuple[int, str], dict[str, Any]]):
    """JSON by number and recipe, in a folder for each recipe; every file is written completely or not at all.

    Args:
        recipes: {name: the folder's name}.
    """

    def __init__(self, folder: Path, recipes: Mapping[str, str]) -> None:
        self.folder, self.recipes = folder, recipes

    def _path(self, of: tuple[int, str]) -> Path:
        return self.folder / self.recipes[of[1]] / f"{of[0]}.json"

    def __getitem__(self, of: tuple[int, str]) -> dict[str, Any]:
        if not (content := read_json(self._path(of))):  # absent, or unreadable after a power loss
            raise KeyError(of)
        return content

    def __setitem__(self, of: tuple[int, str], found: dict[str, Any]) -> None:
        write_whole(json.dumps(found), self._path(of))

    def __delitem__(self, of: tuple[int, str]) -> None:
        self._path(of).unlink()

    def __iter__(self) -> Iterator[tuple[int, str]]:
        for name, folder in self.recipes.items():
            yield from ((int(path.stem), name) for path in (self.folder / folder).glob("*.json"))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def score_caches(
    model: nn.Module,
    recipes: CacheRecipes,
    samples: Sequence[ContextSample],
    visibilities: Sequence[str],
    work_path: str | None = None,
    *,
    write_tokens: int = 0,
) -> LongContextScores:
    """`eval.contexts.long_context.score_long_context` of every recipe.

    Args:
        work_path: folder that keeps the answers of every recipe's cache to each context, so that a killed run continues
            there, and a run with one more recipe computes only that recipe.
        write_tokens: most tokens that are written behind every cache after the first question of a context; 0: none.
    """

    def way(methods: Sequence[Method]) -> Callable[[CompressedCache], Cache]:
        return lambda cache: cache.compressed(*slots_of(methods))

    finished = None
    if work_path:
        asked = [
            tokens_sha256([s.context[None], *(t[None] for q in s.questions for t in (q.ask, q.answer))])
            for s in samples
        ]
        about = [weights_sha256(model), str(model.dtype), asked, list(visibilities), write_tokens, code_sha256()]
        recipes_by_name = {FULL: [], **recipes.recipes}
        finished = Finished(
            Path(work_path) / "long_context" / _digest(about),
            {name: _digest([name == FULL, *map(repr, methods)]) for name, methods in recipes_by_name.items()},
        )
    with attached(model) as attachment:
        return score_long_context(
            model,
            samples,
            observer=lambda: attachment.cache(observes=True, traces=True),
            finished=finished,
            variants={name: way(methods) for name, methods in recipes.recipes.items()},
            visibilities=visibilities,
            batched=CacheBatch,
            write_tokens=write_tokens,
        )


def _digest(about: Sequence[Any]) -> str:
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]


def time_caches(
    model: nn.Module, recipes: CacheRecipes, contexts: Sequence[int], *, new_tokens: int, rounds: int
) -> CacheSpeed | None:
    """The speeds of the timed recipes; None without contexts."""
    if not contexts:
        return None
    timed = {name: recipes.recipes[name] for name in recipes.timed}
    return _in_turns(model, timed, contexts, new_tokens=new_tokens, rounds=rounds)


def cache_timer(rounds: int, new_tokens: int = 8) -> CacheTimer:
    """For `compress.fit`: tokens per second of decoding one sequence behind a context, by cache.

    Raises:
        ValueError: the number of rounds is below 1.
    """
    check_positive(search_rounds=rounds)

    def rates(model: nn.Module, caches: Mapping[str, Sequence[Method]], context: int) -> dict[str, float]:
        others = {name: methods for name, methods in caches.items() if name != FULL}
        found = _in_turns(model, others, [context], new_tokens=new_tokens, rounds=rounds).tokens_per_s
        return {name: found[name][context][0] for name in caches}

    return rates


def _in_turns(
    model: nn.Module, recipes: Mapping[str, Sequence[Method]], contexts: Sequence[int], *, new_tokens: int, rounds: int
) -> CacheSpeed:
    """`eval.speed.cache_speed.measure_cache_speed` of these recipes and the full cache, on a 16-bit copy."""
    capacity = max(contexts)

    def make(methods: Sequence[Method]) -> Callable[[], FilledCache]:
        return lambda: FilledCache(copy, capacity, *slots_of(methods))

    variants = {FULL: make([]), **{name: make(methods) for name, methods in recipes.items()}}
    with in_16_bits(model) as copy:
        return measure_cache_speed(copy, variants, contexts, new_tokens=new_tokens, rounds=rounds)


def check_caches(
    model: nn.Module, recipes: CacheRecipes, contexts: Sequence[int], lengths: Sequence[int], write_tokens: int = 0
) -> None:
    """Raise ValueError, before any work, if the model cannot be scored or timed with these settings."""
    most = positions(model)
    for name, values in (("speed_contexts", contexts), ("lengths", lengths)):
        if wrong := [n for n in values if not 1 <= n < most]:
            raise ValueError(
                f"`{name}` (={list(values)}): {wrong[0]} must lie between 1 and {most - 1}, the model's positions"
            )
    left = most - max(lengths, default=0)
    if type(write_tokens) is not int or not 0 <= write_tokens < left:
        raise ValueError(
            f"`write_tokens` (={write_tokens!r}) must be an integer from 0, which writes nothing, to {left - 1}, the "
            f"model's positions behind the longest of `lengths` (={list(lengths)})"
        )
    for methods in recipes.recipes.values():
        check_recipe(methods, model)
    if contexts:
        check_timed_model(model)
    for name in recipes.timed if contexts else ():
        _, storage, reading, projecting = slots_of(recipes.recipes[name])
        check_timed(storage, projecting, reading)


def cache_scores(model: nn.Module, found: LongContextScores, speed: CacheSpeed | None) -> Scores:
    """Scores and speeds in the form of the record: metrics by model, with the full cache as "baseline"."""
    metrics = {"baseline" if name == FULL else name: values for name, values in found.metrics().items()}
    kernels: dict[str, list[str]] = {}
    if speed is not None:
        kernels = {op: list(used) for op, used in speed.kernels.items()}
        for name, by_context in speed.tokens_per_s.items():
            own = metrics["baseline" if name == FULL else name]
            own |= {f"decode_tokens_per_s_{context}": value[0] for context, value in by_context.items()}
    return Scores(
        metrics,
        kernels=kernels,
        device=model.device.type,
        dtype=str(model.dtype).removeprefix("torch."),
        deploy_dtype="bfloat16",
    )


def cache_found(
    model: nn.Module, recipes: CacheRecipes, found: LongContextScores, speed: CacheSpeed | None
) -> CacheMeasurements:
    """The content of the record's `cache`."""
    return found.found(
        curves=recipes.curves,
        references=_references(recipes),
        timed=tuple(recipes.timed),
        left_alone=left_alone(model),
        speed=speed,
    )


def _references(recipes: CacheRecipes) -> tuple[str, ...]:
    """Curves of the baseline policies."""
    policies = {text: slots_of(recipes.recipes[points[0][1]])[0] for text, points in recipes.curves.items()}
    return tuple(text for text, policy in policies.items() if policy is not None and policy.reference)


def results_of(result: Result, recipes: CacheRecipes) -> dict[str, Result]:
    """A result for every recipe but the main one, for the record."""
    return {
        name: dataclasses.replace(result, recipe=methods, asked=methods, notes=[], layers=[])
        for name, methods in recipes.recipes.items()
        if name != MAIN
    }
