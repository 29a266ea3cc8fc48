"""What each part of GPTQ gives: the default, and each part switched off by itself, on the same tokens.

$ python seeds/ablation_gptq.py --out reports/published/gptq-ablation-smollm2-135m.json

prints a markdown table and writes a JSON record: per model perplexity and KL divergence from the float32 baseline with
standard errors, and the difference of each from the default, paired over windows.
"""

import argparse
import copy
import dataclasses
import json
import math
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compress import METHODS, apply, held_out, load_model
from compress.inputs.calibration import beginning, calibration
from compress.method import Method
from compress.weights.gptq import GPTQ
from eval.run_record import provenance
from eval.text.divergence import compare_on_text
from eval.text.windows import mean_and_stderr

DEFAULT = "default"
SWITCHED_OFF = {  # row of the table: the knobs that switch one part off
    "first tokens weighted as any other": {"sink_weight": 1},
    "first tokens left out of H": {"sink_weight": 0},
    "scales of one sign": {"scale": "clip"},
    "scales that cover (no search)": {"scale": "absmax"},
    "scales fixed beforehand (no refit)": {"refit": False},
    "linears of a block solved side by side (not sequential)": {"sequential": False},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MedianDamped(GPTQ):
    """GPTQ whose damping is a fraction of the median of diag(H)."""

    def solve(self, W: Tensor, statistics: Any) -> list[Any]:
        diagonal = self.hessian(statistics).diagonal()
        fraction = self.damp * float(diagonal[diagonal > 0].median() / diagonal.mean())
        return GPTQ(**self.values() | {"damp": fraction}).solve(W, statistics)


def candidates(bits: int, group_size: int) -> dict[str, Method]:
    """Every method of the table by its row's name."""
    same = {"bits": bits, "group_size": group_size}
    return {
        DEFAULT: METHODS["gptq"](**same),
        **{name: METHODS["gptq"](**same, **knobs) for name, knobs in SWITCHED_OFF.items()},
        "damped by a share of the median of diag(H)": MedianDamped(**same),
        "no feedback: rounding, scales searched": METHODS["rtn"](**same, scale="search"),
        "no feedback: rounding, scales that cover": METHODS["rtn"](**same),
    }


def window_scores(
    baseline: nn.Module, models: dict[str, nn.Module], ids: Tensor, window: int, windows: int, prefix: list[int]
) -> Iterator[dict[str, tuple[float, float]]]:
    """Per window of `ids` [1, n]: {model: (negative log-likelihood, KL), both in nats per token}."""
    step = window - len(prefix)
    for start in range(0, min(windows, ids.shape[1] // step) * step, step):
        part = ids[:, start : start + step]
        losses, divergences = compare_on_text(baseline, models, part, window=window, beginning=prefix, bos="each")
        nll = {name: math.log(loss.value) for name, loss in losses.items()}
        yield {name: (nll[name], divergences[name].kl if name in divergences else 0.0) for name in nll}


def summary(scores: Sequence[dict[str, tuple[float, float]]]) -> dict[str, dict[str, float | None]]:
    """Perplexity and KL of every model with standard errors, windows as clusters, and its differences from the
    default."""
    ones = [1] * len(scores)
    rows = {}
    for name in scores[0]:
        nll, nll_stderr = mean_and_stderr([s[name][0] for s in scores], ones)
        kl, kl_stderr = mean_and_stderr([s[name][1] for s in scores], ones)
        row = {"perplexity": math.exp(nll), "perplexity_stderr": nll_stderr and math.exp(nll) * nll_stderr}
        row |= {"kl": kl, "kl_stderr": kl_stderr}
        for i, metric in enumerate(("nll", "kl")):
            paired = mean_and_stderr([s[name][i] - s[DEFAULT][i] for s in scores], ones)
            row |= {f"{metric}_from_default": paired[0], f"{metric}_from_default_stderr": paired[1]}
        rows[name] = row
    return rows


def table(texts: dict[str, dict[str, dict[str, float]]]) -> str:
    """Markdown: one row per model, for each text perplexity and KL, and KL's paired difference from the default."""
    head, lines = ["GPTQ"], []
    for text in texts:
        head += [f"perplexity, {text}", "against the default", f"KL, {text}", "against the default"]
    for name in next(iter(texts.values())):
        cells = [name]
        for rows in texts.values():
            r = rows[name]
            cells += [f"{r['perplexity']:.2f} ± {r['perplexity_stderr']:.2f}"]
            cells += [_percent(r) if name not in (DEFAULT, "baseline") else "–"]
            cells += ["–" if name == "baseline" else f"{r['kl']:.4f} ± {r['kl_stderr']:.4f}"]
            difference = f"{r['kl_from_default']:+.4f} ± {r['kl_from_default_stderr']:.4f}"
            cells += [difference if name not in (DEFAULT, "baseline") else "–"]
        lines.append(cells)
    rule = ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *lines))


def _percent(row: dict[str, float]) -> str:
    return f"{100 * math.expm1(row['nll_from_default']):+.1f} ± {100 * row['nll_from_default_stderr']:.1f} %"


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--corpus", default="c4", help="to calibrate on")
    parser.add_argument("--samples", type=int, default=32, help="calibration windows")
    parser.add_argument("--seqlen", type=int, default=512, help="tokens in each")
    parser.add_argument("--texts", nargs="+", default=["wikitext2", "essays"], help="to score on")
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--windows", type=int, nargs="+", default=[8, 4], help="of each text")
    parser.add_argument("--only", nargs="*", help="the rows to make, beside the default; all if not given")
    parser.add_argument("--out", type=Path, help="file for the JSON record")
    arguments = parser.parse_args()
    baseline, tokenizer = load_model(arguments.model)
    batches = calibration(
        tokenizer, corpus=arguments.corpus, samples=arguments.samples, seqlen=arguments.seqlen, seed=0
    )
    models: dict[str, nn.Module] = {}
    seconds: dict[str, float] = {}
    for name, method in candidates(arguments.bits, arguments.group_size).items():
        if arguments.only is not None and name not in (DEFAULT, *arguments.only):
            continue
        start = time.perf_counter()
        models[name] = apply([method], copy.deepcopy(baseline), batches).model
        seconds[name] = round(time.perf_counter() - start, 1)
        print(f"{name}: {seconds[name]} s", file=sys.stderr, flush=True)
    scores = {}
    for text, windows in zip(arguments.texts, arguments.windows, strict=True):
        ids, name = held_out(tokenizer, corpus=text), Path(text).parent.name or text  # of a file, its folder
        prefix = beginning(tokenizer)
        scores[name] = list(window_scores(baseline, models, ids, arguments.window, windows, prefix))
    texts = {text: summary(each) for text, each in scores.items()}
    command = shlex.join(["python", *sys.argv])
    record = {
        "settings": {key: value for key, value in vars(arguments).items() if key not in ("out", "only")},
        "calibration": batches.identity,
        "methods": {
            n: {"name": m.name, **m.values()} for n, m in candidates(arguments.bits, arguments.group_size).items()
        },
        "texts": texts,
        "windows": scores,
        "seconds": seconds,
        "provenance": provenance(command, "cpu", "float32", "float32"),
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    print(table(texts))
    print(json.dumps(texts))


if __name__ == "__main__":
    main()
