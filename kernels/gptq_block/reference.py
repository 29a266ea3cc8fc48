"""The loop in plain torch, on any device: the reference for every other implementation."""

import torch
from torch import Tensor


def gptq_block(
    W: Tensor,
    U: Tensor,
    scale: Tensor,
    zero: Tensor,
    group: Tensor,
    bits: int,
    keep: Tensor | None = None,
    table: Tensor | None = None,
    lazy: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One matrix; arguments and results as in `kernels.gptq_block.gptq_block`, without the batch.

    lazy: number of columns after which all later columns are updated by a matrix product; None: update them after every
    column.
    """
    steps = U.shape[0]
    W = W.clone()  # [columns, out]
    codes = torch.empty(steps, W.shape[1], dtype=torch.uint8, device=W.device)
    errors = torch.empty(steps, W.shape[1], device=W.device)
    if W.device.type == "cpu":
        rows = group.tolist()
        scales, zeros = [scale[g] for g in rows], [zero[g] for g in rows]
    else:  # without waiting for the device
        scales, zeros = scale[group].unbind(), zero[group].unbind()
    diagonal, top = U.diagonal().unbind(), (1 << bits) - 1
    edges = None if table is None else (table[:-1] + table[1:]) / 2
    for start in range(0, steps, lazy or max(steps, 1)):
        middle = min(start + lazy, steps) if lazy else steps
        end = middle if lazy else len(W)
        for i in range(start, middle):
            w, s, z = W[i], scales[i], zeros[i]  # [out] each
            if table is None:
                q = (w / s).round_().add_(z).clamp_(0, top)
            else:
                q = torch.bucketize(w / s, edges, out_int32=True)
            if keep is not None:
                q = torch.where(keep[i], q, z)
            codes[i] = q
            value = q.sub_(z) if table is None else table[codes[i].int()]
            error = torch.sub(w, value.mul_(s), out=errors[i]).div_(diagonal[i])
            W[i + 1 : end].addr_(U[i, i + 1 : end], error, alpha=-1)
        if end < len(W):
            W[end:].addmm_(U[start:middle, end:].t(), errors[start:middle], alpha=-1)
    return codes, errors, W[steps:].clone()
