"""A step of decoding behind a cache that attends itself: the products in C++, which stop for every attention."""

import torch
from torch import Tensor

from kernels.step.assemble import program_of
from kernels.step.between import turn_and_store
from kernels.step.cache import AttendingCache
from kernels.step.decoder import Decoder, NotNative
from kernels.step.native import DecodeStep


class StepInParts:
    """One token of every sequence.

    Args:
        decoder: recognised. tokens: sequences, up to `native.MOST_TOKENS`.

    Raises:
        NotNative: a format without loops of a step.
    """

    def __init__(self, decoder: Decoder, tokens: int) -> None:
        self.decoder, self.tokens = decoder, tokens
        program, self._embedding = program_of(decoder, None, tokens)
        try:
            self._step = DecodeStep(program, decoder.dtype)
        except (ValueError, RuntimeError) as error:
            raise NotNative(str(error).splitlines()[0]) from error

    def __call__(self, ids: Tensor, cache: AttendingCache, positions: Tensor) -> Tensor:
        """Take the last token of every sequence into the cache.

        Args:
            ids: int64 [tokens, 1]. positions: int64 [tokens, 1], by which keys and queries turn.

        Returns:
            logits [tokens, 1, vocabulary] in the model's dtype.
        """
        decoder, step, tokens = self.decoder, self._step, self.tokens
        length = int(positions.max()) + 1
        hidden = None if self._embedding is None else self._embedding(ids).float().flatten(0, 1)
        given = step.begin(ids, hidden)
        for block in decoder.blocks:
            D, heads = block.channels, block.kv_heads
            parts = given.to(decoder.dtype).split([tokens * n * D for n in (block.heads, heads, heads)])
            q, k, v = (part.view(tokens, 1, -1) for part in parts)
            keys, values = q.new_empty(2, tokens, heads, 1, D)
            norms = block.query_norm, block.key_norm
            turn_and_store(q, k, v, decoder.rotary.of(block.kind, length), positions, norms, keys, values, 0)
            y = cache.attend_new(
                block.index,
                block.attention,
                q.view(tokens, 1, -1, D).transpose(1, 2),
                keys,
                values,
                step.last_input.to(decoder.dtype).view(tokens, 1, -1),
                scaling=block.scale,
                softcap=block.softcap or None,
                window=block.window,
            )
            given = step.go_on(y.float().view(tokens, -1))
        logits = step.logits[:, None]
        return (decoder.cap * (logits / decoder.cap).tanh() if decoder.cap else logits).to(decoder.dtype)
