"""Checks that a model loaded by another library is the same as the one in memory: weight by weight, then by its
logits."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from compress.embedding import CompressedEmbedding
from compress.linear import CompressedLinear
from kernels.linear import fast_linear
from kernels.support.modes import evaluating

PROMPT_TOKENS, NEW_TOKENS = 16, 8
PROMPTS = (
    "The capital of France is Paris, and the capital of Italy is Rome. The capital of Spain is Madrid. In Germany",
    "Once upon a time there was a small house at the edge of a forest, in which an old woman lived alone with",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) +",
    "Water boils at a temperature of one hundred degrees Celsius at sea level, and it freezes at zero degrees, so",
    "Dear Sir or Madam, I am writing to you because the order that I placed three weeks ago has still not arrived",
)

SHARE = 1e-5  # of the logits, as the effect of rounding in float32 where it cannot be measured
MOST = 0.9  # share of the positions whose logits must be near: an input's rounding may change the others altogether
MARGIN = 3  # allowed difference of two models that round alike, in units of one's rounding: sqrt(2), doubled
# Of the logits' standard deviation: the largest effect that counts as rounding in a library's products. Activations of
# 8 bits change the logits of SmolLM2-135M by 0.2 at the median position, wrong products by 1 and more.
PRODUCTS = 0.3


@dataclass(frozen=True)
class Agreement:
    """The difference of the logits of two models over all positions of PROMPTS and their continuations.

    Positions are compared by two quantiles and not by their mean square: where activations are massive, as at the first
    token of many models, the last bit of an input decides between two outputs far apart, and a few such positions are
    most of the mean square in one pair of roundings and next to nothing in another.

    Attributes:
        largest: of the difference, over all positions.
        median, most: root mean square of the difference over the vocabulary, at the median position and at the one
            that a share MOST of all positions do not exceed.
        allowed_median, allowed_most: the effect of rounding on the same two, see `compare_logits`.
        greedy: number of tokens of NEW_TOKENS greedy steps behind every prompt. same: number of these that the other
            model gives, too. ties: number of the others whose two logits are closer than rounding can tell.
    """

    largest: float
    median: float
    allowed_median: float
    most: float
    allowed_most: float
    greedy: int
    same: int
    ties: int

    def __str__(self) -> str:
        ties = f", {self.ties} within rounding of a tie" if self.ties else ""
        return (
            f"{self.same} of {self.greedy} greedy tokens the same{ties}; logits differ by {self.median:.2g} rms at the "
            f"median position, where rounding explains {self.allowed_median:.2g}, and at {MOST:.0%} of positions by "
            f"{self.most:.2g} or less, where it explains {self.allowed_most:.2g} (by {self.largest:.2g} at most)"
        )

    def __bool__(self) -> bool:
        """Whether rounding explains the whole difference; it explains neither a NaN nor an infinite logit."""
        near = math.isfinite(self.largest) and self.median <= self.allowed_median and self.most <= self.allowed_most
        return near and self.same + self.ties == self.greedy


def compare_weights(model: nn.Module, loaded: nn.Module, tolerance: Mapping[str, float] | None = None) -> None:
    """Raise RuntimeError, which names the first tensor, unless a loaded model has all parameters of a model.

    Args:
        model: the model in memory. Its compressed linears are compared by their dequantised weights.
        loaded: a model of the same class, with dense weights under the same names, in the dtype in which it computes.
        tolerance: by compressed linear, the largest |difference| / |weight|, if the format rounds the scales; all else
            must be the same to the last bit, after a cast to the loaded model's dtype.
    """
    theirs = {**dict(loaded.named_parameters(remove_duplicate=False)), **dict(loaded.named_buffers())}
    for name, ours in named_weights(model):
        if name not in theirs:
            raise RuntimeError(f"{name} of the model in memory is not in the loaded one")
        relative = (tolerance or {}).get(name.rpartition(".")[0], 0.0) if name.endswith(".weight") else 0.0
        _compare_tensor(name, ours, theirs[name], relative)
    own = {name for name, _ in named_weights(model, shapes_only=True)}
    compressed = tuple(f"{name}." for name, m in model.named_modules() if isinstance(m, CompressedLinear))
    persistent = {name for name in loaded.state_dict() if not name.startswith(compressed)}
    if extra := sorted(persistent - own):
        raise RuntimeError(f"{extra[0]} of the loaded model is not in the one in memory")


def named_weights(model: nn.Module, *, shapes_only: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and stored buffer of a model under transformers' names, compressed linears dequantised.

    Args:
        shapes_only: give empty tensors for compressed weights, if only the names matter.
    """
    compressed = {name: m for name, m in model.named_modules() if isinstance(m, CompressedEmbedding | CompressedLinear)}
    inside = tuple(f"{name}." for name in compressed)
    for name, tensor in model.state_dict().items():
        if not name.startswith(inside):
            yield name, tensor
    for name, linear in compressed.items():
        yield f"{name}.weight", torch.empty(0) if shapes_only else linear.dequantize()
        if getattr(linear, "bias", None) is not None:
            yield f"{name}.bias", linear.bias


