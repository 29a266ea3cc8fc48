"""Whether each block of a recognised decoder, given the model's own input, gives the model's own output.

Compared block by block, an error is not lost among the rounding of the blocks before it, which in a model of few bits
may be as large as a wrong block.
"""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn

from kernels.linear import fast_linear
from kernels.step.cache import LayerRoom
from kernels.step.forward import DecoderForward
from kernels.step.program import Norm
from kernels.step.recognition.decoder import Decoder, DecoderBlock
from kernels.step.recognition.likeness import rounded_otherwise
from kernels.step.recognition.parts import NotNative

TOKENS = 16
# Largest difference of a block's output, as `_difference` measures it: 3 times the one that the rounding of its input
# makes in the model itself, which is large where activations become integers; but from 0.03 to 0.5.
TIMES_NOISE, LEAST, MOST = 3.0, 0.03, 0.5
LOGITS = 0.1  # relative difference of logits without their mean that is never too large
FACTOR = 0.02  # relative difference of embedded tokens, and of logits from the head's products
ROUNDINGS = 4  # additions to the residual stream whose rounding counts


# (block, its input, its output in the model) -> its output here; all [1, tokens, hidden]
Output = Callable[[DecoderBlock, Tensor, Tensor], Tensor]
Logits = Callable[[Tensor], Tensor]  # input of the last block [1, tokens, hidden] -> logits [1, tokens, vocabulary]


@torch.no_grad()
def check_outputs(model: nn.Module, decoder: Decoder, output: Output | None = None, head: Logits | None = None) -> None:
    """Compare every block and the head with the model's.

    Args:
        output, head: make what is compared; None: `DecoderForward` does, which also looks the tokens up.

    Raises:
        NotNative: one differs by more than rounding.
    """
    ids = (torch.arange(TOKENS, device=model.device) * 7919 % model.get_input_embeddings().num_embeddings)[None]
    inputs, outputs, shaken, products, logits = _own(model, ids)
    if not decoder.stream:  # the blocks of a rotated stream get other inputs
        own = decoder.embed(ids) * decoder.residual_scale
        _expect_equal("embedding gives other rows", own, inputs[0])
    if not decoder.cap:
        _expect_equal("head gives other logits", decoder.logits(products.float()), logits)
    inside = dataclasses.replace(decoder, stream=None)  # between the blocks it is rotated in the model, too
    limit = LEAST
    for block, given, wanted, other in zip(decoder.blocks, inputs, outputs, shaken, strict=True):
        if not (block.attends or block.has_mlp):
            continue
        found = output(block, given, wanted) if output else _by_forward(inside, block, given, wanted, ids)
        limit = min(max(TIMES_NOISE * _difference(other, given, wanted), LEAST), MOST)
        if not (difference := _difference(found, given, wanted)) < limit:
            raise NotNative(f"{block.name} gives another output than a Llama's, different by {difference:.2g}")
    last = inputs[-1] if decoder.stream is None else decoder.stream.rotation.back(inputs[-1])
    ours = head(inputs[-1]) if head else _output(decoder, decoder.blocks[-1], last, ids)
    found, wanted = (x.float() - x.float().mean(-1, keepdim=True) for x in (ours, logits))
    if not (difference := float((found - wanted).norm() / wanted.norm())) < max(limit, LOGITS):
        raise NotNative(f"its head gives other logits than a Llama's, different by {difference:.2g}")


def _expect_equal(what: str, found: Tensor, wanted: Tensor) -> None:
    """Refuse a model whose factor of a result is another one than that of `decoder`: only rounding may differ."""
    if not (difference := float((found - wanted.float()).norm() / wanted.float().norm())) < FACTOR:
        raise NotNative(f"its {what} than a Llama's, different by {difference:.2g}")


def _own(model: nn.Module, ids: Tensor) -> tuple[list[Tensor], list[Tensor], list[Tensor], Tensor, Tensor]:
    """Inputs and outputs of the model's blocks, [1, tokens, hidden], their outputs where the inputs are rounded in
    another way, the products of the model's head, and its logits."""
    inputs, outputs, shaken, products = [], [], [], []
    generator = torch.Generator().manual_seed(0)

    def note(module: nn.Module, args: tuple, kwargs: dict, output: Tensor | tuple) -> None:
        hidden = args[0] if args else kwargs.pop("hidden_states")
        rounded = rounded_otherwise(hidden, generator)
        again = _first(module.forward(rounded, *args[1:], **kwargs))
        inputs.append(hidden), outputs.append(_first(output)), shaken.append(again.float() - rounded + hidden)

    # Before the hook that rotates the last block's output back.
    hooks = [block.register_forward_hook(note, with_kwargs=True, prepend=True) for block in model.model.layers]
    hooks.append(model.get_output_embeddings().register_forward_hook(lambda *given: products.append(given[-1])))
    try:
        with fast_linear():
            logits = model(ids, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    return inputs, outputs, shaken, products[0], logits


def _first(output: Tensor | tuple) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def _by_forward(decoder: Decoder, block: DecoderBlock, given: Tensor, wanted: Tensor, ids: Tensor) -> Tensor:
    """An `Output` by `DecoderForward`: behind a norm that changes the size alone, which is the model's again."""
    alone = dataclasses.replace(
        decoder, norm=Norm(torch.ones(decoder.hidden), 1e-12), head=nn.Identity(), cap=0.0, logit_scale=1.0
    )
    return _output(alone, block, given, ids).float() * wanted.float().square().mean(-1, keepdim=True).sqrt()


def _output(decoder: Decoder, block: DecoderBlock, given: Tensor, ids: Tensor) -> Tensor:
    """What the passes here make of a block's input, behind the decoder's norm and head."""
    alone = dataclasses.replace(decoder, blocks=(block,), embedding=lambda ids: given, embedding_scale=1.0)
    keys, values = given.new_zeros(2, 1, block.kv_heads, TOKENS, block.channels)
    return DecoderForward(alone)(ids, [LayerRoom(keys, values, torch.zeros(1, dtype=torch.int64))], 0, keep=TOKENS)


def _difference(found: Tensor, given: Tensor, wanted: Tensor) -> float:
    """The difference of each channel of a block's output over the tokens, relative to what the block adds to its input
    and to the rounding of the sum; the mean over channels, so that some with large values do not hide the others."""
    found, added = found.float(), wanted.float() - given.float()
    size = added.norm(dim=1) + ROUNDINGS * torch.finfo(wanted.dtype).eps * wanted.float().norm(dim=1)
    return float(((found - wanted.float()).norm(dim=1) / size.clamp(min=1e-20)).mean())
