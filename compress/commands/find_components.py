"""Find the principal components of keys and values that `matryoshka` projects onto.

$ python -m compress.commands.find_components --model smollm2-135m --out components.safetensors
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm.auto import tqdm

from compress.commands.options import given
from compress.kv.attach import attached
from compress.kv.projecting.matryoshka import rank_of
from compress.kv.storage import joined

SHARES = (0.75, 0.5, 0.375, 0.25)  # shares of the channels for which the command prints the kept share of squares
KINDS = ("keys", "values", "keys before RoPE")


@torch.no_grad()
def second_moments(model: nn.Module, batches: Sequence[Tensor]) -> dict[str, dict[int, Tensor]]:
    """Σ x xᵀ of each kv head, as {kind: {layer: [H_kv, D, D] float64}} for every kind in KINDS.

    Args:
        batches: tokens, LongTensors [1, T].
    """
    found: dict[str, dict[int, Tensor]] = {kind: {} for kind in KINDS}
    for ids in tqdm(batches, desc="keys and values", unit="text"):
        with attached(model) as attachment:
            cache = attachment.cache()
            model(ids.to(model.device), past_key_values=cache, use_cache=True, logits_to_keep=1)
        for layer in cache.filled:
            keys, values, _ = joined(layer.slabs)
            places = torch.arange(keys.shape[2], device=keys.device)[None]
            turned_back = layer.about["turn"](keys.float(), places, True)
            for kind, x in zip(KINDS, (keys, values, turned_back), strict=True):
                x = x[0].double().cpu()
                found[kind][layer.number] = found[kind].get(layer.number, 0) + x.mT @ x
    return found


def principal(moment: Tensor) -> tuple[Tensor, Tensor]:
    """The eigenvectors of second moments [H, D, D] as columns, the largest first, and their eigenvalues [H, D]."""
    values, vectors = torch.linalg.eigh(moment)
    return vectors.flip(-1), values.flip(-1).clamp(min=0)


def kept_share(moment: Tensor, share: float) -> float:
    """The share of the squares that the first components of second moments [H, D, D] keep, mean over heads."""
    values = principal(moment)[1]
    kept = values[:, : rank_of(share, values.shape[1])].sum(1) / values.sum(1).clamp(min=1e-30)
    return kept.mean().item()


def find(model: nn.Module, batches: Sequence[Tensor], path: str | Path) -> dict[str, dict[float, float]]:
    """Write a file for `matryoshka(path=...)`.

    Returns:
        {kind: {share of the channels: share of the squares that the first components keep, mean over layers}}
    """
    moments = second_moments(model, batches)
    tensors = {
        f"{layer}.{kind}": principal(moment)[0].float().contiguous()
        for kind in ("keys", "values")
        for layer, moment in moments[kind].items()
    }
    save_file(tensors, str(path))
    return {
        kind: {share: sum(kept_share(m, share) for m in of.values()) / len(of) for share in SHARES}
        for kind, of in moments.items()
    }


def main() -> None:
    start = time.perf_counter()
    model, batches, options = given(__doc__, samples=16)
    kept = find(model, batches, options.out)
    print(f"{options.out}: share of the squares that the first components keep, {time.perf_counter() - start:.0f} s")
    print(f"{'channels':>18}", *(f"{share:>7.1%}" for share in SHARES))
    for kind, of in kept.items():
        print(f"{kind:>18}", *(f"{of[share]:>7.1%}" for share in SHARES))
    print(json.dumps({**vars(options), **kept}))


if __name__ == "__main__":
    main()
