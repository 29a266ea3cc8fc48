"""The patterns of kept weights of a matrix: any (unstructured), or at most N of every M neighbours in a row (N:M)."""

import re

import torch
from torch import Tensor

UNSTRUCTURED = "unstructured"


def parse_pattern(pattern: str) -> tuple[int, int] | None:
    """(N, M) of "N:M", of which N are kept; None for "unstructured".

    Raises:
        ValueError: the pattern is neither, or N is not below M.
    """
    if pattern == UNSTRUCTURED:
        return None
    found = re.fullmatch(r"(\d+):(\d+)", pattern)
    n, m = (int(number) for number in found.groups()) if found else (0, 0)
    if not 0 < n < m:
        raise ValueError(
            f"`pattern` (={pattern!r}) must be 'unstructured', or N:M with 0 < N < M, such as 2:4: N of M are kept"
        )
    return n, m


def kept(scores: Tensor, ratio: float, pattern: tuple[int, int] | None, *, by_row: bool) -> Tensor:
    """The mask of the weights to keep, which have the largest scores.

    Args:
        scores: [out, in], the importance of each weight.
        ratio: the share of removed weights if there is no pattern; their number is rounded down.
        pattern: (N, M), with M a divisor of `in`, or None.
        by_row: compare within each row, so that all rows keep the same number; otherwise over the whole matrix. N:M
            compares within M.

    Returns:
        [out, in] bool; among equal scores the first are removed first.
    """
    out, columns = scores.shape
    if pattern is not None:
        n, m = pattern
        groups, gone = scores.view(out, -1, m), m - n
    else:
        groups = scores.view(out, 1, columns) if by_row else scores.view(1, 1, -1)
        gone = int(ratio * groups.shape[-1] + 1e-6)  # 0.29 of 100 is 29
    if pattern is not None or groups.is_cuda:  # of few neighbours, or where `kthvalue` is slower
        mask = torch.ones(groups.shape, dtype=torch.bool, device=scores.device)
        lowest = groups.argsort(dim=-1, stable=True)[..., :gone]
        return mask.scatter_(-1, lowest, False).view(out, columns)
    if not gone:
        return torch.ones(out, columns, dtype=torch.bool)
    last = groups.kthvalue(gone, dim=-1, keepdim=True).values  # the largest score that goes
    equal = groups == last
    left = gone - (groups < last).sum(-1, keepdim=True)  # how many of the equal ones go
    return ~((groups < last) | (equal & (equal.cumsum(-1) <= left))).view(out, columns)
