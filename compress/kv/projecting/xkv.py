"""xKV (Chang et al., 2025, arXiv:2503.18893): one low-rank basis of a prompt's keys, and one of its values, for several
layers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from compress.kv.layer import KVLayer
from compress.kv.policy import CacheMethod, Projecting
from compress.kv.projecting.shared import Basis, Factored, SharedSlab, Whole, factors, places, ranks_of
from compress.kv.storage import joined
from compress.method import Method, knob
from kernels.kv_decode import MAX_TOKENS as KERNEL_TOKENS


@dataclass(frozen=True, kw_only=True)
class XKV(Projecting):
    """Keeps a prompt's keys and values in low rank, with one basis of its tokens that several layers share.

    After a prompt the keys of adjacent layers, before RoPE, are put side by side as a matrix [tokens, layers x
    channels]. Its truncated singular value decomposition gives a row of `rank` numbers for every token, which is kept
    once for all of these layers, and a matrix for each layer, which turns that row into the layer's keys. RoPE is
    applied to these keys at every step. Values are treated in the same way, with a decomposition of their own. Nothing
    is calibrated: both factors come from the prompt, and both are counted in the bytes of the cache. Tokens that are
    written afterwards are kept without compression. A further prompt, or a further piece of one (more than 8 tokens at
    once), is decomposed together with the earlier ones.

    Deviations: the paper sets ranks; here they follow from the share of the bytes, so that groups of any size can be
    compared at the same bytes, whatever the prompt's length. Reading makes dense keys and values of all positions at
    every step, so this saves memory but no time. Layers with a sliding window are left alone and do not count when
    adjacent layers are grouped.
    """

    group: int = knob(
        4, "adjacent layers that share a basis; 1: every layer has its own", range=(1, 256), describes=True
    )
    key_share: float = knob(
        0.25, "bytes of a prompt's keys, as a share of their bytes without compression; 1: not compressed",
        range=(0.0, 1.0), describes=True,
    )  # fmt: skip
    value_share: float = knob(
        0.25, "bytes of a prompt's values, as a share of their bytes without compression; 1: not compressed",
        range=(0.0, 1.0), describes=True,
    )  # fmt: skip

    name = "xkv"
    source = "Chang et al. 2025, arXiv:2503.18893, section 3"
    turns: ClassVar[bool] = True
    joins: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for knob_name in ("key_share", "value_share"):
            if getattr(self, knob_name) == 0:
                raise ValueError(f"`{knob_name}` (=0) of {self.name} must be above 0, such as 0.25")

    def within(self, before: Sequence[Method], after: Sequence[Method]) -> Method:
        for other in (*before, *after):
            if isinstance(other, CacheMethod) and other.slot in ("policy", "storage", "reading"):
                raise ValueError(
                    f"`recipe`: {self} keeps and reads all positions in all layers that share a basis; {other} cannot "
                    "be combined with it: leave one out"
                )
        return super().within(before, after)

    def projection(self, layer: int) -> None:
        return None  # the stored form of a token depends on its prompt, and on other layers

    def join(self, layers: Sequence[KVLayer]) -> None:
        for begin in range(0, len(layers), self.group):
            group = layers[begin : begin + self.group]
            slab = group[0].slabs[0]
            if isinstance(slab, SharedSlab) and not slab.due:
                continue
            if slab.length > KERNEL_TOKENS:
                self._decompose(group)
            else:  # too few tokens for a prompt
                for layer in group:
                    layer.slabs = [SharedSlab.of_tail(layer.slabs[0], layer.about["turn"])]

    def _decompose(self, group: Sequence[KVLayer]) -> None:
        """Replace the keys and values of these layers by factors."""
        starts = group[0].slabs[0].starts
        at, keys, values = places(starts, group[0].length), [], []
        for layer in group:
            k, v, _ = joined(layer.slabs)
            keys.append(k if self.key_share == 1 else layer.about["turn"](k.float(), at, True))
            values.append(v)
        held = [_factored(keys, starts, self.key_share, group[0].dtype)]
        held.append(_factored(values, starts, self.value_share, group[0].dtype))
        for layer, k, v in zip(group, *held, strict=True):
            layer.slabs = [SharedSlab(k, v, starts, layer.about["turn"])]


def _factored(
    of_layers: Sequence[Tensor], starts: Tensor, share: float, dtype: torch.dtype
) -> list[Factored] | list[Whole]:
    """Keys or values [B, H, T, D] of each layer, with one basis for all."""
    if share == 1:
        return [Whole(x) for x in of_layers]
    T = of_layers[0].shape[2]
    real = torch.arange(T, device=starts.device) >= starts[:, :1]  # [B, T]
    side_by_side = torch.cat([x.transpose(1, 2).flatten(2) for x in of_layers], -1)  # [B, T, C]
    side_by_side = side_by_side.masked_fill(~real[..., None], 0)
    left, right = factors(side_by_side, ranks_of(share, real.sum(1), side_by_side.shape[-1]))
    basis, found, at = Basis(left.to(dtype)[:, None].contiguous()), [], 0
    for x in of_layers:
        heads, channels = x.shape[1], x.shape[3]
        lift = right[..., at : at + heads * channels].unflatten(2, (heads, channels)).transpose(1, 2)  # [B, H, R, D]
        found.append(Factored(basis, lift.to(dtype).contiguous(), owns=not found))
        at += heads * channels
    return found
