"""What was taken away: zeros by layer, what they cost, which layers matter, and accuracy against all of it."""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from reports.page.strengths import strength_tables
from reports.parts import plots
from reports.parts.figures import Figures
from reports.parts.plots import ACCENT, SECOND, Line

SPARSE = 0.005  # below this share of zeros a weight is not called sparse: rounding makes some too
_KINDS = {"attention": "attention", "mlp": "MLPs", "block": "blocks"}


def figures(layers: Iterable[Any], drops: Iterable[Any]) -> Figures:
    """The figures of `Result.layers` and `Result.drops` (or of a record's), for a notebook."""
    plain = (
        [dataclasses.asdict(one) if dataclasses.is_dataclass(one) else one for one in many] for many in (layers, drops)
    )
    told = context(*plain, {})
    if not told:
        return Figures("Nothing was set to 0 or dropped.", {})
    titles = {
        "importance": "What each layer does to the residual stream",
        "sparsity": "Zeros by layer",
        "distortion": "Distortion curves",
    }
    return Figures(" ".join(told["said"]), {title: told[key] for key, title in titles.items() if told[key]})


def context(
    layers: list[dict[str, Any]],
    drops: list[dict[str, Any]],
    strengths: dict[str, Any],
    ratios: dict[str, float] | None = None,
) -> dict[str, Any]:
    """What templates/pruning.html shows of a record; {} where nothing was pruned, dropped or scored at several
    strengths.

    Args:
        ratios: speeds over those of the baseline, {"decode": ..., "prefill": ...}.
    """
    sparse = [layer for layer in layers if layer.get("sparsity", 0) >= SPARSE] if _pruned(layers) else []
    lines = strengths.get("lines", [])
    if not (sparse or drops or lines):
        return {}
    curved = [layer for layer in layers if layer.get("distortion")]
    return {
        "said": [*_said_drops(drops), *_said_zeros(layers, sparse), *_said_speed(drops, sparse, ratios or {})],
        "importance": _importance(drops) if drops else "",
        "sparsity": _sparsity(layers) if sparse and not _even(layers) else "",
        "distortion": _distortion(curved) if curved else "",
        "drops": drops,
        "strengths": strength_tables(strengths),
        "figures": _against_strength(strengths),
    }


def _pruned(layers: list[dict[str, Any]]) -> bool:
    """Were weights set to 0 on purpose? A 3-bit grid rounds some to 0 too: then formats of sparse weights are not among
    them."""
    return any(layer.get("distortion") or layer["format"] in ("bitmap", "sparse24", "dense") for layer in layers)


def _even(layers: list[dict[str, Any]]) -> bool:
    """Has every linear lost the same share? Then there is nothing to draw."""
    shares = [layer["sparsity"] for layer in layers]
    return max(shares) - min(shares) <= 0.01


def _said_drops(drops: list[dict[str, Any]]) -> list[str]:
    said = []
    for kind, name in _KINDS.items():
        own = [drop for drop in drops if drop["kind"] == kind]
        gone = [drop for drop in own if drop["order"]]
        if gone:
            blocks = ", ".join(str(drop["block"]) for drop in sorted(gone, key=lambda drop: drop["block"]))
            said.append(
                f"Dropped: the {name} {'of block ' if kind != 'block' else ''}{blocks} ({len(gone)} of {len(own)}; "
                f"{sum(drop['parameters'] for drop in gone) / 1e6:.1f} M parameters)."
            )
    return said


def _said_zeros(layers: list[dict[str, Any]], sparse: list[dict[str, Any]]) -> list[str]:
    if not sparse:
        return []
    weights = sum(layer["shape"][0] * layer["shape"][1] for layer in layers)
    zeros = sum(layer["sparsity"] * layer["shape"][0] * layer["shape"][1] for layer in layers)
    low, high = min(layer["sparsity"] for layer in layers), max(layer["sparsity"] for layer in layers)
    each = "as many of each" if _even(layers) else f"between {low * 100:.0f} and {high * 100:.0f} % of each"
    bits = sum(layer["bits_per_weight"] * layer["shape"][0] * layer["shape"][1] for layer in layers) / weights
    return [
        f"{zeros / weights * 100:.1f} % of the weights of {len(layers)} linears are 0, {each}. They are stored at "
        f"{bits:.2f} "
        "bits per weight, zeros and what says where they are counted."
    ]


