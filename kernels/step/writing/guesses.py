"""Guesses of the next tokens, which one step of a model verifies: they change the time of a text, and not the text.

They come from the text itself (`PromptLookup`), from a smaller model with the same vocabulary (`Draft`), or from both
(`LookupOrDraft`).

Sources: Leviathan et al., Fast Inference from Transformers via Speculative Decoding, arXiv:2211.17192; prompt look-up:
Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding. A guess is accepted if the model itself chooses this token,
by its own random numbers where it samples. For a guess that is not drawn at random, this is their rule: it is accepted
with its probability under the model, and otherwise the token is drawn from the rest of the distribution. A draft draws
with the random numbers that the model will use, so that similar distributions give the same token.

With a `rollback`, texts are approximate: Kim et al., Speculative Decoding with Big Little Decoder, arXiv:2302.07863.
A guess stays while the large model's loss on it is small. Deviation: where the small model stops and hands over follows
from the measured gain of another guess (`DraftPace`), and not from a threshold of its probability.

Not here: a draft on a GPU whose guesses a model on a CPU verifies (Dovetail, arXiv:2412.18934), and layers of a draft
that run at the same time on several GPUs (EasySpec, arXiv:2502.02493).
"""

import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from kernels.step.writing.sampling import SamplingChoice

LONGEST = 3  # tokens of the longest n-gram that is looked up, as long as nothing else is configured
ROW = 0.15  # time of another token in a step, as a share of the time of a step with one, as long as none was measured
DRAFTING = 0.4  # time of a draft's step, as such a share, as long as none was measured
WORTH = 0.5  # a draft reads a first prompt if the text may get this many tokens for each of the prompt
FIRST = 3  # timed steps with one token before anything is guessed; the first step of a text is not timed
GAIN = 1.03  # least expected speed-up for which tokens are guessed
KEPT = 0.97  # factor by which earlier guesses count less with every further one
SAMPLES = 9  # last times of steps whose median counts
FEWEST = 3  # with fewer measured times, the default takes the place of the missing ones in the median
BY_STEPS = 4  # tokens that a draft reads in a step
CAUGHT_UP = 16  # unread tokens up to which a draft reads them in steps, and not as a prompt
# A draft's probability of its guess, up to which a class goes, and the acceptance of the class at the beginning, which
# counts as much as PRIOR tries.
SURE = ((0.3, 0.3), (0.5, 0.5), (0.7, 0.65), (0.9, 0.8), (2.0, 0.95))
PRIOR = 4.0
ROUNDS = 16  # last rounds of a draft that decide whether it gains
RENEWED = 32  # rounds after which a step with one token is timed again
RETRY = 32  # a kind of guess that does not gain is tried again after being left out so many times


class Guesser(Protocol):
    """Guesses how a text goes on.

    Attributes:
        rollback: the model's loss up to which a guess stays; 0: if the model chooses it. model: that guesses, or None.
    """

    rollback: float
    model: nn.Module | None

    def guess(self, text: Sequence[int], most: int, choice: SamplingChoice) -> list[int]:
        """Tokens that may follow the text, by this choice: up to `most`, and fewer than a step takes. The text has
        grown since the last call."""

    def note(self, accepted: int, seconds: float) -> None:
        """Of the last guess, so many tokens were accepted; the step that verified it took so many seconds."""