def _compare_tensor(name: str, ours: Tensor, theirs: Tensor, relative: float) -> None:
    if ours.shape != theirs.shape:
        raise RuntimeError(f"{name} is {tuple(ours.shape)} in memory and {tuple(theirs.shape)} loaded")
    ours, theirs = ours.to(theirs.dtype).cpu(), theirs.detach().cpu()
    if torch.equal(ours, theirs):
        return
    lowest = torch.finfo(theirs.dtype).smallest_normal if relative else 0.0  # below it, steps are no longer relative
    ours, theirs = ours.float(), theirs.float()
    wrong = ~((ours - theirs).abs() <= relative * ours.abs().clamp(min=lowest))  # NaN is wrong
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        raise RuntimeError(
            f"{name} is another one when it is loaded again: {int(wrong.sum())} of {wrong.numel()} values differ, the "
            f"first at {list(at)}: {ours[at].item():.8g} in memory, {theirs[at].item():.8g} loaded"
        )


@torch.no_grad()
@fast_linear()  # where 16-bit products are only emulated, float32 is faster
def compare_logits(
    model: nn.Module,
    loaded: nn.Module,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    activations_as_they_are: Callable[[nn.Module], AbstractContextManager] | None = None,
    plain: nn.Module | None = None,
) -> Agreement:
    """Compare the logits of a model with those of a loaded one, and the tokens that they would choose.

    The effect of rounding alone is measured on the loaded model: its logits in its own dtype against those in a dtype
    of twice the width, and, if it rounds activations to 8 bits (which libraries do in slightly different steps), its
    logits with and without this rounding. Two models that differ only by rounding are each at this distance from the
    exact one; MARGIN times this distance is allowed, at the median position and at all but a few (MOST). What rounded
    activations, or a library's own products, explain of it is bounded by PRODUCTS.

    Args:
        loaded: a model that only the caller uses: it is cast to another dtype meanwhile.
        activations_as_they_are: makes a context in which the loaded model does not round its activations; None: it
            never rounds them.
        plain: where the loaded model cannot be cast, one with its weights as dense linears, on which rounding is
            measured; the effect of the loaded model's own products is their difference.

    Raises:
        RuntimeError: the logits differ by more than is allowed, or a greedy token differs by more than a tie.
    """
    device = next(model.parameters()).device
    loaded = loaded.eval().to(device)
    with evaluating(model):
        ids = _continued(model, prompts(model, tokenizer).to(device))
        expected = model(ids, use_cache=False).logits.float()  # [prompts, T, vocabulary]
    given = loaded(ids, use_cache=False).logits.float()
    steps = torch.zeros((), device=device)
    if activations_as_they_are is not None:
        with activations_as_they_are(loaded):
            steps = _by_position(loaded(ids, use_cache=False).logits.float() - given)
    exact, rounded = loaded, given
    if plain is not None:
        exact, rounded = plain, plain(ids, use_cache=False).logits.float()
        steps = _by_position(rounded - given)
    steps = torch.minimum(steps, PRODUCTS * expected.std(-1))  # wrong products differ, too
    noise = _noise(exact, ids, rounded)
    agreement = _agreement(expected, given, MARGIN * (noise.square() + steps.square()).sqrt())
    if not agreement:
        raise RuntimeError(
            f"the loaded model has the same weights as the model in memory but gives different logits: {agreement}"
        )
    return agreement


