"""The head as clusters of tokens (VQ-Logits): what it loses, and the least that it could.

    python seeds/vq_logits.py

Rows of the head are put into clusters by k-means, and a token's logit is the product with its cluster's centre. All
tokens of a cluster have one logit then, so that the loss is at least -log p(token | cluster): `floor` is its mean with
equal chances, `floor with bias` with a fixed bias for each token, which is its frequency in the calibration text.
Residual clusters (a second k-means of what the first leaves) tell tokens apart. The head in 4 bits stands beside them.
Scored in float32 on windows of raw wikitext-2; the embedding stays as it is.
"""

import argparse
import copy
import json
import math

import torch
from sklearn.cluster import MiniBatchKMeans
from torch import Tensor, nn
from tqdm.auto import tqdm

from compress import held_out, load_model
from compress.inputs.calibration import beginning, calibration
from compress.weights.rtn import rtn
from eval.text.perplexity import perplexity
from eval.text.windows import windows


class ClusteredHead(nn.Module):
    """logit of a token = sum over stages of x · centre of its cluster, plus its bias.

    Args:
        stages: (centres [clusters, hidden], cluster of each token [vocabulary]).
        bias: [vocabulary].
    """

    def __init__(self, stages: list[tuple[Tensor, Tensor]], bias: Tensor) -> None:
        super().__init__()
        self.stages, self.bias = stages, bias

    def forward(self, x: Tensor) -> Tensor:
        return sum((x @ centres.T)[..., cluster] for centres, cluster in self.stages) + self.bias

    @property
    def stored_bytes(self) -> int:
        """Centres in 16 bits, as many bits as a cluster's number has, and the bias in 16 bits if there is one."""
        numbers = sum(math.ceil(math.log2(len(centres))) * len(cluster) // 8 for centres, cluster in self.stages)
        centres = sum(2 * centres.numel() for centres, _ in self.stages)
        return centres + numbers + (2 * self.bias.numel() if self.bias.any() else 0)


def clusters(W: Tensor, count: int) -> tuple[Tensor, Tensor]:
    found = MiniBatchKMeans(count, n_init=1, max_iter=20, batch_size=8192, random_state=0).fit(W.numpy())
    return torch.from_numpy(found.cluster_centers_).float(), torch.from_numpy(found.labels_).long()


def frequencies(tokenizer, vocabulary: int) -> Tensor:
    """How often each token is in the calibration text, and once more."""
    batches = calibration(tokenizer, corpus="c4", samples=128, seqlen=512, seed=0)
    return torch.bincount(torch.cat([batch.flatten() for batch in batches]), minlength=vocabulary).float() + 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--clusters", type=int, nargs="+", default=[256, 1024, 4096, 16384])
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--window", type=int, default=2048)
    given = parser.parse_args()
    model, tokenizer = load_model(given.model)
    W = model.get_output_embeddings().weight.detach().clone()
    ids, first = held_out(tokenizer, corpus="wikitext2"), beginning(tokenizer)
    cut = windows(ids, window=given.window, limit=given.windows, beginning=first)
    scored = torch.cat([window.tokens[0, -window.scored :] for window in cut])
    counts, none = frequencies(tokenizer, len(W)), torch.zeros(len(W))
    rows: list[dict] = []

    def measure(name: str, head: nn.Module, nbytes: int, cluster: Tensor | None = None) -> None:
        changed = copy.copy(model)
        changed._modules = {**model._modules, "lm_head": head}
        found = perplexity(changed, ids, window=given.window, limit=given.windows, beginning=first)
        row = {"head": name, "MB": nbytes / 1e6, "perplexity": found.value}
        if cluster is not None:
            size, mass = (
                torch.bincount(cluster).float(),
                torch.zeros(int(cluster.max()) + 1).index_add_(0, cluster, counts),
            )
            row["floor"] = float(size[cluster[scored]].log().mean().exp())
            row["floor with bias"] = float((mass[cluster[scored]] / counts[scored]).log().mean().exp())
        rows.append(row)

    def linear(weight: Tensor) -> nn.Linear:
        made = nn.Linear(*weight.shape[::-1], bias=False)
        made.weight = nn.Parameter(weight, requires_grad=False)
        return made

    measure("16 bits", linear(W), 2 * W.numel())
    four = rtn(W, bits=4, group_size=32)
    measure("4 bits, groups of 32", linear(four.dequantize()), four.nbytes)
    for count in tqdm(given.clusters, desc="clusters"):
        centres, cluster = clusters(W, count)
        size, mass = torch.bincount(cluster, minlength=count), torch.zeros(count).index_add_(0, cluster, counts)
        bias = (counts * size[cluster] / mass[cluster]).log()
        residual = clusters(W - centres[cluster], count)
        for name, stages, b in (
            (f"{count} clusters", [(centres, cluster)], none),
            (f"{count} clusters, bias", [(centres, cluster)], bias),
            (f"{count} + {count} clusters", [(centres, cluster), residual], none),
        ):
            head = ClusteredHead(stages, b)
            measure(name, head, head.stored_bytes, cluster if len(stages) == 1 else None)
    columns = ["head", "MB", "perplexity", "floor", "floor with bias"]
    print("| " + " | ".join(columns) + " |\n| --- | ---: | ---: | ---: | ---: |")
    for row in rows:
        print("| " + " | ".join([row["head"], *(f"{row[c]:.2f}" if c in row else "–" for c in columns[1:])]) + " |")
    print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
