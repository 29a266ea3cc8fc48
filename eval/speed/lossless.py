"""Compressed models as drafts of their original: how many of its tokens they guess, and how fast it writes by guesses.

The original verifies every guess, so that its texts stay the same (`kernels.step.writing`); with a `rollback` they are
approximate, and their loss stands beside. How often a draft is right
follows from the original's greedy text alone: a draft guesses behind the original's own tokens, whatever it guessed
before.
"""

import statistics
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import DynamicCache, PreTrainedTokenizerBase

from eval.record import noise
from eval.record.measured import GuessedTokens, GuessingSpeed, Lossless
from eval.record.metrics import fmt
from eval.speed.device_lock import undisturbed
from eval.text.through_cache import attachment
from eval.writing.generation import PROMPTS, encode_prompt, end_tokens, write
from kernels.step.accelerate import accelerate, why_not_verifying
from kernels.support.deploy import deployed
from kernels.support.positions import positions

PASSAGE = (
    "The lighthouse on the northern cape was built of grey stone in 1871. Its lamp burned oil for forty years, until a "
    "cable from the town brought electricity. The keeper and his family lived in the rooms below the lamp, kept goats, "
    "and grew potatoes behind a wall that held the wind off. In winter the road was often closed for weeks, and the "
    "children learned to read from the newspapers that ships left behind. Since 1968 the lamp has been switched on and "
    "off by a clock, and the rooms are a museum, which is open from May to September."
)
KINDS = {  # of texts, with their prompts
    "free text": PROMPTS,
    "editing": (f"Repeat this text word by word, and correct its spelling:\n\n{PASSAGE}",),
    "summary": (f"Summarise this text in its own words:\n\n{PASSAGE}",),
}
PLAIN, LOOK_UP, AGAIN = "plain", "look-up", "plain again"  # ways of writing; the last is timed for the noise
LOOKED_UP = 15  # most tokens that a look-up guesses at a time
LENGTHS = (1, 2, 4, 8)  # numbers of guesses for which the mean number of accepted ones is computed


def with_look_up(draft: str) -> str:
    """The name of the way that looks guesses up, and takes those of a draft elsewhere."""
    return f"{LOOK_UP} and {draft}"


@dataclass
class Guessing:
    """The measurements, for a notebook and for the record."""

    record: Lossless

    @property
    def metrics(self) -> dict[str, dict[str, float]]:
        """{draft: {guess_acceptance, its standard error over the texts}}"""
        return {
            name: {"guess_acceptance": one.acceptance, "guess_acceptance_stderr": one.acceptance_stderr}
            for name, one in self.record.drafts.items()
            if one.acceptance is not None and one.acceptance_stderr is not None
        }

    def found(self) -> Lossless:
        """The record's entry `lossless`."""
        return self.record

    def _repr_html_(self) -> str:
        guessed = "".join(
            f"<tr><th style='text-align:left'>{escape(name)}</th><td>{fmt(one.acceptance, '.1f', 100)}</td>"
            f"{''.join(f'<td>{fmt(one.lengths.get(k))}</td>' for k in LENGTHS)}</tr>"
            for name, one in self.record.drafts.items()
        )
        timed = "".join(
            f"<tr><th style='text-align:left'>{escape(one.kind)}, {escape(one.way_and_guesses)}</th><td>"
            f"{fmt(one.tokens_per_s, '.1f')}</td><td>{fmt(one.ratio)}</td><td>{'yes' if one.same else 'no'}</td>"
            f"<td>{'' if one.loss is None else f'{one.loss:.3f}, plain {one.plain_loss:.3f}'}</td></tr>"
            for one in self.record.speeds
        )
        heads = "".join(f"<th>of {k}</th>" for k in LENGTHS)
        return (
            f"<table><tr><th>draft</th><th>tokens guessed, %</th>{heads}</tr>{guessed}</table>"
            "<p><small>Of the original's greedy tokens; then the mean number of accepted guesses per step.</small></p>"
            "<table><tr><th>text</th><th>tokens/s</th><th>× plain</th><th>same text</th><th>loss</th></tr>"
            f"{timed}</table>"
            f"<p>{escape(self.record.why_not)}</p>"
        )


