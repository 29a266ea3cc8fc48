"""Free-running text: models continue the same passages on their own, each token behind those that they wrote.

Scores of the next token in a given text do not show whether a model's own text goes wrong, since the given text brings
it back at every token: rotated models in 2 bits were reported to keep their likelihood and to write nonsense
(arXiv:2603.04162). Therefore, both are measured: what each model writes, and its predictions along the text that the
baseline writes.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from eval.text.divergence import Divergence, compare_windows
from eval.text.through_cache import attachment
from eval.text.windows import Window, mean_and_stderr
from eval.writing.generation import Written, first_difference, write
from kernels.linear import fast_linear
from kernels.support.positions import positions

PASSAGES = 16
PASSAGE_TOKENS = 64
OF_CACHES = 256  # tokens of a passage where a cache is compressed: fewer would stay in 16 bits, or be read as a whole
_GRAM = 4


def free_running(
    models: Mapping[str, nn.Module],
    texts: Sequence[Tensor],
    *,
    new_tokens: int,
    ends: Sequence[int] = (),
    beginning: Sequence[int] = (),
    baseline: str = "baseline",
) -> dict[str, dict[str, float]]:
    """{model: {metric: value}} of greedy continuations of passages from texts, all passages of a model in one batch.

    The metrics, with their standard errors over the passages (_stderr), are free_running_kl (KL of the model's
    predictions from the baseline's along the baseline's text, in nats per token), guess_acceptance (the share of the
    baseline's tokens that are the model's most likely ones there), free_running_same_tokens (tokens before the first
    that differs from the baseline's), free_running_repetition (share of runs of four tokens that occurred before in
    the same text), and free_running_tokens (length). The first three are not of the baseline.

    Args:
        models: transformers decoders, with a compressed cache attached or not; without `baseline` among them nothing is
            compared.
        texts: ids [1, n] each, from which PASSAGES passages of PASSAGE_TOKENS tokens, or OF_CACHES if a model has a
            compressed cache attached, are taken evenly; fewer ones from short texts, and shorter ones for models of few
            positions.
        new_tokens: most tokens of a continuation.
        ends: tokens that end a continuation.
        beginning: special tokens before a passage.
    """
    room = min(positions(model) for model in models.values()) - len(beginning) - new_tokens
    compressed = any(attachment(model) is not None for model in models.values())
    prompts = passages(texts, min(OF_CACHES if compressed else PASSAGE_TOKENS, room), beginning)
    if room < 1 or not len(prompts):
        return {name: {} for name in models}
    with fast_linear():
        written = {name: write(one, prompts, ends=ends, new_tokens=new_tokens) for name, one in models.items()}
    found = {name: of_texts(own, written.get(baseline) if name != baseline else None) for name, own in written.items()}
    others = {name: one for name, one in models.items() if name != baseline}
    if baseline in models and others:
        lines = [(prompt, one.tokens) for prompt, one in zip(prompts, written[baseline], strict=True) if one.tokens]
        cut = [Window(torch.cat([p, p.new_tensor(t)])[None], len(t)) for p, t in lines]
        divergences = compare_windows(models[baseline], others, cut, "free-running text")[1] if cut else {}
        for name, one in divergences.items():
            found[name] |= along(one)
    return found


def passages(texts: Sequence[Tensor], tokens: int, beginning: Sequence[int] = ()) -> Tensor:
    """Up to PASSAGES passages [n, beginning + tokens], disjoint, at even distances in texts of ids [1, length]."""
    shares = [PASSAGES // len(texts) + (i < PASSAGES % len(texts)) for i in range(len(texts))]
    cut: list[Tensor] = []
    for ids, share in zip(texts, shares, strict=True):
        count = min(share, ids.shape[1] // tokens) if tokens > 0 else 0
        cut += [ids[:, start : start + tokens] for start in (i * ids.shape[1] // count for i in range(count))]
    head = torch.tensor([list(beginning)], dtype=torch.long)
    return torch.cat([torch.cat([head, one.cpu()], 1) for one in cut]) if cut else torch.empty(0, 0, dtype=torch.long)


def repetition(tokens: Sequence[int]) -> float | None:
    """Share of a text's runs of four tokens that occurred in it before; None if it is shorter than four tokens."""
    grams = [tuple(tokens[i : i + _GRAM]) for i in range(len(tokens) - _GRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else None


def of_texts(written: Sequence[Written], reference: Sequence[Written] | None = None) -> dict[str, float]:
    """Repetition and length of texts, and their tokens before the first difference from the reference's."""
    repeated = [share for one in written if (share := repetition(one.tokens)) is not None]
    found = _mean("free_running_repetition", repeated) | _mean("free_running_tokens", [len(o.tokens) for o in written])
    if reference is None:
        return found
    return found | _mean("free_running_same_tokens", list(map(_same, reference, written)))


def along(one: Divergence) -> dict[str, float]:
    """The metrics of predictions along the baseline's texts."""
    acceptance = _known("guess_acceptance", one.top1_agreement, one.top1_agreement_stderr)
    return _known("free_running_kl", one.kl, one.kl_stderr) | acceptance


def _same(reference: Written, other: Written) -> int:
    """Tokens before the first difference; all of them if there is none."""
    at = first_difference(reference.tokens, other.tokens)
    return len(reference.tokens) if at is None else at


def _mean(metric: str, values: Sequence[float]) -> dict[str, float]:
    return _known(metric, *mean_and_stderr(values, [1] * len(values))) if values else {}


def _known(metric: str, value: float, stderr: float | None) -> dict[str, float]:
    error = {} if stderr is None else {f"{metric}_stderr": 0.0 if stderr < 1e-12 else stderr}  # rounding is no error
    return {metric: value} | error
