"""The difference of a model's predictions from the baseline's on the same text: KL divergence and top-1 agreement."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from eval.text.perplexity import Perplexity, token_losses
from eval.text.windows import LogitSource, Window, all_predictions, chunks, mean_and_stderr, windows


@dataclass(frozen=True)
class Divergence:
    """KL(baseline || model) in nats per token, and the share of positions with the same most likely token."""

    kl: float
    kl_stderr: float | None
    top1_agreement: float
    top1_agreement_stderr: float | None
    tokens: int


def compare_on_text(
    baseline: nn.Module | LogitSource,
    models: dict[str, nn.Module] | dict[str, LogitSource],
    ids: Tensor,
    *,
    window: int = 2048,
    limit: int | None = None,
    beginning: Sequence[int] = (),
    bos: str = "once",
) -> tuple[dict[str, Perplexity], dict[str, Divergence]]:
    """Perplexity of the baseline (under "baseline") and of each model, and each model's divergence, in one pass over
    ids [1, n]; see `eval.text.windows.windows` for the arguments."""
    cut = windows(ids, window=window, limit=limit, beginning=beginning, bos=bos)
    return compare_windows(baseline, models, cut)


def compare_windows(
    baseline: nn.Module | LogitSource,
    models: dict[str, nn.Module] | dict[str, LogitSource],
    cut: Sequence[Window],
    label: str = "perplexity and divergence",
) -> tuple[dict[str, Perplexity], dict[str, Divergence]]:
    """`compare_on_text` for windows that are cut already; label: of the progress bar."""
    counts = [w.scored for w in cut]
    losses: dict[str, list[float]] = {"baseline": [], **{name: [] for name in models}}
    kls: dict[str, list[float]] = {name: [] for name in models}
    same: dict[str, list[float]] = {name: [] for name in models}
    found = {name: all_predictions(model, cut) for name, model in models.items()}
    references = tqdm(all_predictions(baseline, cut), desc=label, unit="window", total=len(cut))
    for reference, tokens in references:
        tokens = tokens.to(reference.device)
        losses["baseline"].append(float(token_losses(reference, tokens).sum()))
        for name, each in found.items():
            logits = next(each)[0].to(reference.device)
            losses[name].append(float(token_losses(logits, tokens).sum()))
            kl, agree = distance(reference, logits)
            kls[name].append(kl)
            same[name].append(agree)
    perplexities = {name: Perplexity.of(sums, counts) for name, sums in losses.items()}
    divergences = {
        name: Divergence(*mean_and_stderr(kls[name], counts), *mean_and_stderr(same[name], counts), sum(counts))
        for name in models
    }
    return perplexities, divergences


def distance(reference: Tensor, logits: Tensor) -> tuple[float, float]:
    """Summed KL(reference || logits) and number of equal most likely tokens, over positions [n, vocabulary]."""
    kl, same = 0.0, 0.0
    for at in chunks(len(reference)):
        p, q = (torch.log_softmax(x[at].float(), -1) for x in (reference, logits))
        kl += float((p.exp() * (p - q)).sum(-1).double().sum())
        same += float((p.argmax(-1) == q.argmax(-1)).sum())
    return kl, same
