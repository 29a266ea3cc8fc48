"""Whether a fused step gives what the model gives: layer by layer, block by block, and at the head."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from kernels.step.gpu.between import add_norm, turn_and_store
from kernels.step.gpu.body import FusedBody
from kernels.step.gpu.products import Products
from kernels.step.outputs import TOKENS, check_outputs
from kernels.step.recognition.decoder import Decoder, DecoderBlock
from kernels.step.recognition.likeness import check_likeness
from kernels.step.recognition.parts import NotNative


@torch.no_grad()
def check_fused(model: nn.Module, decoder: Decoder, products: dict[int, Products]) -> None:
    """Compare the queries, keys and values of every layer, at the first and the last positions that the model has, and
    the outputs of every block and of the head, each from the model's own input.

    The tokens of a prompt are the sequences of one step: the i-th reads the i tokens before it.

    Args:
        products: those that bodies of this decoder share.

    Raises:
        NotNative: something differs by more than rounding.
    """
    if partial := next((block for block in decoder.blocks if not (block.attends and block.has_mlp)), None):
        raise NotNative(f"{partial.name} has lost its attention or its MLP")
    if mixture := next((block for block in decoder.blocks if block.mixture is not None), None):
        raise NotNative(f"{mixture.name} is a mixture of experts")
    body = FusedBody(decoder, TOKENS, TOKENS, products)
    check_likeness(model, decoder, _prepared)
    own = torch.arange(TOKENS, device=body.device)
    caches = {id(block): cache for block, cache in zip(decoder.blocks, body.cache, strict=True)}

    def behind(block: DecoderBlock, given: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream behind a block but for its last addend, and this addend: [tokens, hidden] each."""
        keys, values = caches[id(block)]
        for length in body.lengths.values():
            length.copy_(own[:, None] + 1)
        residual = given[0].float()
        body.block(block, residual.clone(), None, None, keys, values, {})  # writes each token's keys and values
        for cached in (keys, values):
            cached.copy_(cached[own, :, own].transpose(0, 1).clone())  # which all sequences then hold
        residual = residual.clone()
        return residual, body.block(block, residual, None, None, keys, values, {})

    def output(block: DecoderBlock, given: Tensor, wanted: Tensor) -> Tensor:
        residual, added = behind(block, given)
        add_norm(residual, added, block.after_mlp, None, added)
        return residual[None]

    def logits(given: Tensor) -> Tensor:
        return body.logits(*behind(decoder.blocks[-1], given), decoder.blocks[-1].after_mlp)[None]

    check_outputs(model, decoder, output, logits)


def _prepared(block: DecoderBlock, qkv: Sequence[Tensor], tables: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [1, heads, tokens, channels] of a prompt, as a step for sequences makes them."""
    own = torch.arange(qkv[0].shape[1], device=qkv[0].device)
    length = (own[:, None] + 1).to(torch.int32).expand(-1, block.kv_heads).contiguous()
    q, k, v = (x[0] for x in qkv)
    keys, values = k.new_zeros(2, len(own), block.kv_heads, len(own), block.channels)
    norms = block.query_norm, block.key_norm
    q = turn_and_store((q, k, v), (tables[0], tables[1]), length, norms, keys, values)
    return q.transpose(0, 1)[None], *(cached[own, :, own].transpose(0, 1)[None] for cached in (keys, values))
