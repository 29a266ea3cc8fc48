"""Guesses of the next tokens, which one step of a model verifies: they change the time of a text, and not the text.

Sources: Leviathan et al., Fast Inference from Transformers via Speculative Decoding, arXiv:2211.17192; prompt look-up:
Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding. A guess is accepted if the model itself chooses this token,
by its own random numbers where it samples. For a guess that is not drawn at random, this is their rule: it is accepted
with its probability under the model, and otherwise the token is drawn from the rest of the distribution.
"""

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

LONGEST = 3  # tokens of the longest n-gram that is looked up, as long as nothing else is configured
ROW = 0.15  # time of another token in a step, as a share of the time of a step with one, as long as none was measured
GAIN = 1.03  # least expected speed-up for which tokens are guessed
KEPT = 0.97  # factor by which earlier guesses count less with every further one
SAMPLES = 9  # last times of steps whose median counts
RETRY = 32  # a kind of guess that does not gain is tried again after being left out so many times


class Guesser(Protocol):
    """Guesses how a text goes on."""

    def guess(self, text: Sequence[int], most: int) -> list[int]:
        """Up to `most` tokens that may follow the text, which has grown since the last call."""

    def note(self, accepted: int, seconds: float) -> None:
        """Of the last guess, so many tokens were accepted; the step that verified it took so many seconds."""


@dataclass
class Pace:
    """How many tokens are worth guessing: those that gain most by the acceptance and the times measured so far.

    Attributes:
        most: the largest number. guess_cost: of one guessed token, as a share of the time of a step with one token.
    """

    most: int
    guess_cost: float = 0.0
    _rates: dict[int, list[float]] = field(default_factory=dict)  # by kind: accepted and tried tokens
    _left_out: dict[int, int] = field(default_factory=dict)
    _alone: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))  # seconds of steps with one token
    _rows: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))  # shares, as ROW

    def count(self, kind: int, likely: float) -> int:
        """The number of tokens to guess.

        Args:
            kind: of the guess; acceptance is measured for each kind. likely: acceptance of a token at the beginning.
        """
        accepted, tried = self._rates.setdefault(kind, [2 * likely, 2.0])
        rate = min(accepted / tried, 0.99)
        cost = self.guess_cost + (statistics.median(self._rows) if self._rows else ROW)
        best, fastest, expected = 0, GAIN, 1.0
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
            self._alone.append(seconds)
            return
        if self._alone:
            more = seconds / statistics.median(self._alone) - 1
            self._rows.append(min(max(more / guessed, 0.0), 2.0))
        rates = self._rates[kind]
        rates[0] = KEPT * rates[0] + accepted
        rates[1] = KEPT * rates[1] + accepted + (accepted < guessed)


class PromptLookup:
    """Guesses that the text goes on as it did behind the last earlier place of its last tokens, in the prompt or in
    what has been written.

    Args:
        most: tokens of a guess. longest: tokens of the longest n-gram that is looked up, before shorter ones are.
    """

    def __init__(self, most: int, longest: int | None = None) -> None:
        self.longest = longest or LONGEST
        self._pace, self._guessed = Pace(most), (0, 0)  # n-gram's length and number of tokens of the last guess
        self._after: dict[tuple[int, ...], int] = {}  # n-gram -> the place behind it, of the last one that has one
        self._known = 1

    def guess(self, text: Sequence[int], most: int) -> list[int]:
        """See `Guesser`."""
        for place in range(self._known, len(text)):
            for size in range(1, min(self.longest, place) + 1):
                self._after[tuple(text[place - size : place])] = place
        self._known = max(len(text), 1)
        self._guessed = 0, 0
        for size in range(min(self.longest, len(text)), 0, -1):
            place = self._after.get(tuple(text[-size:]))
            if place is None:
                continue
            count = min(self._pace.count(size, 0.3 if size == 1 else 0.7), most)
            period = len(text) - place  # beyond the end, the guess goes on with itself
            self._guessed = size, count
            return [text[place + i % period] for i in range(count)]
        return []

    def note(self, accepted: int, seconds: float) -> None:
        """See `Guesser`."""
        size, count = self._guessed
        self._pace.note(size, count, accepted, seconds)