def check_lossless(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    guess_tokens: int,
    speed_rounds: int,
    drafts: Collection[str] = (),
    rollback: float = 0.0,
) -> None:
    """Raise ValueError if guesses cannot be measured like this; quick.

    Args: as in `measure_lossless`; drafts: their names. tokenizer: None leaves the lengths of prompts out.
    """
    prompts = [one for texts in KINDS.values() for one in texts]
    longest = 0 if tokenizer is None else max(encode_prompt(tokenizer, one).shape[1] for one in prompts)
    most = positions(model) - longest
    if most < 2:
        raise ValueError(
            f"the model has {positions(model)} positions, too few for guesses to be measured: the longest prompt takes "
            f"{longest}, and a text at least 2"
        )
    if type(guess_tokens) is not int or not 2 <= guess_tokens <= most:
        whose = f"positions behind the longest prompt of {longest} tokens" if longest else f"{most} positions"
        raise ValueError(f"`guess_tokens` (={guess_tokens!r}) must be an integer from 2 to {most}, the model's {whose}")
    if type(speed_rounds) is not int or speed_rounds < 0:
        raise ValueError(f"`speed_rounds` (={speed_rounds!r}) must be a positive integer, or 0 to time nothing")
    if not 0 <= rollback < float("inf"):
        raise ValueError(
            f"`rollback` (={rollback!r}) must be a loss in nats per token above 0, or 0 for exact texts alone"
        )
    if rollback and not speed_rounds:
        raise ValueError(f"`rollback` (={rollback:g}) needs `speed_rounds`, in which approximate texts are written")
    ways = {PLAIN, LOOK_UP, AGAIN, *map(with_look_up, drafts)}
    if taken := sorted(ways & set(drafts)):
        raise ValueError(
            f"`compare` names a draft {taken[0]!r}; every name is allowed but those of other ways of writing: {PLAIN}, "
            f"{LOOK_UP}, {AGAIN}, and {with_look_up('<a draft>')}"
        )


@torch.no_grad()
def measure_lossless(
    models: Mapping[str, nn.Module],
    tokenizer: PreTrainedTokenizerBase,
    *,
    guess_tokens: int = 96,
    speed_rounds: int = 3,
    rollback: float = 0.0,
) -> Guessing:
    """Measure models as drafts of "baseline", and the speed of look-up, of each draft and of both in turns with
    plain decoding.

    Args:
        models: "baseline", and its drafts by name; bfloat16 copies are accelerated.
        guess_tokens: most tokens of each text, which ends earlier at the original's first end token. A draft reads a
            prompt only if the text may get more than half as many tokens.
        speed_rounds: rounds of timing, in each of which all ways write all texts; 0: nothing is timed.
        rollback: if above 0, each draft also writes approximate texts, as `accelerate(model, rollback=...)` does; their
            loss under the original stands beside that of its own texts.

    Raises:
        ValueError: see `check_lossless`; there is no "baseline".
    """
    if "baseline" not in models:
        raise ValueError(f"`models` (={list(models)}) must have a 'baseline', whose text the others guess")
    for model in models.values():
        check_lossless(
            model, tokenizer, guess_tokens=guess_tokens, speed_rounds=speed_rounds, drafts=[*models], rollback=rollback
        )
    half = {name: accelerate(deployed(model)) for name, model in models.items()}
    original = half.pop("baseline")
    ends = end_tokens(models["baseline"], tokenizer)
    prompts = {kind: [encode_prompt(tokenizer, one) for one in texts] for kind, texts in KINDS.items()}
    plain = {kind: [_to_end(_text(original, ids, guess_tokens), ends) for ids in own] for kind, own in prompts.items()}
    pairs = [(ids, text) for kind, own in prompts.items() for ids, text in zip(own, plain[kind], strict=True)]
    drafts = {name: _guessed([agreement(draft, *pair)[1:] for pair in pairs]) for name, draft in half.items()}
    speeds: list[GuessingSpeed] = []
    why_not = why_not_verifying(original, "model")
    if why_not:
        said = [f"Nothing was timed, because no steps of the original verify guesses on this machine: {why_not}."]
    else:
        refused = {name: why_not_verifying(draft, "draft") for name, draft in half.items()}
        said = [f"{name} was not timed: {why}." for name, why in refused.items() if why]
        half = {name: draft for name, draft in half.items() if not refused[name]}
    if speed_rounds and not why_not:
        with undisturbed(original.device):
            for kind in KINDS:
                speeds += _speeds(kind, original, _ways(half, rollback), prompts[kind], plain[kind], speed_rounds)
    return Guessing(Lossless(guess_tokens, speed_rounds, drafts, tuple(speeds), " ".join(said)))


