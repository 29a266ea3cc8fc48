"""The bytes that methods of the cache keep of a context, from shapes alone."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from compress.kv.policy import CacheMethod, Policy, Projecting, Storage, precisions_of
from compress.kv.precision import Precision
from compress.kv.storage import Slab, filled
from compress.kv.support import key_shapes
from compress.method import Method


@dataclass(frozen=True)
class LayerSize:
    """What one layer keeps of one sequence. bytes: with scales. positions: that each head keeps, in the mean."""

    bytes: int
    positions: int


def check_sized(methods: Sequence[Method]) -> None:
    """Raise ValueError if what these methods keep does not follow from shapes and knobs.

    Args:
        methods: settled, of one recipe.
    """
    for method in methods:
        if not isinstance(method, CacheMethod):
            raise ValueError(f"{method} is not a method of the cache")
        if method.slot == "reading":
            raise ValueError(f"{method} chooses what a token reads and not what is kept; leave it out")
        if method.joins or isinstance(method, Storage) and method.lesser is not None:
            raise ValueError(f"what {method} keeps depends on the text")


def sizes(methods: Sequence[Method], model: nn.Module, tokens: int) -> dict[int, LayerSize]:
    """What a cache of these methods keeps of a prompt of one sequence, by the numbers of the layers that keep all
    positions: the bytes that `CompressedCache` holds behind it, without its counters. A budget that layers or heads
    share by their scores counts as equal shares, without the padding of unequal heads (an eighth at most).

    Args:
        methods: settled and checked (`check_sized`). model: with shapes; its weights are not read.
        tokens: of the prompt.
    """
    policy, storage, projecting = (
        next((method for method in methods if isinstance(method, kind)), None) for kind in (Policy, Storage, Projecting)
    )
    kept = tokens if policy is None else min(tokens, int(policy.target(torch.tensor([tokens]))))
    made, found = dict[tuple, int](), dict[int, LayerSize]()
    for number, (heads, channels) in key_shapes(model).items():
        precision = precisions_of(number, storage, projecting)["precision"]
        widths = (channels, channels)
        if precision.projection is not None:
            widths = precision.projection.keys.shape[-1], precision.projection.values.shape[-1]
        about = heads, widths
        if about not in made:
            plain = precision._replace(projection=None)
            length = kept if policy is None else filled(kept, plain)
            made[about] = _slab_bytes(heads, widths, length, plain)
            if policy is not None and policy.remembers:
                made[about] += heads * length * policy.memory_dtype.itemsize
        found[number] = LayerSize(made[about], kept)
    return found


def _slab_bytes(heads: int, widths: tuple[int, int], positions: int, precision: Precision) -> int:
    """Bytes of the keys and values of this many positions. Long slabs are larger by the same bytes for every further
    group of positions, so that two short ones tell their size."""
    further = max((positions - precision.residual) // precision.group - 2, 0)
    short = positions - further * precision.group
    least = _bytes_of_zeros(heads, widths, short, precision)
    if not further:
        return least
    return least + further * (_bytes_of_zeros(heads, widths, short + precision.group, precision) - least)


def _bytes_of_zeros(heads: int, widths: tuple[int, int], positions: int, precision: Precision) -> int:
    k, v = (torch.zeros(1, heads, positions, width, dtype=torch.bfloat16) for width in widths)
    slab = Slab(k, v, torch.zeros(1, heads, dtype=torch.int32), precision)
    return sum(tensor.nbytes for tensor in slab.held)
