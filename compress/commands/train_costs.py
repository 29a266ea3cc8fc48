"""Train networks for `kvzap` that predict from hidden states the cost of losing each token.

$ python -m compress.commands.train_costs --model smollm2-135m --out costs.safetensors

KVzip's score of a position is the largest attention that it gets in any head when the prompt is read again. But the
attention of some heads matters more than that of others. Here the score is a first-order bound of the change of the
loss of the second reading if the position were lost. Without it, the output o of a head becomes (o - a v) / (1 - a),
for attention a to the value v. So it moves by a / (1 - a) |v - o|, and the loss by that times the length of its
gradient with respect to o, at most. The gradient is that of the logarithm of the probability of tokens that the model
draws itself, as in the Fisher information: where the model is sure of the next token, the gradient is small.

`--target attention` is the largest attention a of any head in the same reading: KVzip's score without its prompts.
Mixed with a network of costs (`compress.kv.learned.mix`), a position's score is the geometric mean of both. Contexts of
thousands of tokens are answered better by networks that were trained on long texts (`--seqlen 2048`); with `--dtype
bfloat16` and tiles (AMX) such a text takes a core 40 seconds.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from compress.commands.options import train_networks
from compress.kv.attach import attached
from compress.kv.attention import attention, noted_hidden
from compress.kv.learned.networks import Example, Fitted, fit_all
from compress.kv.rotation import learned_rotations, turn_of
from compress.kv.seen import Seen
from compress.kv.support import keeping_layers

NAME = "workbench_kv_heard"
LEAST = 1e-6  # costs below this, in nats, count as this
TARGETS = ("cost", "attention")
LEFT = 0.05  # share of a head's attention that other positions have at least: the minimum of 1 - a


class Heard:
    """Record of an attention module: its inputs [1, T, hidden], its queries, keys and values as a `Seen`, and its
    output y [1, T, H_q, D]."""

    def __init__(self, hidden: Tensor, seen: Seen, y: Tensor) -> None:
        self.hidden, self.seen, self.y = hidden, seen, y


@contextmanager
def _listening(model: nn.Module) -> Iterator[dict[int, Heard]]:
    """{number of a layer that keeps all positions: its record}, filled as the layers of an attached model compute."""
    heard, keeping = {}, set(keeping_layers(model))

    def listen(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **about) -> tuple[Tensor, None]:
        y, _ = attention(module, q, k, v, mask, **about)
        if module.layer_idx in keeping:
            real = torch.ones(k.shape[:3], dtype=torch.bool, device=k.device)
            scaling = about.get("scaling") or q.shape[-1] ** -0.5
            seen = Seen(
                *(k.detach(), v.detach(), real, q.detach(), real[:, 0], scaling),
                positions=real[:, 0].long().cumsum(1) - 1,
                tokens=real[:, 0].sum(1),
                layer=module.layer_idx,
                turn=turn_of(model, module.layer_idx),
                softcap=about.get("softcap"),
                sinks=about.get("s_aux"),
            )
            heard[module.layer_idx] = Heard(noted_hidden().detach(), seen, y)
        return y, None

    def embedded(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
        return output if output.requires_grad else output.requires_grad_()

    AttentionInterface.register(NAME, listen)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    before, hook = model.config._attn_implementation, model.get_input_embeddings().register_forward_hook(embedded)
    model.set_attn_implementation(NAME)
    try:
        yield heard
    finally:
        model.set_attn_implementation(before)
        hook.remove()


def costs(model: nn.Module, ids: Tensor, seed: int = 0, target: str = TARGETS[0]) -> dict[int, tuple[Tensor, Tensor]]:
    """By layer, the hidden states [n, hidden] that its attention reads, and the highest possible cost of losing a token
    from a kv head's cache, [n, H_kv] in nats, float32.

    Args:
        ids: [1, n], a text, which is read twice. seed: for drawing tokens.
        target: "cost", or "attention": the largest attention that a token gets in the second reading.
    """
    n = ids.shape[1]
    learned_rotations(model)
    with attached(model), _listening(model) as heard, torch.set_grad_enabled(target == "cost"):
        logits = model(torch.cat([ids, ids], 1), use_cache=False, logits_to_keep=n).logits[0].float()
        if len(heard) < len(keeping_layers(model)):
            raise ValueError(
                f"`model` ({type(model).__name__}): several layers share a module of attention, so that the costs of "
                "each cannot be told apart"
            )
        gradients = [None] * len(heard)
        if target == "cost":
            generator = torch.Generator(logits.device).manual_seed(seed)
            drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator)[:, 0]
            loss = nn.functional.cross_entropy(logits, drawn, reduction="sum")
            gradients = torch.autograd.grad(loss, [one.y for one in heard.values()])
    return {
        number: (one.hidden[0, :n], _largest(one.seen, one.y.detach(), gradient, n)[0].T)
        for (number, one), gradient in zip(heard.items(), gradients, strict=True)
    }


def _largest(seen: Seen, y: Tensor, gradient: Tensor | None, n: int) -> Tensor:
    """The largest a / (1 - a) |v - y| |gradient|, or a if there is no gradient, over the last n queries and the heads
    that share a position, for the first n positions: [B, H_kv, n]. y, gradient: [B, T, H_q, D]."""
    H, values = seen.keys.shape[1], seen.values[:, :, :n].float()
    last = replace(seen, queries=seen.queries[:, :, -n:], asked=seen.asked[:, -n:], positions=seen.positions[:, -n:])

    def larger(before: Tensor, piece: Seen) -> Tensor:
        a = piece.attention(piece.queries.shape[2])[..., :n]  # [B, H, G, rows, n]
        if gradient is not None:
            rows = piece.positions[0]
            out, slope = (x[:, rows].float().transpose(1, 2).unflatten(1, (H, -1)) for x in (y, gradient))
            apart = torch.cdist(out, values[:, :, None].expand(*out.shape[:3], -1, -1))
            a = a / (1 - a).clamp(min=LEFT) * apart * slope.norm(dim=-1, keepdim=True)
        return torch.maximum(before, a.amax((2, 3)))

    return last.over_queries(larger, n)


def examples(model: nn.Module, batches: Sequence[Tensor], target: str = TARGETS[0]) -> Iterator[Example]:
    """The hidden states [n, hidden] of all tokens, and the logarithms of their costs [n, H_kv].

    Args:
        batches: tokens, LongTensors [1, T]. target: as for `costs`.
    """
    for i, ids in enumerate(tqdm(batches, desc="costs of losing a token", unit="text")):
        for number, (hidden, cost) in costs(model, ids.to(model.device), i, target).items():
            yield number, hidden, cost.clamp(min=LEAST).log()


def train(
    model: nn.Module, batches: Sequence[Tensor], path: str | Path, target: str = TARGETS[0], **more: float
) -> dict[int, Fitted]:
    """Write a file for `kvzap(path=...)`; `more`: arguments of `fit`; the width is an eighth of the hidden size.

    Args:
        target: as for `costs`.
    """
    width = max(model.config.get_text_config(decoder=True).hidden_size // 8, 8)
    return fit_all(examples(model, batches, target), path, width=width, **more)


def main() -> None:
    more = {"--target": {"choices": TARGETS, "default": TARGETS[0], "help": "what the networks predict"}}
    train_networks(train, __doc__, samples=32, more=more)


if __name__ == "__main__":
    main()
