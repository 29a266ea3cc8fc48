"""The text of a batch while `generate` writes it, which the host of a GPU reads later than it is written.

Where it may (`Text.read_late`), the host launches the step of the next token before it waits for a token (`LATE`):
whether it ends the text, whether its scores were finite, and what a streamer gets. What was written behind the end is
dropped, and its random numbers are given back, so that texts are the same as if they were read at once.
"""

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import StoppingCriteriaList
from transformers.generation import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.streamers import BaseStreamer

from kernels.step.writing.sampling import NOT_FINITE, SamplingChoice
from kernels.support.host_copies import HostCopies

ROOM = 512  # tokens by which the tensor of the text grows
LATE = 1  # tokens that are written on a GPU before the host reads one


@dataclass
class _Unread:
    """One token per sequence that the host has not read yet.

    length: of the text with it. copies: the tokens, int64 [batch], and `SamplingChoice.finite`; each None if it is not
    read. state: of the GPU's random numbers behind it; None: none were drawn, or the token is read at once.
    """

    length: int
    copies: HostCopies
    state: Tensor | None


class Text:
    """The text of a batch while it is written, and the criteria that end its sequences.

    Attributes:
        continues: is a sequence not finished yet, as far as tokens have been read?
    """

    def __init__(
        self, ids: Tensor, criteria: StoppingCriteriaList, pad: Tensor | None, streamer: BaseStreamer | None
    ) -> None:
        """ids: int64 [batch, tokens], the prompt. pad: the token that finished sequences are filled with. streamer: one
        with an attribute `on_device` gets every token when it is launched, where it lies."""
        self._ids, self._length = ids, ids.shape[1]
        self._at_once, self._streamer = (
            (streamer, None) if getattr(streamer, "on_device", None) is True else (None, streamer)
        )
        self._unfinished, self.continues = torch.ones(len(ids), dtype=torch.bool), True
        self._pad = pad if any(hasattr(one, "eos_token_id") for one in criteria) else None
        ends = [one for one in criteria if type(one) is EosTokenCriteria]
        self._last = {int(token) for one in ends for token in one.eos_token_id.flatten()}
        limits = [one for one in criteria if type(one) is MaxLengthCriteria]
        self._most = min((one.max_length for one in limits), default=None)
        self._warned = min((one.max_position_embeddings or 1 << 62 for one in limits), default=1 << 62)
        self._limits = limits
        self._others = StoppingCriteriaList(one for one in criteria if one not in ends and one not in limits)
        self._late, self._unread = 0, deque[_Unread]()
        # On a GPU: unfinished sequences, bool [batch], and the tokens that end them.
        self._open, self._ends = None, None

    def read_late(self) -> None:
        """Let the host read tokens later than they are written, unless a criterion of the caller sees every token."""
        if self._others:
            return
        self._late = LATE
        if self._pad is not None and len(self._ids) > 1:
            self._open = torch.ones(len(self._ids), dtype=torch.bool, device=self._ids.device)
            self._ends = torch.tensor(sorted(self._last), dtype=torch.int64, device=self._ids.device)

    @property
    def left(self) -> int:
        """The number of tokens that the text may still get."""
        return 1 << 62 if self._most is None else self._most - self._length

    @property
    def ids(self) -> Tensor:
        """int64 [batch, tokens], the text so far."""
        return self._ids[:, : self._length].contiguous()

    def append(self, tokens: Tensor, choice: SamplingChoice) -> Tensor:
        """Add one token per sequence, int64 [batch], or padding where a sequence is finished, and return them."""
        tokens = self._padded(tokens)
        if self._length == self._ids.shape[1]:
            self._ids = torch.cat([self._ids, self._ids.new_zeros(len(tokens), max(ROOM, self._length // 2))], 1)
        self._ids[:, self._length] = tokens
        self._length += 1
        if self._length == self._warned + 1:  # transformers warns once
            for limit in self._limits:
                limit(self.ids, None)
        if self._others:
            self._unfinished = self._unfinished & ~self._others(self.ids, choice.scores or None).cpu()
        if self._at_once is not None:
            self._at_once.put(tokens)
        seen = self._last or self._streamer is not None
        copies = HostCopies(tokens if seen else None, choice.finite)
        drawn = self._late and choice.finite is not None
        self._unread.append(
            _Unread(self._length, copies, torch.cuda.get_rng_state(self._ids.device) if drawn else None)
        )
        while len(self._unread) > self._late:
            self._read()
        self.continues = bool(self._unfinished.any()) and self.left > 0
        return tokens

    def _padded(self, tokens: Tensor) -> Tensor:
        """The tokens, with padding where a sequence is finished."""
        if self._open is not None:
            tokens = torch.where(self._open, tokens, self._pad)
            self._open &= (tokens[:, None] != self._ends).all(1)
        elif self._pad is not None and not bool(self._unfinished.all()):
            tokens = torch.where(self._unfinished.to(tokens.device), tokens, self._pad)
        return tokens

    def _read(self) -> None:
        """Read the first tokens that have not been read; where they end the text, drop those behind them.

        Raises:
            ValueError: they could not be drawn.
        """
        one = self._unread.popleft()
        tokens, finite = one.copies.read()
        if finite is not None and not bool(finite):
            raise ValueError(NOT_FINITE)
        if self._last:
            ended = [token in self._last for token in tokens.tolist()]
            if any(ended):
                self._unfinished &= ~torch.tensor(ended)
        if self._streamer is not None:
            self._streamer.put(tokens)
        if self._unread and not bool(self._unfinished.any()):
            self._length = one.length
            self._unread.clear()
            if one.state is not None:  # as if nothing had been drawn behind the end
                torch.cuda.set_rng_state(one.state, self._ids.device)

    def finish(self) -> None:
        """Read all tokens that have not been read.

        Raises:
            ValueError: as of `append`.
        """
        while self._unread:
            self._read()
