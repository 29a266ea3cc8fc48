"""`expert_matmul`: y = x Wᵀ with a weight for each expert of a mixture; every token is multiplied by the weight of its
expert."""

import torch
from torch import Tensor

from kernels.capability import described
from kernels.int_matmul.layout import Packed
from kernels.int_matmul.reference import dequantize
from kernels.interpreter import triton_takes
from kernels.registry import ran

DTYPES = (torch.bfloat16, torch.float16)


def expert_matmul(x: Tensor, w: Packed, ends: Tensor, *, impl: str = "auto") -> Tensor:
    """Product of tokens, sorted by expert, with the integer-quantised weights of all experts, in one launch.

    Args:
        x: [tokens, in]; float32, bfloat16 or float16; the tokens of expert 0 first; may be empty.
        w: [experts out, in] in `rows`: the rows of expert 0 first. See `stacked`.
        ends: int32 [experts], on x's device: the end of each expert's tokens. Rows of y after the last end are
            undefined.
        impl: "reference" (dequantise one expert after the other; waits for `ends`), "triton" (if `takes` is true; CUDA,
            or the interpreter; nothing waits for the host) or "auto": "triton" on CUDA if `takes` is true, else
            "reference".

    Returns:
        [tokens, out] in x's dtype

    Raises:
        ValueError: sizes that do not match, or an implementation that does not support these tensors.
    """
    experts = len(ends)
    if x.dim() != 2 or x.shape[1] != w.shape[1]:
        raise ValueError(f"`x` {tuple(x.shape)} must be [tokens, in_features (={w.shape[1]})]")
    if w.layout != "rows" or ends.dtype != torch.int32 or ends.dim() != 1 or not experts or w.shape[0] % experts:
        raise ValueError(
            f"`w` ({w.layout}, {w.shape[0]} rows) must be in rows, the same number for each entry of `ends` "
            f"({ends.dtype} {tuple(ends.shape)}), which must be int32 [experts]"
        )
    able = takes(w, x.dtype, x.device)
    if impl not in ("auto", "reference", "triton") or impl == "triton" and not able:
        here = f"{w.bits} bits in groups of {w.group_size} with {x.dtype} on {described(x.device)}"
        raise ValueError(f"`impl` (={impl!r}) must be 'auto' or 'reference', or 'triton' where that takes {here}")
    use = ("triton" if able and x.is_cuda else "reference") if impl == "auto" else impl
    ran("expert_matmul", use)
    return _op(x, w.codes, w.scale, w.zero, ends, w.bits, w.group_size, list(w.shape), use)


def takes(w: Packed, dtype: torch.dtype, device: torch.device) -> bool:
    """Do the Triton kernels support this weight, with activations of this dtype, on this device?"""
    if dtype not in DTYPES or not triton_takes(device):
        return False
    from kernels.int_matmul.triton import cuts_into_blocks

    return cuts_into_blocks(w)


def stacked(weights: list[Packed]) -> Packed:
    """The weights of several experts, with the same shape and grid, in the form for `expert_matmul`."""
    first = weights[0]
    assert all(w[4:] == first[4:] and w.layout == "rows" for w in weights), "weights of one kind"
    codes, scale = torch.cat([w.codes for w in weights]), torch.cat([w.scale for w in weights])
    zero = None if first.zero is None else torch.cat([w.zero for w in weights])
    shape = (first.shape[0] * len(weights), first.shape[1])
    return first._replace(codes=codes, scale=scale, zero=zero, shape=shape)


def split(w: Packed, experts: int) -> list[Packed]:
    """The weights of `stacked`, as views."""
    out = w.shape[0] // experts
    zeros = [None] * experts if w.zero is None else w.zero.split(out)
    parts = zip(w.codes.split(out), w.scale.split(out), zeros, strict=True)
    return [w._replace(codes=c, scale=s, zero=z, shape=(out, w.shape[1])) for c, s, z in parts]


@torch.library.custom_op("workbench::expert_matmul", mutates_args=())
def _op(
    x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor | None, ends: Tensor, bits: int, group_size: int,
    shape: list[int], use: str,
) -> Tensor:  # fmt: skip
    w = Packed("rows", codes, scale, zero, bits, group_size, (shape[0], shape[1]))
    y = x.new_empty(x.shape[0], shape[0] // len(ends))
    if not x.shape[0]:
        return y
    if use == "triton":
        from kernels.int_matmul import triton

        return triton.expert_matmul(x, w, ends)
    first = 0
    for one, end in zip(split(w, len(ends)), ends.tolist(), strict=True):
        if end > first:
            y[first:end] = x[first:end] @ dequantize(one).to(x.dtype).t()
        first = end
    return y


@_op.register_fake
def _(x, codes, scale, zero, ends, bits, group_size, shape, use):
    return x.new_empty(x.shape[0], shape[0] // ends.shape[0])