@dataclass
class Pace:
    """How many tokens are worth guessing: those that gain most by the acceptance and the times measured so far.

    Attributes:
        most: the largest number.
    """

    most: int
    _alone: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))  # seconds of steps with one token
    _rows: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))  # shares, as ROW
    _rates: dict[int, list[float]] = field(default_factory=dict)  # by kind: accepted and tried tokens
    _left_out: dict[int, int] = field(default_factory=dict)
    _began: bool = False  # was the first step taken, which also makes the rooms and the program?

    @property
    def measured(self) -> bool:
        """Is the time of steps with one token known?"""
        return len(self._alone) >= FIRST

    def count(self, kind: int, likely: float, tries: float = 2.0, least: float = GAIN) -> int:
        """The number of tokens to guess.

        Args:
            kind: of the guess; acceptance is measured for each kind. likely: acceptance of a token at the beginning,
                which counts as much as so many tries. least: the expected speed-up for which tokens are guessed; for
                a kind that was not tried yet, it is `GAIN`.
        """
        accepted, tried = self._rates.setdefault(kind, [tries * likely, tries])
        if not self.measured:
            return 0
        least = GAIN if tried == tries else least
        rate = min(accepted / tried, 0.99)
        cost = _median(self._rows, ROW)
        best, fastest, expected = 0, least, 1.0
        for count in range(1, self.most + 1):
            expected += rate**count
            if (speed := expected / (1 + count * cost)) > fastest:
                best, fastest = count, speed
        if best:
            self._left_out[kind] = 0
            return best
        self._left_out[kind] = (self._left_out.get(kind, 0) + 1) % RETRY
        return int(not self._left_out[kind])

    def note(self, kind: int, guessed: int, accepted: int, seconds: float) -> None:
        """So many of the guessed tokens were accepted in a step that took so many seconds; 0 guessed: a step of one."""
        if not guessed:
            if self._began:
                self._alone.append(seconds)
            self._began = True
            return
        if self._alone:
            more = seconds / statistics.median(self._alone) - 1
            self._rows.append(min(max(more / guessed, 0.0), 2.0))
        rates = self._rates[kind]
        rates[0] = KEPT * rates[0] + accepted
        rates[1] = KEPT * rates[1] + accepted + (accepted < guessed)


def _median(samples: Sequence[float], default: float) -> float:
    """The median of the samples, in which the default takes the place of those that are missing to `FEWEST`: one slow
    sample does not decide alone."""
    return statistics.median([*samples, *[default] * (FEWEST - len(samples))])


class PromptLookup:
    """Guesses that the text goes on as it did behind the last earlier place of its last tokens, in the prompt or in
    what has been written.

    Args:
        most: tokens of a guess. longest: tokens of the longest n-gram that is looked up, before shorter ones are.
        times: whose measured times of steps are shared; None: they are measured in this text.
    """

    rollback, model = 0.0, None

    def __init__(self, most: int, longest: int | None = None, times: "DraftPace | None" = None) -> None:
        self.longest = longest or LONGEST
        self._pace = Pace(most) if times is None else Pace(most, times.alone, times.rows)
        self._guessed = 0, 0  # n-gram's length and number of tokens of the last guess
        self._after: dict[tuple[int, ...], int] = {}  # n-gram -> where the token behind its last occurrence is
        self._known = 1

    def guess(self, text: Sequence[int], most: int, choice: SamplingChoice, least: float = GAIN) -> list[int]:
        """See `Guesser`; least: the expected speed-up for which tokens are guessed."""
        for place in range(self._known, len(text)):
            for size in range(1, min(self.longest, place) + 1):
                self._after[tuple(text[place - size : place])] = place
        self._known = max(len(text), 1)
        self._guessed = 0, 0
        for size in range(min(self.longest, len(text)), 0, -1):
            place = self._after.get(tuple(text[-size:]))
            if place is None:
                continue
            count = min(self._pace.count(size, 0.3 if size == 1 else 0.7, least=least), most)
            period = len(text) - place  # beyond the end, the guess goes on with itself
            self._guessed = size, count
            return [text[place + i % period] for i in range(count)]
        return []

    def note(self, accepted: int, seconds: float) -> None:
        """See `Guesser`."""
        size, count = self._guessed
        self._pace.note(size, count, accepted, seconds)