def _said_speed(drops: list[dict[str, Any]], sparse: list[dict[str, Any]], ratios: dict[str, float]) -> list[str]:
    """Plainly, whether zeros pay: floating point operations that need not be done say nothing about it."""
    alone = sparse and not any(drop["order"] for drop in drops) and all("+" not in layer["format"] for layer in sparse)
    floats = [layer for layer in sparse if layer["bits_per_weight"] > 8]
    if not ratios or not alone or len(floats) < len(sparse):  # what quantises too is faster for that
        return []
    measured = " and ".join(
        f"{does} {ratios[what]:.2f}×"
        for what, does in (("decode", "decodes"), ("prefill", "reads prompts"))
        if what in ratios
    )
    if max(ratios.values()) < 1.1:
        return [
            f"The zeros take less room and save no time here: it {measured} as fast as the dense baseline, for the "
            "weights are "
            "laid out with their zeros to be multiplied."
        ]
    return [f"With these zeros it {measured} as fast as the dense baseline."]


def _importance(drops: list[dict[str, Any]]) -> str:
    panels = {}
    for kind, name in _KINDS.items():
        own = sorted((drop for drop in drops if drop["kind"] == kind), key=lambda drop: drop["block"])
        if own:
            panels[name] = [
                Line("dropped", SECOND, [(d["block"], d["importance"]) for d in own if d["order"]], "none", 6),
                Line("all", ACCENT, [(d["block"], d["importance"]) for d in own]),
            ]
    summary = "One minus the cosine of the residual stream before and after each layer, by block, dropped ones marked, log scale."
    return plots.by_depth(panels, key="importance", label="1 − cosine", summary=summary)


def _sparsity(layers: list[dict[str, Any]]) -> str:
    panels: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for i, layer in enumerate(layers):
        block, kind = plots.place_of(layer["name"], i)
        panels[kind].append((block, 100 * layer["sparsity"]))
    lines = {kind: [Line("zeros", ACCENT, points)] for kind, points in panels.items()}
    return plots.by_depth(
        lines, key="sparsity", label="zeros, %", summary="Share of zeros of each linear by block.", log=False
    )


def _distortion(layers: list[dict[str, Any]]) -> str:
    panels: dict[str, list[plots.Curve]] = defaultdict(list)
    for i, layer in enumerate(layers):
        block, kind = plots.place_of(layer["name"], i)
        points = [(100 * float(level), kl) for level, kl in layer["distortion"].items() if kl > 0]
        panels[kind].append(plots.Curve(block, points, 100 * layer["sparsity"]))
    return plots.curves(
        panels,
        key="distortion",
        x_label="zeros in this linear alone, %",
        y_label="KL, nats per token",
        summary="Divergence of the predictions against zeros in one linear alone, a line per block.",
    )


def _against_strength(strengths: dict[str, Any]) -> str:
    panels: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(dict)
    for table in strength_tables(strengths):
        for row in table["rows"]:
            points = [(_as_number(v), cell) for v, cell in zip(table["values"], row["cells"], strict=True) if cell]
            if len(points) > 1 and all(x is not None for x, _ in points):
                whole = all(x == int(x) for x, _ in points)  # counts and shares do not share an axis
                panels[f"{table['corpus']}, {'counts' if whole else 'shares'}"][row["recipe"]] = points
    if not panels:
        return ""
    return plots.against(
        panels,
        key="strengths",
        x_label="what {} stands for",
        y_label="perplexity",
        summary="Perplexity of each recipe against its strength, log scale.",
    )


def _as_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