@torch.no_grad()
def lossless_speed_ups(
    baseline: nn.Module, drafts: Mapping[str, nn.Module], prompts: Sequence[Tensor], *, new_tokens: int, rounds: int
) -> tuple[dict[str, dict[str, float]], list[str]]:
    """How much faster the baseline writes its own greedy texts behind prompts with each model as its draft.

    Args:
        baseline, drafts: of which bfloat16 copies are accelerated.
        prompts: ids [1, n] each.
        new_tokens: tokens of a text.
        rounds: of timing, in each of which all drafts, and no draft twice, are used in turns.

    Returns:
        {draft: {lossless_speed_up (median ratio of tokens per second), its standard error}}, and why some have none.
    """
    original = accelerate(deployed(baseline))
    if why_not := why_not_verifying(original, "baseline"):
        return {}, [why_not]
    half = {name: accelerate(deployed(draft)) for name, draft in drafts.items()}
    refused = {name: why for name, draft in half.items() if (why := why_not_verifying(draft, "draft"))}
    half = {name: draft for name, draft in half.items() if name not in refused}
    found: dict[str, dict[str, float]] = {}
    if half:
        texts = [_text(original, ids, new_tokens) for ids in prompts]
        named = {f"draft {name}": name for name in half}  # no draft has the name of another way
        ways = {(way, 0.0): Way(half[name]) for way, name in named.items()}
        with undisturbed(original.device):
            timed = _speeds("passages", original, {_PLAINLY: Way(), **ways, _AGAIN: Way()}, prompts, texts, rounds)
        for one in timed:
            if one.way in named and one.ratio is not None:
                error = {} if one.spread is None else {"lossless_speed_up_stderr": one.ratio * one.spread / noise.Z}
                found[named[one.way]] = {"lossless_speed_up": one.ratio} | error
    return found, [f"{name}: {why}" for name, why in refused.items()]


def agreement(draft: nn.Module, ids: Tensor, text: Sequence[int]) -> list[bool]:
    """For each token of a text behind a prompt ids [1, n]: is it the draft's likeliest token there?"""
    whole = torch.cat([ids, torch.tensor([text])], 1).to(draft.device)
    # An accelerated model reads into a cache in its own passes, and without one in those of transformers. An attached
    # compressed cache would replace it.
    own = hasattr(draft, "acceleration") and attachment(draft) is None
    cache = DynamicCache(config=draft.config) if own else None
    likeliest = draft(whole[:, :-1], past_key_values=cache, logits_to_keep=len(text)).logits[0].argmax(-1)
    return (likeliest.cpu() == torch.tensor(text)).tolist()


def mean_accepted(agreed: Sequence[bool], guesses: int) -> float:
    """The mean number of accepted guesses per step, if so many are guessed each time and the model adds one token."""
    at, accepted, steps = 0, 0, 0
    while at < len(agreed):
        right = next((i for i, one in enumerate(agreed[at : at + guesses]) if not one), guesses)
        right = min(right, len(agreed) - at)
        at, accepted, steps = at + right + 1, accepted + right, steps + 1
    return accepted / steps if steps else 0.0


def _guessed(agreed: Sequence[Sequence[bool]]) -> GuessedTokens:
    """Of each text behind its first token, which the pass over the prompt gives; texts of one token do not count."""
    if not (agreed := [own for own in agreed if own]):
        return GuessedTokens(None, None, 0)
    shares = [sum(own) / len(own) for own in agreed]
    stderr = statistics.stdev(shares) / len(shares) ** 0.5 if len(shares) > 1 else None
    lengths = {k: statistics.fmean(mean_accepted(own, k) for own in agreed) for k in LENGTHS}
    return GuessedTokens(statistics.fmean(shares), stderr, sum(map(len, agreed)), lengths)


