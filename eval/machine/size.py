"""The size of a model, stored and in memory, counted from its tensors."""

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Size:
    """stored_bytes: of the state dict, as a checkpoint holds it. resident_bytes: of parameters and buffers as they lie
    in memory now, which kernels may want laid out less tightly. Tensors that share memory count once."""

    stored_bytes: int
    resident_bytes: int


def size(model: nn.Module) -> Size:
    """Count a model's bytes."""
    resident = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return Size(_bytes(model.state_dict()), _bytes(resident))


def parameter_count(model: nn.Module) -> int:
    """Parameters of a model. What stores its weight in another form counts by its shape: it is no nn.Linear or
    nn.Embedding, and says its `bits_per_weight`. An embedding that is `tied` is counted as the head."""
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
        opaque = tensor.is_mkldnn  # laid out for oneDNN: it has no address to look at, and is shared with nothing
        key = (tensor.data_ptr(), tensor.nbytes) if tensor.numel() and not opaque else (name, 0)
        unique[key] = tensor.nbytes
    return sum(unique.values())
