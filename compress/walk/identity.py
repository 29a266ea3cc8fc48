"""The identities of a model, of its calibration tokens and of the code, by which results and files are keyed."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from compress.linear import parameter_count
from compress.walk.finite import NotFinite, is_finite
from compress.walk.offload import named_tensors
from kernels.support import source


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


def tokens_sha256(batches: Sequence[Tensor]) -> str:
    """Hash of the tokens of all batches."""
    digest = hashlib.sha256()
    for batch in batches:
        digest.update(str(tuple(batch.shape)).encode())
        digest.update(batch.to(torch.int64).cpu().contiguous().numpy())
    return digest.hexdigest()


def model_identity(model: nn.Module) -> dict[str, Any]:
    """The record's description of the model that is compressed.

    Raises:
        NotFinite: a weight holds NaN or infinity.
    """
    return {
        "name": getattr(model, "name_or_path", "") or type(model).__name__,
        "weights_sha256": weights_sha256(model, finite=True),
        "parameters": parameter_count(model),
        **getattr(model, "made_by", {}),
    }


def tokens_identity(batches: Sequence[Tensor]) -> dict[str, Any] | None:
    """The record's description of the calibration tokens: that of `calibration`, if it made these tokens."""
    if not len(batches):
        return None
    tokens = {
        "corpus": None,
        "samples": len(batches),
        "seqlen": max(b.shape[1] for b in batches),
        "seed": None,
        "sha256": tokens_sha256(batches),
    }
    known = getattr(batches, "identity", tokens)
    return known if known["sha256"] == tokens["sha256"] else tokens


def code_sha256() -> str:
    """Hash of the code behind a finished block: this package, the kernels, torch's and transformers' versions."""
    root = Path(__file__).parents[2]
    code = source.code_sha256(root / "compress", root / "kernels")
    return hashlib.sha256(f"{torch.__version__} {transformers.__version__} {code}".encode()).hexdigest()