@dataclass
class DraftPace:
    """How far a draft guesses ahead: what texts of the same model and draft have shown so far.

    A guess is the likelier to be accepted, the surer the draft is of it; acceptance is measured by its probability.
    Another guess is made as long as it gains more tokens for its time than texts of this draft have gained before.
    Where guesses have lost time, none are made for a while, and each time for longer. A draft reads a prompt if the
    text may save more time than that takes.

    Attributes:
        alone: seconds of steps with one token. rows: times of another token in a step, as shares of these, as `ROW`.
    """

    alone: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    rows: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    _rates: list[list[float]] = field(default_factory=lambda: [[PRIOR * rate, PRIOR] for _, rate in SURE])
    _drafted: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))  # shares, as DRAFTING
    _rounds: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=ROUNDS))  # tokens, and their time
    _readings: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))  # of a token of a prompt, as shares
    _unread: int = 0  # prompts that were not worth reading
    _rest: int = 0  # tokens for which nothing is guessed any more
    _next_rest: int = RETRY
    _since: int = 0  # guesses since the last step of one token

    def begins(self) -> bool:
        """Is it worth guessing now?"""
        if self._rest > 0:
            self._rest -= 1
            return False
        if len(self.alone) < FIRST or self._since >= RENEWED:
            self._since = 0
            return False
        self._since += 1
        return True

    def worth_reading(self, tokens: int, most: int) -> bool:
        """Is it worth that the draft reads so many tokens, for a text that may get so many more? As long as nothing was
        measured, by their ratio; a prompt that is not worth it is read all the same once in a while."""
        if not self._readings or len(self._rounds) < ROUNDS // 2:
            return most >= WORTH * tokens
        if most * (1 - 1 / self.gain) >= tokens * statistics.median(self._readings):
            return True
        self._unread = (self._unread + 1) % RETRY
        return not self._unread

    def note_reading(self, tokens: int, seconds: float) -> None:
        """The draft has read so many tokens as a prompt."""
        self._readings.append(seconds / tokens / statistics.median(self.alone))

    def goes_on(self, likely: float) -> bool:
        """Is another guess worth its time, if all guesses before it are accepted with this probability?"""
        accepted, tried = map(sum, zip(*self._rates, strict=True))
        cost = _median(self._drafted, DRAFTING) + _median(self.rows, ROW)
        return likely * accepted / tried > max(self.gain, 1.0) * cost

    def rate(self, sure: float) -> float:
        """The acceptance of guesses of which the draft was as sure; 0 to 1."""
        accepted, tried = self._rates[_place(sure)]
        return accepted / tried

    def note(self, sure: Sequence[float], accepted: int, seconds: float, drafting: float, reading: float = 0.0) -> None:
        """Of guesses of which the draft was so sure, the first ones were accepted, in a step of so many seconds, for
        which the draft had taken `drafting`, after `reading` what it had not read. No guesses: a step of one token."""
        if not sure:
            self.alone.append(seconds)
            return
        for one in sure[: accepted + 1]:
            rate = self._rates[_place(one)]
            rate[:] = KEPT * rate[0], KEPT * rate[1] + 1
        for one in sure[:accepted]:
            self._rates[_place(one)][0] += 1
        alone, count = statistics.median(self.alone), len(sure)
        self.rows.append(min(max((seconds / alone - 1) / count, 0.0), 2.0))
        self._drafted.append(min(drafting / count / alone, 2.0))
        self._rounds.append((accepted + 1, (seconds + drafting + reading) / alone))
        if len(self._rounds) == ROUNDS and self.gain < 1.0:
            self._rest, self._next_rest = self._next_rest, 2 * self._next_rest
            self._rounds.clear()
        elif len(self._rounds) == ROUNDS:
            self._next_rest = RETRY

    @property
    def gain(self) -> float:
        """Tokens of the last rounds, divided by their time in units of a step with one token; 1 if there were few."""
        if len(self._rounds) < ROUNDS // 2:
            return 1.0
        tokens, times = zip(*self._rounds, strict=True)
        return sum(tokens) / sum(times)


def _place(sure: float) -> int:
    """The class of a guess; a draft whose logits are NaN is not sure of anything."""
    return next((i for i, (most, _) in enumerate(SURE) if sure <= most), 0)


