"""Mix networks of several files for `kvzap` into one wider network, which predicts the mean of their predictions.

$ python -m compress.kv.learned.mix --out mixed.safetensors costs.safetensors kvzap.safetensors

Scores are logarithms, so the mean of costs (`train_costs`) and of KVzip's scores (`train_kvzap`) is the logarithm of
their geometric mean: positions stay that are important for both. If networks of one kind were trained on different
texts, some of their errors cancel.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from compress.kv.learned.networks import ScoringNetwork, scorers, write


def mixed(networks: Sequence[ScoringNetwork], weights: Sequence[float]) -> ScoringNetwork:
    """One network that predicts Σ weight · prediction.

    The hidden units of all networks are put side by side. The normalisation of each network's inputs, (x - mean) /
    deviation, becomes part of its first product.
    """
    ups = [network.up / network.deviation[:, None] for network in networks]
    biases = [network.first_bias - network.mean @ up for network, up in zip(networks, ups, strict=True)]
    pairs = list(zip(networks, weights, strict=True))
    inputs = len(ups[0])
    return ScoringNetwork(
        mean=torch.zeros(inputs),
        deviation=torch.ones(inputs),
        up=torch.cat(ups, 1),
        first_bias=torch.cat(biases),
        down=torch.cat([weight * network.down for network, weight in pairs]),
        bias=sum(weight * network.bias for network, weight in pairs),
    )


def mix(files: Sequence[str | Path], path: str | Path, weights: Sequence[float] | None = None) -> None:
    """Write the file that `kvzap(path=...)` takes.

    Args:
        files: the files of networks for the same model.
        weights: the weights of the files; None: equal weights with a sum of 1.

    Raises:
        ValueError: there are no files, the number of weights differs from theirs, or the networks are for different
            models.
    """
    weights = [1 / len(files)] * len(files) if weights is None and files else weights or []
    if not files or len(weights) != len(files):
        raise ValueError(
            f"`weights` (={list(weights)}) must be as many as `files` (={list(map(str, files))}), 1 at least"
        )
    found = [scorers(str(file)) for file in files]
    shapes = [{i: (len(one.up), len(one.bias)) for i, one in by_layer.items()} for by_layer in found]
    for file, shape in zip(files, shapes, strict=True):
        if shape != shapes[0]:
            raise ValueError(f"`files`: {file} holds networks of another model than {files[0]}")
    write({number: mixed([of[number] for of in found], weights) for number in found[0]}, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", nargs="+", help="files of networks, as `train_costs` and `train_kvzap` write them")
    parser.add_argument("--out", required=True, help="file to write")
    parser.add_argument("--weights", type=float, nargs="+", help="weights of the files; default: equal weights")
    options = parser.parse_args()
    mix(options.files, options.out, options.weights)
    print(f"{options.out}: {len(scorers(options.out))} layers, of {len(options.files)} files")


if __name__ == "__main__":
    main()
