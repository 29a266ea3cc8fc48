"""Whether every block of a fused step gives what the model's own block gives, from the block's own input."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from kernels.step.decoder import Decoder, NotNative
from kernels.step.gpu.body import FusedBody

TOKENS = 16  # of a prompt, behind which one step is compared; and again behind the model's last positions
# A block's output without its input, and its keys and values, may differ by 3 times the difference that the rounding of
# the input makes in the model itself, which is large where activations become integers; but from 0.03 to 0.5.
TIMES_NOISE, LEAST, MOST = 3.0, 0.03, 0.5


@torch.no_grad()
def check_blocks(model: nn.Module, decoder: Decoder, body: FusedBody) -> None:
    """Compare a step of `body` (batch 1) with the model's, block by block and at the head.

    Raises:
        NotNative: something differs by more than rounding.
    """
    device, vocabulary = body.device, model.get_input_embeddings().num_embeddings
    ids = (torch.arange(TOKENS + 1, device=device) * 7919 % vocabulary)[None]
    cache = DynamicCache(config=model.config)
    model(ids[:, :-1], past_key_values=cache, use_cache=True, logits_to_keep=1)
    held = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    inputs, outputs, noises, logits = _own(model, ids[:, -1:], cache, held)
    for number, block in enumerate(decoder.blocks):
        given, wanted = inputs[number].flatten(0, 1), outputs[number].flatten(0, 1)
        body.at(TOKENS + 1)
        keys, values = body.cache[number]
        for own, there in zip(held[block.index], (keys, values), strict=True):
            there[:, :, TOKENS - own.shape[2] : TOKENS] = own
        residual = given.float().clone().contiguous()
        added = body.block(block, residual, None, None, keys, values, {})
        if block.after_mlp is not None:
            wide = added.float()
            added = wide * (wide.square().mean(-1, keepdim=True) + block.after_mlp.eps).rsqrt() * block.after_mlp.weight
        limit = min(max(TIMES_NOISE * noises[number], LEAST), MOST)
        found = residual + added.float() - given.float()
        layer = cache.layers[block.index]
        pairs = {
            "output": (found, wanted.float() - given.float()),
            "keys": (keys[:, :, TOKENS], layer.keys[:, :, -1]),
            "values": (values[:, :, TOKENS], layer.values[:, :, -1]),
        }
        for name, (ours, own) in pairs.items():
            if not (difference := _apart(ours, own)) < limit:  # NaN is refused, too
                raise NotNative(f"{block.name} gives other {name} than a Llama's, different by {difference:.2g}")
    x = inputs[-1].new_empty(1, decoder.hidden)
    last = outputs[-1].flatten(0, 1)
    wide = last.float()
    x.copy_(wide * (wide.square().mean(-1, keepdim=True) + decoder.norm.eps).rsqrt() * decoder.norm.weight)
    ours = decoder.head(x).float()
    ours = decoder.cap * (ours / decoder.cap).tanh() if decoder.cap else ours
    centred = [y - y.mean(-1, keepdim=True) for y in (ours, logits.float())]
    if not (difference := _apart(*centred)) < 0.1:
        raise NotNative(f"its head gives other logits than a Llama's, different by {difference:.2g}")
    body.at(0)


def _own(
    model: nn.Module, ids: Tensor, cache: DynamicCache, held: list[tuple[Tensor, Tensor]]
) -> tuple[list[Tensor], list[Tensor], list[float], Tensor]:
    """Inputs and outputs of the model's blocks, the differences that rounding the inputs makes, and the logits.

    held: each layer's keys and values before the step.
    """
    inputs, outputs, noises, generator = [], [], [], torch.Generator().manual_seed(0)

    def note(module: nn.Module, args: tuple, kwargs: dict, output: Tensor | tuple) -> None:
        hidden, wanted = args[0] if args else kwargs.pop("hidden_states"), _first(output)
        signs = (torch.randint(2, hidden.shape, generator=generator) * 2.0 - 1).to(hidden.device)
        rounded = (hidden.float() * (1 + torch.finfo(hidden.dtype).eps / 2 * signs)).to(hidden.dtype)
        number = module.self_attn.layer_idx
        with _holding(cache.layers[number], *held[number]):
            again = _first(module.forward(rounded, *args[1:], **kwargs))
        noises.append(_apart(again.float() - rounded.float(), wanted.float() - hidden.float()))
        inputs.append(hidden), outputs.append(wanted)

    hooks = [block.register_forward_hook(note, with_kwargs=True) for block in model.model.layers]
    try:
        logits = model(ids, past_key_values=cache, use_cache=True).logits[:, -1]
    finally:
        for hook in hooks:
            hook.remove()
    return inputs, outputs, noises, logits


@contextmanager
def _holding(layer: DynamicLayer, keys: Tensor, values: Tensor) -> Iterator[None]:
    """While the block runs, the layer of a cache holds what it held one position before."""
    after = vars(layer).copy()
    layer.keys, layer.values = keys, values
    if hasattr(layer, "cumulative_length"):
        layer.cumulative_length -= 1
    try:
        yield
    finally:
        vars(layer).update(after)


def _first(output: Tensor | tuple) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def _apart(found: Tensor, wanted: Tensor) -> float:
    """Relative difference of two tensors."""
    found, wanted = found.float(), wanted.float()
    return float((found - wanted).norm() / wanted.norm().clamp_min(1e-20))
