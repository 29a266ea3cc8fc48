"""The error of every block of the model, one row per recipe, over all runs."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from matplotlib.patches import PathPatch
from matplotlib.path import Path

from reports.compare.variants import Variant
from reports.parts.plots import ACCENT, INK, apart, drawn, finite, grid, place_of, svg
from reports.parts.text import clean, plural

MAX_ROWS, MAX_BLOCKS, LEVELS = 40, 64, 8


class HeatRow(NamedTuple):
    """Mean errors of a recipe by kind of linear and over all blocks, and its worst block."""

    number: int
    recipe: str
    run: str
    cells: list[float | None]
    all: float
    worst: int
    error: float


@dataclass(frozen=True)
class HeatMap:
    """The figure, its description, and the same as a table: kinds of linears as columns, mean errors as cells."""

    figure: str
    said: str
    kinds: list[str]
    rows: list[HeatRow]
    hidden: int


def heat_map(found: Sequence[Variant], scale: float = 1.0) -> HeatMap | None:
    """Geometric means of the relative output errors of the linears of each block; None if no run has any."""
    own, most = [v for v in found if v.name == "compressed"], max(4, round(MAX_ROWS * scale))
    shown, left = [], iter(own)
    for v in left:
        if errors := _errors(v):
            shown.append((v, errors))
        if len(shown) == most:
            break
    if not shown:
        return None
    hidden = sum(bool(v.run.source or v.run.layers) for v in left)
    kinds = list(dict.fromkeys(kind for _, errors in shown for _, kind in errors))[:12]
    rows, lines = [], []
    for v, errors in shown:
        blocks: dict[int, list[float]] = defaultdict(list)
        for (block, _), values in errors.items():
            blocks[block] += values
        means = {block: _mean(values) for block, values in blocks.items()}
        worst = max(means, key=means.get)
        cells = [_mean(e for (_, k), values in errors.items() if k == kind for e in values) for kind in kinds]
        overall = _mean(means.values())
        rows.append(HeatRow(v.number, v.recipe, clean(v.run.key, 100), cells, overall, worst, means[worst]))
        lines.append((f"{v.number} {clean(v.recipe, 30)}", means))
    least, most = min(rows, key=lambda r: r.all), max(rows, key=lambda r: r.all)
    said = f"Relative error of the linears' outputs by block, {plural(len(shown), 'recipe')}. "
    said += f"Least on the whole: #{least.number} {least.recipe} "
    said += f"({least.all:.2e}); most: #{most.number} {most.recipe} ({most.all:.2e}). "
    said += f"The largest error of a block is {max(r.error for r in rows):.2e}."
    return HeatMap(_draw(lines, said), said, [clean(kind, 40) for kind in kinds], rows, hidden)


def _errors(v: Variant) -> dict[tuple[int, str], list[float]]:
    """Errors by block and kind of linear."""
    found = defaultdict(list)
    for i, layer in enumerate(v.run.layers):
        if finite(layer.error):
            found[place_of(layer.name, i)].append(max(layer.error, 1e-12))
    return found


def _mean(values: Iterable[float]) -> float | None:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else None


@drawn
def _draw(lines: Sequence[tuple[str, dict[int, float]]], said: str) -> str:
    """Cells with an opacity by the logarithm of their error, in a few steps; all cells of a step are one path."""
    span = max(block for _, means in lines for block in means) + 1
    step = -(-span // MAX_BLOCKS)
    cells: dict[tuple[int, int], list[float]] = {}
    for y, (_, means) in enumerate(lines):
        for block, value in means.items():
            cells.setdefault((y, block // step), []).append(value)
    logs = {at: math.log10(_mean(values)) for at, values in cells.items()}
    low, high = min(logs.values()), max(logs.values())
    figure, axes = grid(2, 2, height=0.26 * len(lines), extra=1.25, width_ratios=(40, 1))
    ax, bar = axes.flat
    for level in range(LEVELS):
        places = [at for at, value in logs.items() if _level(value, low, high) == level]
        _fill(ax, [(x - 0.47, y - 0.45, 0.94, 0.9) for y, x in places], level)
        _fill(bar, [(0, level + 0.04, 1, 0.92)], level)
    ax.set_xlim(-0.5, -(-span // step) - 0.5)
    ax.set_ylim(len(lines) - 0.5, -0.5)
    ax.set_yticks(range(len(lines)), [label for label, _ in lines])
    at = range(0, -(-span // step), max(1, span // step // 15))
    ax.set_xticks(at, [str(x * step) for x in at])
    ax.set_xlabel("block")
    bar.set_xlim(0, 1)
    bar.set_ylim(0, LEVELS)
    ends = [low + (high - low) * part for part in (0, 0.5, 1)]
    bar.set_yticks([0, LEVELS / 2, LEVELS], apart([10**e for e in ends]))
    bar.set_xticks([])
    bar.yaxis.tick_right()
    for one in (ax, bar):
        one.tick_params(length=0)
        for spine in one.spines.values():
            spine.set_visible(False)
    bar.set_title("error", fontsize=9, color=INK)
    return svg(figure, "heat", said)


def _level(value: float, low: float, high: float) -> int:
    return min(LEVELS - 1, int(LEVELS * (value - low) / (high - low))) if high > low else LEVELS // 2


def _fill(ax: Any, boxes: list[tuple[float, float, float, float]], level: int) -> None:
    if boxes:
        paths = [Path([(x, y), (x + w, y), (x + w, y + h), (x, y + h), (x, y)], closed=True) for x, y, w, h in boxes]
        alpha = 0.06 + 0.94 * level / (LEVELS - 1)
        ax.add_patch(PathPatch(Path.make_compound_path(*paths), fc=ACCENT, alpha=alpha, lw=0))
