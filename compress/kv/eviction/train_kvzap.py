"""Train the networks that `kvzap` scores with: KVzip's scores of a model's own texts, predicted from hidden states.

$ python -m compress.kv.eviction.train_kvzap --model smollm2-135m --out kvzap.safetensors
"""

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm.auto import tqdm

from compress.inputs.command import given
from compress.kv.attach import attached
from compress.kv.eviction.kvzap import Scorer
from compress.kv.eviction.kvzip import KVzip

LEAST = 1e-6  # attention below this is as good as none


@torch.no_grad()
def examples(model: nn.Module, batches: Sequence[Tensor]) -> dict[int, tuple[Tensor, Tensor]]:
    """By layer, hidden states [n, hidden] in bfloat16 and the logarithms of KVzip's scores [n, H_kv] of all tokens.

    Args:
        batches: tokens, LongTensors [1, T].
    """
    found: dict[int, list[tuple[Tensor, Tensor]]] = {}
    for ids in tqdm(batches, desc="kvzip's scores", unit="text"):
        with attached(model, [KVzip(budget=1.0)]) as attachment:
            cache = attachment.cache(observes=True)
            model(ids.to(model.device), past_key_values=cache, use_cache=True, logits_to_keep=1)
            scored = cache.compressed(KVzip(budget=1.0))
            for layer, other in zip(cache.own, scored.own, strict=True):
                if layer.slabs:
                    target = other.memory.view[0].T.clamp(min=LEAST).log()
                    found.setdefault(layer.number, []).append((layer.hidden[0].bfloat16().cpu(), target.cpu()))
    return {
        number: (torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])) for number, pairs in found.items()
    }


def fit(
    hidden: Tensor, target: Tensor, *, width: int, epochs: int = 15, rate: float = 3e-3, batch: int = 512, seed: int = 0
) -> tuple[Scorer, float]:
    """A network for one layer, by least squares on a nine-tenths share of the tokens.

    Args:
        hidden: [n, hidden]. target: [n, H_kv].

    Returns:
        the network, and the share of the variance that it explains of the other tenth (R²).
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(hidden), generator=generator)
    held, used = order[: len(order) // 10], order[len(order) // 10 :]
    x, y = hidden.float(), target.float()
    mean, deviation = x[used].mean(0), x[used].std(0).clamp(min=1e-4)
    up = torch.randn(x.shape[1], width, generator=generator) / x.shape[1] ** 0.5
    down = torch.randn(width, y.shape[1], generator=generator) / width**0.5
    parameters = [up, torch.zeros(width), down, y[used].mean(0).clone()]
    with torch.enable_grad():
        for p in parameters:
            p.requires_grad_()
        optimiser = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.01)
        steps = max(len(used) // batch, 1) * epochs
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, total_steps=steps)
        for step in range(steps):
            at = used[torch.randint(len(used), (batch,), generator=generator)]
            loss = (Scorer(mean, deviation, *parameters)(x[at]) - y[at]).square().mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
    scorer = Scorer(mean, deviation, *(p.detach() for p in parameters))
    rest = y[held] - y[held].mean(0)
    return scorer, 1 - ((scorer(x[held]) - y[held]).square().sum() / rest.square().sum().clamp(min=1e-30)).item()


def train(model: nn.Module, batches: Sequence[Tensor], path: str | Path, **more: float) -> dict[int, float]:
    """Write the file that `kvzap(path=...)` takes; `more`: of `fit`, but for the width, an eighth of the hidden size.

    Returns:
        {layer: R² of tokens that were held out}
    """
    width = max(model.config.get_text_config(decoder=True).hidden_size // 8, 8)
    tensors, explained = {}, {}
    for number, (hidden, target) in tqdm(examples(model, batches).items(), desc="networks", unit="layer"):
        scorer, explained[number] = fit(hidden, target, width=width, **more)
        tensors |= {f"{number}.{field}": t.contiguous() for field, t in scorer._asdict().items()}
    save_file(tensors, str(path))
    return explained


def main() -> None:
    start = time.perf_counter()
    model, batches, out = given(__doc__, samples=24)
    explained = train(model, batches, out)
    mean = sum(explained.values()) / len(explained)
    print(f"{out}: {len(explained)} layers, R² {mean:.3f} on average, {min(explained.values()):.3f} at least, "
          f"{time.perf_counter() - start:.0f} s")  # fmt: skip


if __name__ == "__main__":
    main()
