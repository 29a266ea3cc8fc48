"""What each part of GPTQ gives: the default, and each part switched off by itself, on the same tokens.

$ python seeds/ablation_gptq.py --out reports/published/ablation/gptq-smollm2-135m.json

prints a markdown table and writes a JSON record: per model perplexity and KL divergence from the float32 baseline with
standard errors, and the difference of each from the default, paired over windows. `--only` makes some of the rows (rows
of one setting are equal whoever makes them), and

$ python seeds/ablation_gptq.py --join one.json another.json

prints one table of the rows of several records of the same settings.
"""

import argparse
import copy
import dataclasses
import json
import math
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compress import METHODS, apply, held_out, load_model
from compress.inputs.calibration import beginning, calibration
from compress.method import Method
from compress.weights.gptq import GPTQ
from eval.run_record import provenance
from eval.text.perplexity import token_losses
from eval.text.windows import Window, chunks, mean_and_stderr, predictions, windows

DEFAULT = "default"
SWITCHED_OFF = {  # row of the table: the knobs that switch one part off
    "first tokens weighted as any other": {"sink_weight": 1},
    "scales of one sign": {"scale": "clip"},
    "scales that cover (no search)": {"scale": "absmax"},
    "scales fixed beforehand (no refit)": {"refit": False},
    "linears of a block solved side by side (not sequential)": {"sequential": False},
    "first tokens left out of H": {"sink_weight": 0},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MedianDamped(GPTQ):
    """GPTQ whose damping is a fraction of the median of diag(H)."""

    def solve(self, W: Tensor, statistics: Any) -> list[Any]:
        diagonal = self.diagonal(statistics)
        fraction = self.damp * float(diagonal[diagonal > 0].median() / diagonal.mean())
        return GPTQ(**self.values() | {"damp": fraction}).solve(W, statistics)


def candidates(bits: int, group_size: int) -> dict[str, Method]:
    """Every method of the table by its row's name."""
    same = {"bits": bits, "group_size": group_size}
    return {
        DEFAULT: METHODS["gptq"](**same),
        "no feedback: rounding, scales searched": METHODS["rtn"](**same, scale="search"),
        "no feedback: rounding, scales that cover": METHODS["rtn"](**same),
        "damped by a share of the median of diag(H)": MedianDamped(**same),
        **{name: METHODS["gptq"](**same, **knobs) for name, knobs in SWITCHED_OFF.items()},
    }


class Scorer:
    """Scores models on the windows of one text, against the predictions of a baseline that are held in memory."""

    def __init__(self, baseline: nn.Module, cut: Sequence[Window]) -> None:
        self.cut = cut
        self.expected = [predictions(baseline, window)[0].float().log_softmax(-1) for window in cut]

    def score(self, model: nn.Module) -> list[tuple[float, float]]:
        """Per window: negative log-likelihood and KL divergence from the baseline, both in nats per token."""
        scores = []
        for window, expected in zip(self.cut, self.expected, strict=True):
            logits, tokens = predictions(model, window)
            nll, kl = float(token_losses(logits, tokens).mean()), 0.0
            for at in chunks(len(tokens)):
                difference = expected[at] - logits[at].float().log_softmax(-1)
                kl += float((expected[at].exp() * difference).double().sum())
            scores.append((nll, kl / len(tokens)))
        return scores


def summary(scores: dict[str, list[tuple[float, float]]]) -> dict[str, dict[str, float | None]]:
    """Perplexity and KL of every model with standard errors, windows as clusters, and its differences from the
    default."""
    rows = {}
    for name, each in scores.items():
        ones = [1] * len(each)
        nll, nll_stderr = mean_and_stderr([w[0] for w in each], ones)
        kl, kl_stderr = mean_and_stderr([w[1] for w in each], ones)
        row = {"perplexity": math.exp(nll), "perplexity_stderr": nll_stderr and math.exp(nll) * nll_stderr}
        row |= {"kl": kl, "kl_stderr": kl_stderr}
        for i, metric in enumerate(("nll", "kl")):
            paired = [w[i] - d[i] for w, d in zip(each, scores[DEFAULT], strict=True)]
            row[f"{metric}_from_default"], row[f"{metric}_from_default_stderr"] = mean_and_stderr(paired, ones)
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


def joined(files: Sequence[Path]) -> dict[str, dict[str, dict[str, float | None]]]:
    """Summaries per text of the rows of several records.

    Raises:
        ValueError: records of different settings.
    """
    records = [json.loads(file.read_text()) for file in files]
    scores = records[0]["windows"]
    for file, record in zip(files, records, strict=True):
        if (record["settings"] | {"join": None}) != (records[0]["settings"] | {"join": None}):
            raise ValueError(f"`--join`: {file} has other settings than {files[0]}")
        for text, rows in record["windows"].items():
            scores[text] |= rows
    order = ["baseline", *candidates(bits=4, group_size=64)]
    return {text: summary({name: rows[name] for name in order if name in rows}) for text, rows in scores.items()}


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
    parser.add_argument("--only", nargs="*", help="the rows to make, in this order; all if not given")
    parser.add_argument("--out", type=Path, help="file for the JSON record")
    parser.add_argument("--join", nargs="+", type=Path, help="records to print in one table; nothing is measured")
    arguments = parser.parse_args()
    if arguments.join:
        print(table(joined(arguments.join)))
        return
    baseline, tokenizer = load_model(arguments.model)
    batches = calibration(
        tokenizer, corpus=arguments.corpus, samples=arguments.samples, seqlen=arguments.seqlen, seed=0
    )
    prefix = beginning(tokenizer)  # before every window, as in calibration
    scorers, scores = {}, {}
    for text, limit in zip(arguments.texts, arguments.windows, strict=True):
        name, ids = Path(text).parent.name or text, held_out(tokenizer, corpus=text)  # of a file, its folder
        cut = windows(ids, window=arguments.window, limit=limit, beginning=prefix, bos="each")
        scorers[name] = Scorer(baseline, cut)
        scores[name] = {"baseline": scorers[name].score(baseline)}
    methods = candidates(arguments.bits, arguments.group_size)
    if arguments.only is not None:
        methods = {name: methods[name] for name in arguments.only}
    record = {
        "settings": {key: value for key, value in vars(arguments).items() if key not in ("out", "only", "join")},
        "calibration": batches.identity,
        "methods": {name: {"name": method.name, **method.values()} for name, method in methods.items()},
        "seconds": {},
        "windows": scores,
        "provenance": provenance(shlex.join(["python", *sys.argv]), "cpu", "float32", "float32"),
    }
    for name, method in methods.items():
        start = time.perf_counter()
        model = apply([method], copy.deepcopy(baseline), batches).model
        record["seconds"][name] = round(time.perf_counter() - start, 1)
        for text, scorer in scorers.items():
            scores[text][name] = scorer.score(model)
        if arguments.out:  # after every row, so that a run that is stopped leaves what it has
            arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    if all(DEFAULT in each for each in scores.values()):
        texts = {text: summary(each) for text, each in scores.items()}
        print(table(texts))
        print(json.dumps(texts))


if __name__ == "__main__":
    main()