class Draft:
    """Guesses of a smaller model, which reads the text into a cache of its own.

    Args:
        model: accelerated on a CPU, with the vocabulary of the model that verifies. most: tokens of a guess. pace: of
            all texts of these two models. rollback: as of a `Guesser`.
    """

    def __init__(self, model: nn.Module, most: int, pace: DraftPace, rollback: float = 0.0) -> None:
        self.rollback = rollback
        self.model, self._most, self._pace, self._steps = model, most, pace, None
        self._cache = DynamicCache(config=model.config)
        self._read = 0  # positions in the cache
        self._reading, self._seconds = 0.0, 0.0  # of the last guess: to read on up to the last tokens, and to guess
        self._sure: list[float] = []  # of the last guess: the draft's probability of its likeliest token
        self._began, self.ended = False, False  # ended: nothing is guessed any more

    def guess(self, text: Sequence[int], most: int, choice: SamplingChoice) -> list[int]:
        """See `Guesser`."""
        self._sure = []
        if self.ended or most < 1 or not self._pace.begins():
            return []
        began, first, unread = time.perf_counter(), self._steps is None, len(text) - self._read
        if (first or unread > CAUGHT_UP) and not self._has_read(text, most):
            self.ended = True
            return []
        state = torch.get_rng_state() if choice.samples else None
        guessed: list[int] = []
        likely, unread = 1.0, list(text[self._read :])
        try:
            while len(unread) > BY_STEPS:
                self._steps(torch.tensor([unread[:BY_STEPS]]))
                self._read, unread = self._read + BY_STEPS, unread[BY_STEPS:]
            guessing = time.perf_counter()
            while len(guessed) < min(self._most, most) and (not guessed or self._pace.goes_on(likely)):
                largest = self._steps(torch.tensor([unread]))
                self._read += len(unread)
                unread = [int(self._next(largest, choice))]
                guessed += unread
                logits = self._steps.logits[-1]
                self._sure.append(1 / float((logits - logits.max()).exp().sum()))
                likely *= self._pace.rate(self._sure[-1])
        finally:
            if state is not None:
                torch.set_rng_state(state)
        self._seconds = time.perf_counter() - guessing
        self._reading = 0.0 if first else guessing - began  # the prompt is read once
        return guessed

    def note(self, accepted: int, seconds: float) -> None:
        """See `Guesser`."""
        guessed = len(self._sure)
        if guessed - 1 > accepted:  # the last guess was not read
            self._steps.cut(guessed - 1 - accepted)
            self._read -= guessed - 1 - accepted
        if guessed or self._began:  # the first step makes the rooms and the program
            self._pace.note(self._sure, accepted, seconds, self._seconds, self._reading)
        self._began = True

    def _has_read(self, text: Sequence[int], most: int) -> bool:
        """Read a text but for its last token as a prompt; False: there are no steps, or it is not worth reading."""
        unread = text[self._read : -1]
        if not self._pace.worth_reading(len(unread), most):
            return False
        began = time.perf_counter()
        if self._steps is not None:
            self._steps.finish()
        self.model(torch.tensor([unread]), past_key_values=self._cache, logits_to_keep=1)
        self._steps, self._read = self.model.acceleration.steps(self._cache, 1, BY_STEPS), len(text) - 1
        self._pace.note_reading(len(unread), time.perf_counter() - began)
        return self._steps is not None

    def _next(self, largest: Tensor | None, choice: SamplingChoice) -> Any:
        """The guess behind the last token that was read: drawn as the model will draw, or the likeliest token."""
        if choice.samples:
            return choice.drawn_from(self._steps.logits[-1:])
        return self._steps.logits[-1].argmax() if largest is None else largest[-1]


class LookupOrDraft:
    """Guesses that are looked up in the text where they gain more than those of the draft, and the draft's elsewhere.

    Args:
        look_up: shares the times of `pace`. pace: of the draft.
    """

    def __init__(self, look_up: PromptLookup, draft: Draft, pace: DraftPace) -> None:
        self._look_up, self._draft, self._pace = look_up, draft, pace
        self._guessed: PromptLookup | Draft = draft  # who made the last guess

    @property
    def rollback(self) -> float:
        """See `Guesser`."""
        return self._guessed.rollback

    @property
    def model(self) -> nn.Module:
        """See `Guesser`."""
        return self._draft.model

    def guess(self, text: Sequence[int], most: int, choice: SamplingChoice) -> list[int]:
        """See `Guesser`."""
        least = GAIN if self._draft.ended else max(GAIN, self._pace.gain)
        self._guessed = self._look_up
        if guessed := self._look_up.guess(text, most, choice, least):
            return guessed
        self._guessed = self._draft  # also if it does not guess: it notes the time of a step with one token for both
        return self._draft.guess(text, most, choice)

    def note(self, accepted: int, seconds: float) -> None:
        """See `Guesser`."""
        self._guessed.note(accepted, seconds)
