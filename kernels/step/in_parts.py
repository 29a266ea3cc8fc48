"""A decoding step with a cache that computes the attention: the products in C++, which stop for every attention."""

import torch
from torch import Tensor

from kernels.step.assemble import program_of
from kernels.step.cache import AttendingCache, attend_by_cache
from kernels.step.native import DecodeStep
from kernels.step.program import CacheAttention
from kernels.step.recognition.decoder import Decoder
from kernels.step.recognition.parts import NotNative


class StepInParts:
    """A decoding step with one token per sequence.

    Args:
        decoder: recognised. tokens: number of sequences, up to `native.MOST_TOKENS`.

    Raises:
        NotNative: a format for which there are no decoding loops.
    """

    def __init__(self, decoder: Decoder, tokens: int) -> None:
        self.decoder, self.tokens = decoder, tokens
        try:
            self._step = DecodeStep(program_of(decoder, None, tokens), decoder.dtype)
        except (ValueError, RuntimeError) as error:
            raise NotNative(str(error).splitlines()[0]) from error

    def __call__(self, ids: Tensor, cache: AttendingCache, positions: Tensor) -> Tensor:
        """Read the last token of every sequence into the cache.

        Args:
            ids: int64 [tokens, 1]. positions: int64 [tokens, 1], for the rotary embedding of keys and queries.

        Returns:
            int64 [tokens, 1]: the index of the first largest logit; `logits` gives all logits until the next call.
        """
        decoder, step, tokens = self.decoder, self._step, self.tokens
        length = int(positions.max()) + 1
        hidden = decoder.embed(ids).flatten(0, 1) if step.program.embedding is None else None
        given = step.begin(ids, hidden)
        lents, tables_of = [], []  # of the next layers that one call handles together
        for block in decoder.blocks:
            if not block.attends:
                cache.pass_over(block.index, torch.zeros(tokens, 1, 1, 1, dtype=decoder.dtype))
                continue
            tables = decoder.rotary.of(block.kind, length)
            if (lent := cache.lend(block.index)) is not None:
                lents.append(lent)
                tables_of.append(tables)
                continue
            if lents:
                given = step.attend_kept(lents, tables_of, positions)
                lents, tables_of = [], []
            widths = [heads * block.channels for heads in (block.heads, block.kv_heads, block.kv_heads)]
            parts = given.to(decoder.dtype).split([tokens * width for width in widths])
            qkv = [part.view(tokens, 1, width) for part, width in zip(parts, widths, strict=True)]
            made_of = step.last_input.to(decoder.dtype).view(tokens, 1, -1)
            y = attend_by_cache(cache, block, qkv, made_of, tables, positions)
            given = step.go_on(y.float().view(tokens, -1))
        return step.attend_kept(lents, tables_of, positions) if lents else given

    def time_attention(self) -> None:
        """From now on, sum up the seconds of the cache's attention in `attention_s`, from 0 on."""
        self._step.time()

    @property
    def attention_s(self) -> float:
        """Seconds of the attention of all blocks since `time_attention`, and of what prepares it and writes the new
        keys and values."""
        pairs = zip(self._step.program.instructions, self._step.seconds, strict=True)
        return sum(seconds for one, seconds in pairs if isinstance(one, CacheAttention))

    @property
    def logits(self) -> Tensor:
        """The logits of the last call, [tokens, 1, vocabulary], in the model's dtype."""
        return self.decoder.logits(self._step.logits[:, None]).to(self.decoder.dtype)