def _to_end(text: list[int], ends: Collection[int]) -> list[int]:
    """A text up to its first end token, with it."""
    return text[: next((i + 1 for i, token in enumerate(text) if token in ends), len(text))]


def _text(model: nn.Module, ids: Tensor, new_tokens: int, look_up: int | None = None) -> list[int]:
    return write(model, ids, ends=(), new_tokens=new_tokens, look_up=look_up)[0].tokens


class Way(NamedTuple):
    """Whose guesses are verified: a draft's, those looked up in the text, both, or none."""

    draft: nn.Module | None = None
    looks_up: bool = False


_PLAINLY, _AGAIN = (PLAIN, 0.0), (AGAIN, 0.0)


def _ways(drafts: Mapping[str, nn.Module], rollback: float) -> dict[tuple[str, float], Way]:
    """{(name, rollback): way}"""
    ways = {_PLAINLY: Way(), (LOOK_UP, 0.0): Way(looks_up=True)}
    ways |= {(name, 0.0): Way(draft) for name, draft in drafts.items()}
    ways |= {(with_look_up(name), 0.0): Way(draft, looks_up=True) for name, draft in drafts.items()}
    ways |= {(name, rollback): Way(draft) for name, draft in drafts.items()} if rollback else {}
    return ways | {_AGAIN: Way()}


def _speeds(
    kind: str,
    original: nn.Module,
    ways: Mapping[tuple[str, float], Way],
    prompts: Sequence[Tensor],
    plain: Sequence[list[int]],
    rounds: int,
) -> list[GuessingSpeed]:
    """Texts of a kind, written in turns in every way."""
    seconds: dict[tuple[str, float], list[float]] = {way: [] for way in ways}
    written: dict[tuple[str, float], list[list[int]]] = {}
    same, guessed = dict.fromkeys(ways, True), dict.fromkeys(ways, 0)
    count = sum(map(len, plain))
    try:
        for turn in tqdm(range(rounds + 1), desc=f"guesses, {kind}", unit="round"):  # the first makes ready
            for way, how in ways.items():
                original.acceleration.draft, original.acceleration.rollback = how.draft, way[1]
                before, began = original.acceleration.guessed, time.perf_counter()
                texts = [
                    _text(original, ids, len(text), LOOKED_UP if how.looks_up else None)
                    for ids, text in zip(prompts, plain, strict=True)
                ]
                seconds[way] += [time.perf_counter() - began] if turn else []
                guessed[way] += original.acceleration.guessed - before if turn else 0
                same[way] &= texts == list(plain)
                written[way] = texts
    finally:
        original.acceleration.draft, original.acceleration.rollback = None, 0.0
    first = seconds[_PLAINLY]
    ratios = {way: [a / b for a, b in zip(first, own, strict=True)] for way, own in seconds.items()}
    spread = noise.spread(ratios[_AGAIN], rounds)
    losses = {way: text_loss(original, prompts, texts) for way, texts in written.items() if way[1]}
    own_loss = text_loss(original, prompts, plain) if losses else None
    return [
        GuessingSpeed(
            kind,
            way[0],
            count / statistics.median(own),
            statistics.median(ratios[way]),
            spread,
            same[way],
            None if way[0] == PLAIN else guessed[way],
            way[1],
            losses.get(way),
            own_loss if way in losses else None,
        )
        for way, own in seconds.items()
        if way[0] != AGAIN
    ]


def text_loss(model: nn.Module, prompts: Sequence[Tensor], texts: Sequence[Sequence[int]]) -> float:
    """The mean loss of a model on the tokens of texts behind their prompts ids [1, n], nats per token."""
    total = 0.0
    for ids, text in zip(prompts, texts, strict=True):
        whole = torch.cat([ids, torch.tensor([text])], 1).to(model.device)
        scores = model(whole[:, :-1]).logits[0, ids.shape[1] - 1 :].float().log_softmax(-1)
        total -= float(scores[range(len(text)), list(text)].sum())
    return total / sum(map(len, texts))
