"""Recipes at several strengths, each scored on text and freed before the next: the loss of accuracy as more is
removed."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from compress import Result, apply
from compress.grammar import split_recipes
from compress.linear import sharing_copy
from compress.method import Method, settle
from compress.plan import check_recipe
from compress.recipe import parse_variants
from compress.walk.identity import code_sha256, tokens_sha256, weights_sha256
from eval.evaluate import score_text
from eval.machine.size import size
from eval.record.files import write_whole
from eval.record.html import html_table
from eval.record.reading import read_json
from eval.record.rows import typed
from kernels.support.deploy import cast
from reports.page.pruning import against_strength
from reports.parts.figures import Figures


@dataclass(frozen=True)
class Strengths:
    """The results in the form of the record (`eval.run_record`); shown in Jupyter as a figure and as a table."""

    found: dict[str, Any]

    def _repr_html_(self) -> str:
        if not self.found["lines"]:
            return "<p>No `curves` were asked for.</p>"
        lines = (
            (line["recipe"], *(f"{p['value']}: {_perplexity(p['scores']):.4g}" for p in line["points"]))
            for line in self.found["lines"]
        )
        drawn = against_strength(typed({"strengths": self.found}).strengths)
        return Figures("", {"Perplexity against strength": drawn})._repr_html_() + html_table((), lines)


def _perplexity(scores: dict[str, float]) -> float:
    return next(value for metric, value in scores.items() if metric.startswith("perplexity_"))


def recipes_at(curves: str, also: Iterable[type[Method]] = ()) -> dict[str, list[tuple[str, list[Method]]]]:
    """The recipes of each curve: {text with {} in the place of its strengths: [(strength, methods), ...]}.

    Args:
        curves: recipes separated by semicolons, each with the strengths of one knob in braces: "wanda(ratio={0.3,
            0.5}); layer_drop(count={1, 2})".
        also: further methods that the text may name, beside METHODS.

    Raises:
        ValueError: a curve has no strengths in braces, is given twice, or its recipe is not valid at a strength.
    """
    lines: dict[str, list[tuple[str, list[Method]]]] = {}
    for text in split_recipes(curves):
        line, variants = parse_variants(text, "curves", also)
        if len(variants[0].values) != 1:
            raise ValueError(
                f"`curves` (={curves!r}): {text!r} must have its strengths in braces, once, as in "
                "wanda(ratio={0.3, 0.5})"
            )
        if line in lines:
            raise ValueError(
                f"`curves` (={curves!r}) holds {line!r} twice; all its strengths go into one pair of braces"
            )
        lines[line] = [(variant.values[0], variant.methods) for variant in variants]
        for _, recipe in lines[line]:
            settle(recipe)
    return lines


def check_strengths(recipes: dict[str, list[tuple[str, list[Method]]]], model: nn.Module) -> None:
    """Raise ValueError, before any work, if a recipe does not fit the model."""
    for line in recipes.values():
        for _, recipe in line:
            check_recipe(recipe, model)


def score_strengths(
    recipes: dict[str, list[tuple[str, list[Method]]]],
    baseline: nn.Module,
    batches: Sequence[Tensor],
    *,
    texts: dict[str, Tensor],
    window: int,
    max_windows: int | None = None,
    beginning: Sequence[int] = (),
    bos: str = "once",
    device: str | None = None,
    work_path: str | Path | None = None,
    calibrate: str = "sequential",
) -> Strengths:
    """Apply every recipe to a copy of the baseline and score it on the texts; nothing is timed.

    Args:
        recipes: as `recipes_at` gives them.
        texts, window, max_windows, beginning, bos: as in `eval.evaluate.evaluate`.
        work_path: folder that keeps finished points, and data that several strengths share.
        calibrate: as in `compress.apply.apply`; with "once", strengths share their statistics in `work_path`.

    Raises:
        ValueError: a recipe does not fit the model; raised before any work.
    """
    check_strengths(recipes, baseline)
    identity = [
        tokens_sha256(list(batches)),
        tokens_sha256(list(texts.values())),
        list(beginning),
        bos,
        window,
        max_windows,
    ]
    about = [weights_sha256(baseline), *identity, sorted(texts), code_sha256(), calibrate] if work_path else []
    progress = tqdm(total=sum(map(len, recipes.values())), desc="strengths", unit="recipe")
    lines = []
    for text, line in recipes.items():
        points = []
        for value, recipe in line:
            progress.set_postfix_str(f"{text}, {value}")
            path = _place(work_path, [*about, text, value]) if work_path else None
            point = read_json(path) if path else {}
            if not point:
                result = apply(
                    recipe,
                    sharing_copy(baseline),
                    batches,
                    device=device,
                    work_path=work_path,
                    calibrate=calibrate,
                )
                scores = score_text(
                    result.model,
                    baseline,
                    texts,
                    window=window,
                    max_windows=max_windows,
                    beginning=beginning,
                    bos=bos,
                )
                point = {"value": value, **_taken(result), "seconds": round(result.seconds, 1), "scores": scores}
                point["scores"]["stored_bytes"] = size(cast(result.model, torch.bfloat16)).stored_bytes
                del result
                if path:
                    write_whole(json.dumps(point), path)
            points.append(point)
            progress.update()
        lines.append({"recipe": text, "points": points})
    progress.close()
    return Strengths({"lines": lines})


def _taken(result: Result) -> dict[str, Any]:
    """The number of weights that are 0 or removed, and the dropped parts."""
    zeros = sum((layer.sparsity or 0.0) * layer.weights for layer in result.layers)
    return {
        "removed_parameters": round(zeros) + sum(drop.parameters for drop in result.drops),
        "dropped": [
            drop.name
            for drop in sorted(result.drops, key=lambda drop: drop.order or 0)
            if drop.order and drop.left is None
        ],
    }


def _place(work_path: str | Path, about: list[Any]) -> Path:
    key = hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()[:16]
    folder = Path(work_path) / "strengths"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{key}.json"
