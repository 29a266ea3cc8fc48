"""Bytes that the tiles of attention on a CPU move between memory and a core's own cache, beside the least of any order.

`python -m kernels.harness.traffic > attention-traffic.jsonl` prints a JSON line for each case. Nothing is timed: the
blocks of one head are followed through a cache that drops what was used longest ago.
"""

import json
from collections import OrderedDict
from dataclasses import dataclass

from kernels.harness.roofline import attention_bytes

STEP = 32  # keys that enter the cache together
SPAN = 256  # positions of a task of `kv_decode` (native/kv_decode.cpp)


@dataclass(frozen=True)
class Tiles:
    """The tiles of a form of `prompt_attention` (native/prompt_attention*.inc).

    queries: of an item, for which a block of keys and values is read once. keys: of a block. rows: queries whose
    scores lie in memory together. number: bytes of a stored query, key or value. score: bytes of a score and its
    probability.
    """

    queries: int
    keys: int
    rows: int
    number: int
    score: int

    def own(self, channels: int) -> int:
        """Bytes of a thread's queries, sums of values, scores and probabilities."""
        return self.queries * channels * (self.number + 4) + self.rows * self.keys * self.score

    def needs(self, channels: int) -> int:
        """Bytes of the fast memory for which the tiles are made: the thread's own, and a block of keys and values."""
        return self.own(channels) + 2 * self.keys * channels * self.number


FORMS = {
    "pairs": Tiles(queries=96, keys=512, rows=6, number=2, score=6),
    "float32": Tiles(queries=96, keys=256, rows=6, number=4, score=4),
    "AMX": Tiles(queries=128, keys=256, rows=32, number=2, score=6),
}


@dataclass(frozen=True)
class Traffic:
    """Bytes of one head: `moved` by the tiles, and the `least` of any order of tiles with this `fast` memory."""

    key: str
    fast: int
    moved: int
    least: int
    operations: int

    def line(self) -> str:
        """The numbers as a JSON line, with the factor between them and the operations for each byte moved."""
        numbers = {"fast_bytes": self.fast, "moved_bytes": self.moved, "least_bytes": self.least}
        shares = {"factor": self.moved / self.least, "operations_per_byte": self.operations / self.moved}
        return json.dumps({"key": self.key} | numbers | shares)


def prompt(form: str, tokens: int, channels: int, fast: int = 0) -> Traffic:
    """The traffic of a causal prompt of one head.

    Args:
        fast: bytes of the fast memory; 0: as many as the tiles need.

    Raises:
        ValueError: the fast memory is too small for the tiles.
    """
    tiles = FORMS[form]
    fast = fast or tiles.needs(channels)
    if fast < tiles.needs(channels):
        raise ValueError(f"`fast` (={fast}) must be at least the {tiles.needs(channels)} bytes that the tiles need")
    outside = 4 * tokens * channels  # queries and outputs, once
    moved = outside + _read(tiles, tokens, channels * tiles.number * STEP, fast - tiles.own(channels))
    pairs = tokens * (tokens + 1) // 2
    once = outside + 2 * tokens * channels * tiles.number
    least = max(once, int(attention_bytes(pairs, channels, fast, tiles.number)))
    key = f"{form}, {tokens:,} tokens, {channels} channels, {fast >> 10} kB"
    return Traffic(key, fast, moved, least, 4 * pairs * channels)


def _read(tiles: Tiles, tokens: int, step: int, room: int) -> int:
    """Bytes of keys and values that are read where `room` bytes of them stay; `step`: bytes of STEP keys."""
    held: OrderedDict[tuple[str, int], None] = OrderedDict()
    moved = 0
    for first in range(0, tokens, tiles.queries):
        end = min(first + tiles.queries, tokens)
        for block in range(0, end, tiles.keys):
            for part in ("keys", "values"):
                for at in range(block, min(block + tiles.keys, end), STEP):
                    moved += 0 if (part, at) in held else step
                    held[part, at] = None
                    held.move_to_end((part, at))
            while len(held) * step > room:
                held.popitem(last=False)
    return moved


def decode(rows: int, positions: int, channels: int) -> Traffic:
    """The traffic of `kv_decode` of a kv head over a 16-bit cache: rows of queries, which share the reading."""
    fast = rows * (6 * channels + 4 * SPAN)  # queries, sums and scores
    once = 4 * channels * (positions + rows)
    spans = -(-positions // SPAN)
    moved = once + (2 * 4 * spans * rows * (channels + 2) if spans > 1 else 0)  # sums of spans, written and read
    least = max(once, int(attention_bytes(rows * positions, channels, fast)))
    key = f"kv_decode, {rows} queries, {positions:,} positions, {channels} channels"
    return Traffic(key, fast, moved, least, 4 * rows * positions * channels)


def cases() -> list[Traffic]:
    """Long prompts with the memory that the tiles need; a prompt whose keys and values fit in 1 MiB; decoding."""
    long = [prompt(form, 16384, channels) for form in FORMS for channels in (64, 128, 256)]
    short = [prompt("pairs", 2048, 64, 1 << 20), prompt("AMX", 2048, 64, 1 << 20)]
    return [*long, *short, *(decode(rows, 8192, 128) for rows in (1, 4, 8))]


if __name__ == "__main__":
    for case in cases():
        print(case.line())
