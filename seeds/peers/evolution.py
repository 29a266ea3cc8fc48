"""The program of `fit` beside an evolutionary search, on the same solved weights and for the same bytes.

Every choice is solved once for every linear, on the activations of the original model. The program picks one choice for
each layer by the sum of losses, which are measured layer by layer. The evolution knows no losses of layers: it
measures the divergence of whole models, which differ from their parent by some layers with more bits and others with
fewer. It starts once from one choice everywhere, and once from what the program picked, so that what the sums cannot
see shows itself. Both are scored on text that neither saw. The last line is JSON.

Source: EvoPress, arXiv:2410.14649, algorithm 1: level switches that keep the budget, one parent, and a selection in two
stages, the second with more tokens.

    python seeds/peers/evolution.py --megabytes 72 80 90 --generations 80
"""

import argparse
import json
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor
from tqdm.auto import tqdm

from compress import apply, calibration, load_model
from compress.allocation.predictions import divergence
from compress.linear import sharing_copy
from compress.search.choices import search_method
from compress.search.library import Library, measure_library
from compress.search.program import LayersProgram
from kernels.support.deploy import deployed

CHOICES = (
    "gptq(bits={3,4,5,6}, group_size=32, scale_dtype=int6, sequential=False); "
    "rtn(bits={4,5,6,8}, group_size=32, scale_dtype=int6, scale=search, where=embedding)"
)
FIRST = 512  # tokens on which all offspring are measured
SURVIVORS = 3  # of these, measured on all tokens of the selection
Chosen = dict[str, str]


class Models:
    """Whole models of solved weights, and their divergence from the original."""

    def __init__(self, model, library: Library, batches, selecting: list[Tensor], held_out: list[Tensor]) -> None:
        self.library, self.solved = library, dict[tuple[str, str], Tensor]()
        self.model = deployed(model)
        self.texts = {"first": [selecting[0][:, :FIRST]], "all": selecting, "held out": held_out}
        self.expected = {name: self._logits(texts) for name, texts in self.texts.items()}
        for text, method in library.method.methods.items():
            made = apply([method], sharing_copy(model), batches).model
            for layer in library.layers.values():
                for member in layer.members if text in layer.choices else ():
                    parts = made.get_submodule(member).parts
                    self.solved[member, text] = sum(part.dequantize() for part in parts).to(torch.bfloat16)
        self.measured = 0

    @torch.no_grad()
    def _logits(self, texts: list[Tensor]) -> list[Tensor]:
        return [self.model(text, use_cache=False).logits for text in texts]

    def loss(self, chosen: Chosen, on: str) -> float:
        """Nats per token, of weights in bfloat16."""
        for name, text in chosen.items():
            for member in self.library.layers[name].members:
                self.model.get_submodule(member).weight.data = self.solved[member, text]
        self.measured += 1
        return divergence(self.expected[on], self._logits(self.texts[on]))


def evolve(models: Models, program: LayersProgram, start: Chosen, budget: float, settings, seed: int) -> dict:
    """The best model of some generations, and how it came about."""
    draw, parent, curve = random.Random(seed), start, []
    best, begin = models.loss(parent, "all"), time.perf_counter()
    for generation in tqdm(range(settings.generations), desc="generations"):
        children = [child(program, parent, budget, draw) for _ in range(settings.offspring)]
        children = sorted(children, key=lambda one: models.loss(one, "first"))[:SURVIVORS]
        for one in children:
            if (loss := models.loss(one, "all")) < best:
                parent, best = one, loss
        curve.append((generation + 1, round(best, 5)))
    return {"selected": best, "held_out": models.loss(parent, "held out"), "bytes": round(program.of(parent).bytes),
            "seconds": round(time.perf_counter() - begin), "curve": curve[:: max(len(curve) // 10, 1)]}  # fmt: skip


def child(program: LayersProgram, parent: Chosen, budget: float, draw: random.Random) -> Chosen:
    """A copy of which some layers have the next more bytes, and others fewer until the budget is kept."""
    own = dict(parent)
    for _ in range(min(draw.randint(1, 4), draw.randint(1, 4))):
        name = draw.choice(list(own))
        own[name] = step(program, name, own[name], 1)
    while program.of(own).bytes > budget:
        name = draw.choice(list(own))
        own[name] = step(program, name, own[name], -1)
    return own


def step(program: LayersProgram, name: str, text: str, by: int) -> str:
    """The choice of a layer with the next more bytes, or the next fewer; the same at the end."""
    order = sorted(program.layers[name], key=lambda one: program.layers[name][one].bytes)
    return order[min(max(order.index(text) + by, 0), len(order) - 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--megabytes", type=float, nargs="+", default=[72.0, 80.0, 90.0])
    parser.add_argument("--generations", type=int, default=80)
    parser.add_argument("--offspring", type=int, default=12)
    parser.add_argument("--corpus", default="c4")
    settings = parser.parse_args()
    model, tokenizer = load_model(settings.model)
    batches = calibration(tokenizer, corpus=settings.corpus, samples=32, seqlen=512)
    further = batches.further(8)
    library = measure_library(model, batches, search_method(CHOICES, tokens=512))
    program = LayersProgram(library.costs(None))
    models = Models(model, library, batches, further[:4], further[4:])
    rows = []
    for megabytes in settings.megabytes:
        budget = 1e6 * megabytes - library.beside
        chosen = program.best("loss", {"bytes": budget})
        even = program.uniform("loss", {"bytes": budget}, library.kinds())
        if chosen is None or even is None:
            raise SystemExit(f"--megabytes {megabytes:g} is too small for these choices")
        row = {"megabytes": megabytes, "uniform": {"held_out": models.loss(even, "held out")}}
        row["program"] = {"selected": models.loss(chosen, "all"), "held_out": models.loss(chosen, "held out")}
        row["evolution"] = evolve(models, program, even, budget, settings, seed=0)
        row["from the program"] = evolve(models, program, chosen, budget, settings, seed=1)
        rows.append(row)
        for name in ("uniform", "program", "evolution", "from the program"):
            print(f"{megabytes:g} MB  {name:18} {row[name]['held_out']:.4f} nats per token on text that none saw")
    print(json.dumps({"model": settings.model, "measured": models.measured, **vars(settings), "rows": rows}))


if __name__ == "__main__":
    main()
