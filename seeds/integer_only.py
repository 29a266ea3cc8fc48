"""What each operation of a model loses when it is computed in integers alone, with a power of two for each tile (BCT).

    python seeds/integer_only.py --bits 8 4

Each operation is rounded by itself, in a float32 model, and then all of them at once. Weights have tiles of 16 rows by
`--group-size` columns, activations groups of as many; exponentials of softmax come from a table of 2^bits entries.
Residual sums, rotary embeddings and products of two activations are not rounded. A head that is tied to the embedding
counts with both.
"""

import argparse

import torch
from scoring import write_rows
from torch import Tensor, nn

from compress import held_out, load_model
from compress.grid.emulate import OPS, emulate
from compress.inputs.calibration import beginning
from eval.text.divergence import compare_on_text


class Emulated(nn.Module):
    """A model that computes these operations in integers while it is called.

    Args:
        settings: of `compress.grid.emulate.emulate`.
    """

    def __init__(self, model: nn.Module, **settings) -> None:
        super().__init__()
        self.model, self.settings = model, settings

    @property
    def device(self) -> torch.device:
        return self.model.device

    def forward(self, ids: Tensor, **how):
        with emulate(self.model, "int", scale_dtype="tile16", **self.settings):
            return self.model(ids, **how)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--bits", type=int, nargs="+", default=[8, 4])
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--text", default="wikitext2")
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--windows", type=int, default=2, help="to score")
    parser.add_argument("--out", help="JSON to write")
    given = parser.parse_args()
    model, tokenizer = load_model(given.model)
    cases: dict[str, dict] = {op: {"ops": (op,)} for op in OPS}
    cases |= {"inputs of linears": {"ops": (), "inputs": True}, "all": {"ops": OPS, "inputs": True}}
    models = {
        f"{bits} | {name}": Emulated(model, bits=bits, group_size=given.group_size, **case)
        for bits in given.bits
        for name, case in cases.items()
    }
    how = {"window": given.window, "limit": given.windows, "beginning": beginning(tokenizer)}
    perplexities, divergences = compare_on_text(model, models, held_out(tokenizer, corpus=given.text), **how)
    print("| bits | operation | perplexity | KL |\n| ---: | --- | ---: | ---: |")
    print(f"| – | none | {perplexities['baseline'].value:.2f} | – |")
    rows: dict[str, dict] = {"none": {"perplexity": perplexities["baseline"].value}}
    for name, divergence in divergences.items():
        error = "" if divergence.kl_stderr is None else f" ± {divergence.kl_stderr:.4f}"  # one window has none
        print(f"| {name} | {perplexities[name].value:,.2f} | {divergence.kl:.4f}{error} |")
        rows[name.replace(" |", " bits,")] = {"perplexity": perplexities[name].value, "kl": divergence.kl}
    write_rows(given.out, given, rows)


if __name__ == "__main__":
    main()