def _continued(model: nn.Module, ids: Tensor) -> Tensor:
    """ids [prompts, T] and what the model writes behind them, so that NEW_TOKENS choices can be compared."""
    read, cache = ids, {}
    for _ in range(NEW_TOKENS - 1):
        out = model(read, use_cache=True, **cache)
        chosen = out.logits[:, -1:].argmax(-1)
        ids = torch.cat([ids, chosen], 1)
        known = out.get("past_key_values")
        read, cache = (ids, {}) if known is None else (chosen, {"past_key_values": known})
    return ids


def _noise(model: nn.Module, ids: Tensor, given: Tensor) -> Tensor:
    """The effect of rounding on the model's logits `given` [prompts, T, vocabulary], by position; casts the model.

    Code that makes float32 tensors of its own does not run in float64; there, a share of the logits is taken.
    """
    wide = model.to(torch.float64 if model.dtype == torch.float32 else torch.float32)
    try:
        return _by_position(wide(ids, use_cache=False).logits.float() - given)
    except RuntimeError:
        if wide.dtype != torch.float64:
            raise
        return SHARE * _by_position(given)


def take_computed_buffers(model: nn.Module, loaded: nn.Module) -> list[str]:
    """Give a loaded model the computed buffers of the model in memory that differ; returns a remark if any do.

    A reader computes rotary frequencies again, in float32; a model that was cast as a whole has rounded frequencies.
    """
    theirs, stored, taken = dict(loaded.named_buffers()), model.state_dict().keys(), []
    for name, buffer in model.named_buffers():
        if name in theirs and name not in stored and not torch.equal(buffer.cpu(), theirs[name].cpu()):
            owner, _, key = name.rpartition(".")
            loaded.get_submodule(owner).register_buffer(key, buffer.clone(), persistent=False)
            taken.append(name)
    if not taken:
        return []
    return [
        f"readers compute {taken[0]}{' and others' if len(taken) > 1 else ''} anew, as the model's authors meant it; "
        "the model in memory, which was cast as a whole, holds it rounded"
    ]


def prompts(model: nn.Module, tokenizer: PreTrainedTokenizerBase | None) -> Tensor:
    """Token ids [prompts, PROMPT_TOKENS] for comparing models: PROMPTS, or without a tokenizer made-up tokens."""
    vocabulary = model.get_input_embeddings().num_embeddings
    if tokenizer is None:
        return torch.arange(len(PROMPTS) * PROMPT_TOKENS).view(len(PROMPTS), -1) * 7919 % vocabulary
    rows = [tokenizer(text)["input_ids"] for text in PROMPTS]
    return torch.tensor([(row * PROMPT_TOKENS)[:PROMPT_TOKENS] for row in rows]).clamp(max=vocabulary - 1)


def _agreement(expected: Tensor, given: Tensor, allowed: Tensor) -> Agreement:
    """expected, given: [prompts, T, vocabulary]. allowed: [prompts, T], root mean square of allowed differences."""
    difference = expected - given
    median, most = _of_positions(_by_position(difference))
    allowed_median, allowed_most = _of_positions(allowed)
    chosen = expected[:, -NEW_TOKENS:].argmax(-1, keepdim=True)  # [prompts, NEW_TOKENS, 1]
    others = given[:, -NEW_TOKENS:].argmax(-1, keepdim=True)
    margin = (expected[:, -NEW_TOKENS:].gather(-1, chosen) - expected[:, -NEW_TOKENS:].gather(-1, others)).squeeze(-1)
    same = (chosen == others).squeeze(-1)
    # Each of the two logits may have an error of the allowed size.
    ties = ~same & (margin <= 2 * allowed_most)
    return Agreement(
        largest=difference.abs().max().item(),
        median=median,
        allowed_median=allowed_median,
        most=most,
        allowed_most=allowed_most,
        greedy=same.numel(),
        same=int(same.sum()),
        ties=int(ties.sum()),
    )


def _by_position(difference: Tensor) -> Tensor:
    """Root mean square over the vocabulary: [prompts, T, vocabulary] -> [prompts, T]."""
    return difference.square().mean(-1).sqrt()


def _of_positions(values: Tensor) -> list[float]:
    """The median and the quantile MOST of values [prompts, T]; NaN if one is NaN."""
    return values.flatten().quantile(values.new_tensor([0.5, MOST])).tolist()
