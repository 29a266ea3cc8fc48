"""The identities of a model and of its calibration tokens, by which results and files are keyed."""

import hashlib

import torch
from torch import Tensor, nn

from compress.walk.finite import NotFinite, is_finite
from compress.walk.offload import named_tensors


def weights_sha256(model: nn.Module, *, finite: bool = False) -> str:
    """Hash of all weights, by name, shape, dtype and content: the model's identity in the run record.

    Args:
        finite: check each weight, too, while it is read.

    Raises:
        NotFinite: a weight that is to be checked holds NaN or infinity.
    """
    digest = hashlib.sha256()
    for name, tensor in named_tensors(model):
        if finite and not is_finite(tensor):
            raise NotFinite(f"`model`: its weight {name} holds NaN or infinity; check its file, and `dtype`")
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy())
    return digest.hexdigest()


def tokens_sha256(batches: list[Tensor]) -> str:
    """Hash of the tokens of all batches."""
    digest = hashlib.sha256()
    for batch in batches:
        digest.update(str(tuple(batch.shape)).encode())
        digest.update(batch.to(torch.int64).cpu().contiguous().numpy())
    return digest.hexdigest()
