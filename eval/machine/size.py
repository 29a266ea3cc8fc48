"""The size of a model, stored and in memory, counted from its tensors."""

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Size:
    """stored_bytes: bytes of the state dict, as in a checkpoint. resident_bytes: bytes of parameters and buffers as
    they are in memory now, where kernels may need a larger layout. Tensors that share memory count once."""

    stored_bytes: int
    resident_bytes: int


def size(model: nn.Module) -> Size:
    """Count a model's bytes."""
    resident = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return Size(_bytes(model.state_dict()), _bytes(resident))


def parameter_count(model: nn.Module) -> int:
    """Number of parameters of a model. Modules that store a weight in another form count by its shape: they have
    `bits_per_weight`, and are not nn.Linear or nn.Embedding. A `tied` embedding is counted as the head."""
    stored = [module for module in model.modules() if hasattr(type(module), "bits_per_weight")]
    linears = [module for module in stored if hasattr(module, "in_features")]
    biases = sum(linear.bias.numel() for linear in linears if linear.bias is not None)
    weights = sum(linear.in_features * linear.out_features for linear in linears)
    tables = [module for module in stored if hasattr(module, "num_embeddings") and not module.tied]
    weights += sum(table.num_embeddings * table.embedding_dim for table in tables)
    return weights + biases + sum(p.numel() for p in model.parameters())


def bits_per_weight(stored_bytes: int, parameters: int) -> float:
    """Stored bits per parameter of the uncompressed model: everything counts, embeddings and scales too."""
    return 8 * stored_bytes / parameters


def _bytes(tensors: dict) -> int:
    unique = {}
    for name, tensor in tensors.items():
        opaque = tensor.is_mkldnn  # laid out for oneDNN: it has no address, and shares no memory
        key = (tensor.data_ptr(), tensor.nbytes) if tensor.numel() and not opaque else (name, 0)
        unique[key] = tensor.nbytes
    return sum(unique.values())
