"""Long contexts with questions whose answers are known: needles, variables, word counts and key-value pairs.

After RULER (Hsieh et al., 2024, arXiv:2404.06654), for small causal models that continue a text: `ask` begins a
sentence and `answer` ends it. If the task allows it, there are two questions about one context, so that the second one
can be a follow-up that was unknown when the cache was compressed.
"""

import random
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise, takewhile
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kernels.support.errors import check_positive

SLACK = 40  # number of tokens by which a context may be shorter than requested
APART = 0.1  # least distance between two needles, as a share of the text
LEAST_TEXT = 64  # least number of tokens of text for which a depth is meaningful
LONGEST = 400  # characters of a sentence; longer pieces are tables or lists rather than sentences
GOLDEN = 0.618034  # its multiples, modulo 1, are evenly spread for any number of them

_NOUNS = """
    anchor apple arrow barrel basket beacon bell blanket boat bottle branch bread bridge brush bucket butter
    button cabin cable camera candle canoe castle cave chain chair cherry chimney clock cloud coffee compass
    copper corn cotton crown crystal curtain desert diamond dragon drum eagle fabric feather fence flame
    flower forest fountain fox garden gate glass glove gold grape guitar hammer harbor hat helmet honey horse
    island jacket jewel kitchen ladder lake lamp lantern leaf lemon library lion maple marble meadow mirror
    moon mountain mushroom needle nest ocean olive onion orange oven owl palace paper parrot pearl pencil
    pepper piano pillow pilot pine planet pocket pond potato pumpkin rabbit rain ribbon ring river rocket rope
    salt sand shadow sheep shell ship shoe silver snow spoon spring stone storm sugar sword table temple tent
    thunder tiger tower train tree tunnel turtle umbrella valley velvet village violin wagon wall whale wheel
    window winter wolf
"""
_CITIES = (
    "Athens Berlin Boston Cairo Chicago Denver Dublin Lisbon London Madrid Milan Moscow Oslo Paris Rome Sydney Tokyo"
)
NOUNS, CITIES = _NOUNS.split(), _CITIES.split()
# Repeated like documents, this is RULER's haystack of noise, in which a needle is easier to find than in natural text.
NOISE: list[str] = [
    "The rain is soft. The road is long. The night is quiet. On we walk. Over the hill and home once more."
]


@dataclass(frozen=True, eq=False)
class Question:
    """ask [q], placed after the context, and its answer [a], both LongTensors, tokenized as one text.

    A space between the two belongs to the answer, which ends before the full stop. needles: token spans [start, end) of
    the context that contain the answer.
    """

    ask: Tensor
    answer: Tensor
    needles: tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class ContextSample:
    """A context, LongTensor [n], with special tokens at the beginning, and questions about it.

    depth: in 0..1, the intended place of the first question's needle (it is at the nearest end of a sentence); None if
        needles are spread over the context.
    length: the requested length; length - SLACK <= n <= length, unless all sentences are longer.
    """

    task: str
    context: Tensor
    questions: tuple[Question, ...]
    depth: float | None
    length: int


class HaystackPlan(NamedTuple):
    """Pieces of text in their order, and questions about them: (ask, answer, indices of the pieces with the answer)."""

    pieces: list[str]
    asked: list[tuple[str, str, list[int]]]


Composed = tuple[
    HaystackPlan, list[int], list[tuple[int, int]]
]  # a plan, tokens of its pieces joined, characters of each token


class HaystackTask(NamedTuple):
    """The way in which a task draws its contexts.

    draw: (rng) -> Plan of needles to be hidden in documents, or, if `fewest` is set, (rng, n, depth) -> Plan of a whole
        list of n entries.
    deep: the first question's needle, pieces[0] of those to be hidden, is at the sample's depth, and the others
        anywhere; otherwise the needles are spread in their order.
    fewest: number of entries of the shortest list. joint: text between pieces.
    """

    draw: Callable[..., HaystackPlan]
    deep: bool = True
    fewest: int = 0
    joint: str = " "


