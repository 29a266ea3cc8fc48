"""What is asked of a service that holds many sequences in a memory, and what shapes predict of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from compress import held_out
from compress.inputs.calibration import beginning
from compress.linear import sharing_copy
from compress.method import Method
from compress.recipe import parse_recipes
from compress.search.caches import STANDARD, STANDARD_CACHES
from eval.record.serving import AIMS, Combination, largest
from eval.speed.devices import ceilings_of, check_device_name
from eval.speed.work import CacheLayer, Work
from eval.text.windows import windows
from kernels.harness.roofline import Ceilings
from kernels.support.errors import check_positive
from kernels.support.positions import positions
from kernels.support.units import bytes_of
from notebooks.study import costs


@dataclass(frozen=True)
class Service:
    """What is asked: the memory in bytes, the tokens of each prompt, the sequences that decode together (None: as many
    as fit), what is maximised, the limit of the divergence (None: none), and the recipes of weights and caches by name.
    device: whose speeds are predicted."""

    memory: int
    context: int
    batch: int | None
    aim: str
    max_kl: float | None
    device: str
    weights: dict[str, list[Method]]
    caches: dict[str, list[Method]]

    @property
    def recipes(self) -> dict[str, list[Method]]:
        """All recipes, which a plan checks against the model's shapes."""
        kinds = {"weights": self.weights, "cache": self.caches}
        return {f"{kind} {name}": methods for kind, of in kinds.items() for name, methods in of.items()}

    def _repr_html_(self) -> str:
        return "".join(f"<p>{escape(name)}: {escape(self.text(of))}</p>" for name, of in self.recipes.items())

    @staticmethod
    def text(methods: Sequence[Method]) -> str:
        """The methods in the form of a recipe."""
        return ", ".join(map(str, methods))

    def too_small(self, found: Sequence[Combination]) -> str:
        """Why none of these combinations fits."""
        memory = f"`memory` (={self.memory} bytes)"
        return costs.too_small(found, self.context, memory, f"`batch` (={self.batch})")


def service_of(
    *,
    memory: str,
    context: int,
    batch: int = 0,
    aim: str,
    max_kl: float,
    weights: str,
    caches: str,
    cost_device: str = "here",
) -> Service:
    """What the parameters of a notebook ask; weights and caches in 16 bits are always among the choices.

    Args:
        memory: such as 1GB. batch: sequences that decode together; 0: as many as fit.
        weights, caches: recipes, as text for `parse_recipes`, or "standard"; empty: 16 bits alone.
        cost_device: as for `ceilings_of`.

    Raises:
        ValueError: a value has no meaning, or what a recipe stores does not follow from shapes.
    """
    check_positive(context=context)
    size_of = bytes_of(memory, "memory")
    if size_of is None:
        raise ValueError(f"`memory` (={memory!r}) must be a number of bytes, such as 1GB or 512MiB")
    if batch < 0:
        raise ValueError(f"`batch` (={batch}) must be a number of sequences, or 0 for as many as fit")
    if aim not in AIMS:
        raise ValueError(f"`aim` (={aim!r}) must be one of {', '.join(AIMS)}")
    if not 0 <= max_kl < float("inf"):
        raise ValueError(f"`max_kl` (={max_kl!r}) must be a number above 0, or 0 for no limit")
    check_device_name(cost_device, "cost_device")
    found = []
    for name, text, standard, check in (
        ("weights", weights, costs.WEIGHTS, partial(costs.check_weights, cache_parameter="caches")),
        ("caches", caches, STANDARD_CACHES, costs.check_cache),
    ):
        text = standard if text.strip() == STANDARD else text
        found.append(recipes := parse_recipes(text, parameter=name) if text.strip() else {})
        for label, methods in recipes.items():
            if label == costs.PLAIN:
                raise ValueError(f"`{name}` (={text!r}): {label!r} is what the original is called; name it differently")
            check(label, methods, name)
    if not any(found):
        raise ValueError("`weights` and `caches` are empty, so that there is nothing to choose; standard names a set")
    return Service(size_of, context, batch or None, aim, max_kl or None, cost_device, *found)


def contexts_of(
    tokenizer: PreTrainedTokenizerBase, corpus: str, *, context: int, scored: int, count: int
) -> list[Tensor]:
    """At most `count` windows [1, context + scored] of the evaluation part of a corpus, each with the special tokens of
    the beginning.

    Raises:
        ValueError: the corpus is too short for one.
    """
    check_positive(context=context, scored_tokens=scored, contexts=count)
    ids = held_out(tokenizer, corpus=corpus)
    try:
        cut = windows(ids, window=context + scored, limit=count, beginning=beginning(tokenizer), bos="each")
    except ValueError as error:
        raise ValueError(
            f"`context` (={context}) and `scored_tokens` (={scored}) need {context + scored} tokens; the evaluation "
            f"part of `eval_corpus` (={corpus!r}) has {ids.shape[1]}"
        ) from error
    return [window.tokens for window in cut]


@dataclass(frozen=True)
class Shapes:
    """What shapes say. plain: the work of a step in 16 bits. kept: what a sequence keeps in each cache. step_room:
    bytes for each sequence of a step."""

    found: list[Combination]
    plain: Work
    kept: Mapping[str, tuple[CacheLayer, ...]]
    ceilings: Ceilings
    step_room: int

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{escape(one.weights)}</td><td>{escape(one.cache)}</td><td>{one.sequences:,}</td>"
            f"<td>{one.tokens_per_s:,.0f}</td></tr>"
            for one in self.found
        )
        head = "<th>weights</th><th>cache</th><th>sequences</th><th>tokens/s together, at most</th>"
        return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def predict_service(model: PreTrainedModel, asked: Service, *, scored_tokens: int = 1, new_tokens: int = 1) -> Shapes:
    """What follows from shapes, before anything is compressed.

    Args:
        scored_tokens, new_tokens: behind each context, that will be scored, and decoded.

    Raises:
        ValueError: a recipe does not fit the model, the model has too few positions, or no combination fits into the
            memory; the message says how near one comes.
    """
    most = positions(model)
    for name, behind in (("scored_tokens", scored_tokens), ("new_tokens", new_tokens)):
        if asked.context + behind > most:
            raise ValueError(
                f"`context` (={asked.context}) and `{name}` (={behind}) need {asked.context + behind} positions; the "
                f"model has {most}"
            )
    outline = sharing_copy(model, weights=False)
    plain = costs.plain_weights(model.name_or_path, model, "model_name")
    stored = {costs.PLAIN: plain}
    stored |= {name: costs.stored_weights(methods, outline, plain) for name, methods in asked.weights.items()}
    kept = {costs.PLAIN: plain.work.cache}
    kept |= {name: costs.stored_cache(one, outline, plain, asked.context) for name, one in asked.caches.items()}
    ceilings, _ = ceilings_of(asked.device)
    about: dict[str, Any] = {"memory": asked.memory, "context": asked.context, "ceilings": ceilings}
    found = costs.combinations(outline, stored, kept, asked.caches, batch=asked.batch, **about)
    if largest(found) is None:
        raise ValueError(asked.too_small(found))
    return Shapes(found, plain.work, kept, ceilings, costs.rooms(outline, asked.context)[1])