def samples(
    tokenizer: PreTrainedTokenizerBase,
    task: str,
    *,
    documents: Sequence[str],
    length: int,
    count: int,
    depths: Sequence[float] | None = None,
    seed: int = 0,
    beginning: Sequence[int] = (),
) -> list[ContextSample]:
    """Draw samples of a task; sample i depends on the seed, the task, the length and i, and not on `count`.

    Args:
        tokenizer: a fast one, which knows each token's characters. The context is tokenized as a whole, and so is ask +
            answer; the context's full stop and the newlines after it are therefore never joined to one token.
        task: a name in TASKS.
        documents: natural text (or NOISE), from which a stretch of whole sentences is drawn; repeated if it is too
            short. common_words, frequent_words and kv_retrieval need none.
        length: number of tokens of the context, the beginning included.
        depths: in 0..1, places of the first question's needle, used cyclically for the samples. None: evenly spread
            over 0.05..0.95. Tasks whose needles are spread, and whose samples have depth None, ignore it.
        beginning: special tokens before the text, for models that rely on them.

    Raises:
        ValueError: no such task, a length too small for it, depths outside 0..1, count < 1, documents without a
            sentence, or a tokenizer that is not fast.
    """
    _check(task, documents, length, count, depths)
    if not tokenizer.is_fast:
        raise ValueError(
            f"`tokenizer` (={type(tokenizer).__name__}) must be a fast one, which knows each token's characters"
        )
    spec, head = TASKS[task], len(beginning)
    pool = [] if spec.fewest else _sentences(documents)
    costs = _costs(tokenizer, pool)
    shift = random.Random(f"{seed}/{task}").random()
    spread = [round(0.05 + 0.9 * ((shift + i * GOLDEN) % 1), 4) for i in range(count)]
    wanted = spread if depths is None else [float(depths[i % len(depths)]) for i in range(count)]

    def compose(i: int, length: int, size: int) -> Composed:
        """Sample i, the same each time except for its size: `size` entries, or about `size` tokens; 0: the shortest
        possible."""
        rng = random.Random(f"{seed}/{task}/{length}/{i}")
        if spec.fewest:
            plan = spec.draw(rng, max(spec.fewest, size), wanted[i])
        else:
            needles = spec.draw(rng)
            room = max(size - sum(_costs(tokenizer, needles.pieces)), LEAST_TEXT, min(costs))
            plan = _hide(rng, needles, wanted[i] if spec.deep else None, _stretch(rng, pool, costs, room))
        text = tokenizer(
            spec.joint.join(plan.pieces), add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        return plan, text.input_ids, text.offset_mapping

    def shortest(length: int) -> list[int]:
        return [head + len(compose(i, length, 0)[1]) for i in range(count)]

    least = shortest(length)
    if max(least) > length:
        enough = next(n for n in range(32 * (max(least) // 32 + 1), 1 << 30, 32) if max(shortest(n)) <= n)  # drawn anew
        raise ValueError(f"`length` (={length}) is too small for `task` (={task!r}); {enough} works")
    drawn = []
    for i in range(count):
        size = spec.fewest * length // least[i] if spec.fewest else length - head
        plan, ids, offsets = _fit(partial(compose, i, length), size, length - head)
        context = torch.tensor([*beginning, *ids], dtype=torch.long)
        spans = _spans(plan.pieces, len(spec.joint), offsets, head)
        questions = tuple(
            Question(*_split(tokenizer, "\n\n" + ask, answer), tuple(spans[p] for p in held))
            for ask, answer, held in plan.asked
        )
        drawn.append(ContextSample(task, context, questions, wanted[i] if spec.deep else None, length))
    return drawn


def _check(task: str, documents: Sequence[str], length: int, count: int, depths: Sequence[float] | None) -> None:
    if task not in TASKS:
        raise ValueError(f"`task` (={task!r}) must be one of {', '.join(TASKS)}")
    check_positive(length=length, count=count)
    if depths is not None and (len(depths) == 0 or not all(0 <= d <= 1 for d in depths)):
        raise ValueError(
            f"`depths` (={list(depths)}) must be numbers from 0 (first) to 1 (last), at least one; or None"
        )
    if isinstance(documents, str):
        raise ValueError(
            f"`documents` (={documents[:20]!r}...) must be a list of texts; a single text goes in as [text]"
        )


def _fit(compose: Callable[[int], Composed], size: int, room: int) -> Composed:
    """The first composition that fills `room` tokens up to SLACK, else the longest that fits; one or two tries are
    usually enough."""
    fitting: list[Composed] = []
    for attempt in range(8):
        found = compose(size if attempt < 7 else 0)
        taken = len(found[1])
        fitting += [found] if taken <= room else []
        if room - SLACK <= taken <= room:
            break
        size = round(size * (room - SLACK / 2) / taken)
    return max(fitting, key=lambda found: len(found[1]))  # not empty: the shortest, which comes last, fits


def _spans(pieces: list[str], joint: int, offsets: list[tuple[int, int]], head: int) -> list[tuple[int, int]]:
    """Token spans [start, end) of the pieces; `joint`: characters between pieces; `head`: tokens before the first."""
    starts, ends = [a for a, _ in offsets], [b for _, b in offsets]
    at = list(accumulate((len(piece) + joint for piece in pieces), initial=0))  # characters at which pieces start
    return [(head + bisect_right(ends, a), head + bisect_left(starts, b - joint)) for a, b in pairwise(at)]


def _sentences(documents: Sequence[str]) -> list[str]:
    """Whole sentences of all documents, in their order, with single spaces."""
    found = []
    for text in documents:  # cut also at "end.Next", as texts taken from web pages have it
        for piece in re.split(r"(?<=[.!?])\s+|(?<=[.!?][\"')\]])\s+|(?<=[a-z][.!?])(?=[A-Z])", text):
            piece = " ".join(piece.split())
            if re.search(r"\w.*[.!?][\"')\]]?$", piece) and len(piece) <= LONGEST:
                found.append(piece)
    if not found:
        raise ValueError(
            f"`documents` ({len(documents)} of them, {sum(map(len, documents))} characters) hold no sentence of up to "
            f"{LONGEST} "
            "characters that ends with . or ! or ?; any natural text works, or NOISE"
        )
    return found


def _costs(tokenizer: PreTrainedTokenizerBase, pieces: list[str]) -> list[int]:
    """Number of tokens of each piece with the space before it; exact for byte-level tokenizers, else approximate."""
    return (
        [len(ids) for ids in tokenizer([f" {p}" for p in pieces], add_special_tokens=False).input_ids] if pieces else []
    )


def _split(tokenizer: PreTrainedTokenizerBase, ask: str, answer: str) -> tuple[Tensor, Tensor]:
    """Tokens of `ask` and of the answer with its space, as the tokenizer splits the two together."""
    # A letter in front avoids the space that some tokenizers put before every text; none joins it with a newline.
    letter, alone, both = (
        tokenizer(t, add_special_tokens=False).input_ids for t in ("x", f"x{ask}", f"x{ask} {answer}")
    )
    border = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(alone, both, strict=False)))
    return torch.tensor(both[len(letter) : border], dtype=torch.long), torch.tensor(both[border:], dtype=torch.long)


def _stretch(rng: random.Random, pool: list[str], costs: list[int], room: int) -> list[tuple[str, int]]:
    """Consecutive sentences from a random one on, with their numbers of tokens, up to `room`; sentences too long for
    the remaining room are skipped."""
    at, left, idle, taken = rng.randrange(len(pool)), room, 0, []
    while left > SLACK * 3 // 4 and idle < len(pool):
        if costs[at] <= left:
            taken.append((pool[at], costs[at]))
            left, idle = left - costs[at], -1
        at, idle = (at + 1) % len(pool), idle + 1
    return taken


def _apart(rng: random.Random, marks: Sequence[float], taken: list[int]) -> int:
    """Index of a random mark at least APART from those taken, or of the farthest mark if there is none."""
    distances = [min(abs(mark - marks[t]) for t in taken) for mark in marks]
    far = [i for i, distance in enumerate(distances) if distance >= APART]
    return rng.choice(far) if far else distances.index(max(distances))


def _hide(rng: random.Random, plan: HaystackPlan, depth: float | None, text: list[tuple[str, int]]) -> HaystackPlan:
    """Put a plan's needles between sentences: the first at the depth and the others anywhere, or all spread in their
    order."""
    k, total = len(plan.pieces), sum(cost for _, cost in text)
    marks = [mark / total for mark in accumulate((cost for _, cost in text), initial=0)]
    wanted = [(j + rng.uniform(0.1, 0.9)) / k for j in range(k)] if depth is None else [depth]
    places = [min(range(len(marks)), key=lambda i, w=w: abs(marks[i] - w)) for w in wanted]
    while len(places) < k:
        places.append(_apart(rng, marks, places))
    needles = [(place, 0, j, piece) for j, (place, piece) in enumerate(zip(places, plan.pieces, strict=True))]
    rows = sorted(
        needles + [(i, 1, i, sentence) for i, (sentence, _) in enumerate(text)]
    )  # place i is before sentence i
    lies = {j: at for at, (_, kind, j, _) in enumerate(rows) if kind == 0}
    return HaystackPlan(
        [row[-1] for row in rows], [(ask, answer, [lies[j] for j in held]) for ask, answer, held in plan.asked]
    )


# Needles to be hidden in documents


def _facts(facts: list[tuple[str, str]], asked: int) -> HaystackPlan:
    return HaystackPlan([f"{ask} {answer}." for ask, answer in facts], [(*facts[j], [j]) for j in range(asked)])


def _word(rng: random.Random, number_first: bool = False) -> HaystackPlan:
    facts = [
        ("The secret word is", " ".join(rng.sample(NOUNS, 2))),
        ("The pass key is", str(rng.randrange(10_000, 100_000))),
    ]
    return _facts(facts[::-1] if number_first else facts, asked=2)


def _multi_key(rng: random.Random) -> HaystackPlan:
    pairs = zip(rng.sample(CITIES, 4), rng.sample(NOUNS, 4), strict=True)
    return _facts([(f"The secret word of {city} is", word) for city, word in pairs], asked=2)


def _multi_value(rng: random.Random) -> HaystackPlan:
    city, words = rng.choice(CITIES), rng.sample(NOUNS, 3)
    needles = [f"One of the secret words of {city} is {word}." for word in words]
    return HaystackPlan(
        needles, [(f"The three secret words of {city}, in their order, are", ", ".join(words), [0, 1, 2])]
    )


def _variable_tracking(rng: random.Random) -> HaystackPlan:
    """Two chains of three variables, mixed, each in its order."""
    names = rng.sample([f"{letter}{digit}" for letter in "ABCDEFGHJKLMNPQRSTUVWXYZ" for digit in range(1, 10)], 6)
    values, pieces, chains, held = rng.sample(range(10_000, 100_000), 2), [], ([], []), ([], [])
    for i, c in enumerate(rng.sample([0, 0, 0, 1, 1, 1], 6)):
        pieces.append(f"VAR {names[i]} = " + (f"VAR {chains[c][-1]}." if chains[c] else f"{values[c]}."))
        chains[c].append(names[i])
        held[c].append(i)
    return HaystackPlan(
        pieces, [(f"The variables that hold {values[c]} are", ", ".join(chains[c]), held[c]) for c in (0, 1)]
    )


# Lists that are the whole context


def _common_words(rng: random.Random, n: int, _: float) -> HaystackPlan:
    """Three words take 16, 12 and 8 of a hundred places, all others the rest evenly: RULER's task, but with a defined
    order."""
    words = rng.sample(NOUNS, len(NOUNS))
    top, rare = words[:3], words[3:]
    entries = [word for word, share in zip(top, (0.16, 0.12, 0.08), strict=True) for _ in range(round(n * share))]
    entries += [rare[i % len(rare)] for i in range(n - len(entries))]
    rng.shuffle(entries)
    lines = ["Below is a numbered list of words.", *(f"{i}. {word}" for i, word in enumerate(entries, 1))]
    held = [i for i, word in enumerate(entries, 1) if word in top]
    return HaystackPlan(
        lines, [("The three most common words in the list, the most common first, are", ", ".join(top), held)]
    )


def _frequent_words(rng: random.Random, n: int, _: float) -> HaystackPlan:
    """The word of rank r occurs n / r^2 / zeta(2) times, with RULER's exponent; counts are rounded rather than drawn,
    so that the ranks are exact."""
    syllables = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]
    codes = ["".join(three) for three in zip(*(rng.sample(syllables, 50) for _ in range(3)), strict=True)]
    entries = [code for r, code in enumerate(codes, 1) for _ in range(max(1, round(n * 0.6079 / r**2)))][:n]
    rng.shuffle(entries)
    held = [i for i, code in enumerate(entries, 1) if code in codes[:3]]
    ask = "The three most frequent coded words, the most frequent first, are"
    return HaystackPlan(["Below is a text of coded words.", *entries], [(ask, ", ".join(codes[:3]), held)])


def _kv_retrieval(rng: random.Random, n: int, depth: float) -> HaystackPlan:
    pairs = [tuple(f"{rng.getrandbits(32):08x}-{rng.getrandbits(16):04x}" for _ in range(2)) for _ in range(n)]
    first = round(depth * (n - 1))
    second = _apart(rng, [i / (n - 1) for i in range(n)], [first])
    lines = [f'"{key}": {value},' for key, value in pairs]
    asked = [(f'The value of key "{pairs[i][0]}" is', pairs[i][1], [1 + i]) for i in (first, second)]
    return HaystackPlan(["Below are keys and their values.", *lines], asked)


TASKS: dict[str, HaystackTask] = {
    "word": HaystackTask(_word),
    "number": HaystackTask(partial(_word, number_first=True)),
    "multi_key": HaystackTask(_multi_key),
    "multi_value": HaystackTask(_multi_value, deep=False),
    "variable_tracking": HaystackTask(_variable_tracking, deep=False),
    "common_words": HaystackTask(_common_words, deep=False, fewest=40, joint="\n"),
    "frequent_words": HaystackTask(_frequent_words, deep=False, fewest=40),
    "kv_retrieval": HaystackTask(_kv_retrieval, fewest=4, joint="\n"),
}
