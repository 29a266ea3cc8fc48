"""Quantised checkpoints of other tools, compressed-tensors and GPTQ, as models to evaluate and to time.

Codes, scales and zero points are taken unchanged into our own formats. Weights that these cannot hold, such as columns
that share scales in another order (act-order), are dequantised, with a warning. Checkpoints are refused if
leaving something out would change the model, such as rounded activations of a kind that cannot be multiplied.
"""

import json
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn

from compress.checkpoint.files import CONFIG, fill, reading, take_generation_config
from compress.checkpoint.interop.experts import StoredNames, expert_shapes
from compress.checkpoint.interop.schemes import PACKED, Scheme, groups_of, scheme_for
from compress.checkpoint.interop.words import bytes_of_words, from_words
from compress.checkpoint.load import plain_config, put_linear
from compress.checkpoint.shards import Shards
from compress.classes import auto_class
from compress.formats import Dense, EightBit, Format, IntGroup
from compress.linear import CompressedLinear
from compress.result import refuse_save_pretrained
from compress.walk.experts import split_experts
from kernels.int_matmul import BITS, Packed, pack, unpack_bits
from kernels.w8a8_matmul import W8

Read = Callable[[str, nn.Module, dict[str, Tensor]], Format]  # name and module of a linear, its tensors
# Names of the tensors of a linear's weight, without its bias, in either format.
STORED = (
    "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx", "input_scale",
    "input_zero_point", "qweight", "qzeros", "scales", "g_idx",
)  # fmt: skip

OFFSETS = {"gptq": 1, "gptq_v2": 0}  # the number that each version of GPTQ's format subtracts from zero points


def quantization_of(folder: Path) -> dict[str, Any] | None:
    """The quantisation that the config of a folder describes; None: no quantisation, or no config."""
    if not (folder / CONFIG).is_file():
        return None
    with reading(folder, CONFIG):
        return json.loads((folder / CONFIG).read_text(encoding="utf-8")).get("quantization_config")


def can_read(quantization: dict[str, Any] | None) -> bool:
    """Whether `load_quantized` reads weights that are quantised like this; others are left to transformers."""
    return isinstance(quantization, dict) and quantization.get("quant_method") in [*READERS]


def load_quantized(folder: Path, dtype: torch.dtype) -> nn.Module:
    """The model of a compressed-tensors or GPTQ folder, its linears in our own formats.

    Args:
        dtype: the dtype of all weights that are not quantised, and of the activations.

    Raises:
        ValueError: its quantisation cannot be read, or weights are missing.
    """
    quantization = quantization_of(folder) or {}
    kind = quantization.get("quant_method")
    if kind not in READERS:
        raise ValueError(
            f"its weights are quantised by {kind!r}; what can be read: {', '.join(READERS)}, and models that are not "
            "quantised"
        )
    with reading(folder, CONFIG):
        read = READERS[kind](quantization)
    with init_empty_weights(include_buffers=False):
        config = plain_config(folder)
        model = auto_class(config).from_config(config, trust_remote_code=False)
    model.config.dtype = dtype
    names, tensors = StoredNames({}, {}), Shards(folder).all()
    if expert_shapes(model):
        names = StoredNames.of(model)
        split_experts(model)
        tensors = names.restored(tensors)
    plain, quantized = _by_linear(tensors)
    dense = []
    for name, own in quantized.items():
        module = _module(model, name)
        part = read(names.linears(name)[0], module, own)
        if isinstance(part, Dense):
            dense.append(name)
        if isinstance(module, nn.Linear) and not isinstance(part, Dense):
            bias = plain.pop(f"{name}.bias", None)
            bias = None if bias is None else bias.to(dtype)
            put_linear(model, name, CompressedLinear([part.checked()], bias, dtype=dtype))
        else:
            plain[f"{name}.weight"] = part.dequantize()
    if dense:
        warnings.warn(
            f"{len(dense)} linears, {dense[0]} first, are stored in a way for which this workbench has no format: they "
            "were dequantised, so their accuracy is that of the file, but not their size and speed",
            stacklevel=2,
        )
    fill(model, {n: t.to(dtype) if t.is_floating_point() else t for n, t in plain.items()})
    take_generation_config(model, folder)
    refuse_save_pretrained(model)
    return model.eval().requires_grad_(False)


def _by_linear(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """The tensors that are not quantised, by name; and the tensors of each quantised linear, by linear."""
    owners = {n.rpartition(".")[0] for n in tensors if n.endswith((".weight_scale", ".qweight"))}
    plain, quantized = {}, defaultdict(dict)
    for name, tensor in tensors.items():
        owner, _, key = name.rpartition(".")
        if owner in owners and key in (*STORED, "weight"):
            quantized[owner][key] = tensor
        else:
            plain[name] = tensor
    return plain, dict(quantized)


def _module(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        raise ValueError(
            f"the model of its config ({type(model).__name__}) has no {name}; experts of a mixture that are stored one "
            "by one cannot be read"
        ) from None


def _compressed_tensors(quantization: dict[str, Any]) -> Read:
    groups = groups_of(quantization)
    if quantization.get("kv_cache_scheme"):
        warnings.warn("the quantisation of its KV cache is left out: keys and values are not compressed", stacklevel=3)

    def read(name: str, module: nn.Module, own: dict[str, Tensor]) -> Format:
        scheme = scheme_for(name, type(module).__name__, groups)
        try:
            return _packed(own, scheme) if scheme.format == PACKED else _eight_bit(own, scheme)
        except ValueError as reason:
            raise ValueError(f"{name} is {scheme}: {reason}") from reason

    return read


def _packed(own: dict[str, Tensor], scheme: Scheme) -> Format:
    """pack-quantized: the words are the workbench's rows."""
    if scheme.inputs is not None:
        raise ValueError("packed weights cannot be multiplied by rounded activations")
    out, columns = own["weight_shape"].tolist()
    scale = own["weight_scale"]
    scale = scale.expand(out, 1) if scale.numel() == 1 else scale.view(out, -1)
    zero = None
    if not scheme.symmetric:
        zero = from_words(own["weight_zero_point"].T, scheme.bits, out).T  # [out, groups]
    codes = bytes_of_words(own["weight_packed"], scheme.bits, columns)
    if scheme.bits in BITS:
        part = IntGroup(_with_zero(codes, scale, zero, scheme.bits, (out, columns)))
    else:  # seven bits stored in eight: the middle moves from 64 to 128
        wide = unpack_bits(codes, scheme.bits, columns) + (128 - (1 << scheme.bits - 1))
        part = _grouped(wide, scale, None if zero is None else zero + (128 - (1 << scheme.bits - 1)), 8)
    return _in_order(part, own.get("weight_g_idx"))


def _with_zero(codes: Tensor, scale: Tensor, zero: Tensor | None, bits: int, shape: tuple[int, int]) -> Packed:
    groups = scale.shape[1]
    rows = _grouped(torch.zeros(shape[0], groups, dtype=torch.uint8), scale, zero, bits).packed
    return rows._replace(codes=codes, group_size=shape[1] // groups, shape=shape)


def _grouped(codes: Tensor, scale: Tensor, zero: Tensor | None, bits: int) -> IntGroup:
    group_size = codes.shape[1] // scale.shape[1]
    return IntGroup(pack(codes, scale.contiguous(), zero, bits=bits, group_size=group_size))


def _eight_bit(own: dict[str, Tensor], scheme: Scheme) -> Format:
    """int-quantized and float-quantized: codes [out, in] of one byte each."""
    codes, scale = own["weight"], own["weight_scale"]
    out, columns = codes.shape
    if codes.dtype not in (torch.int8, torch.float8_e4m3fn):
        raise ValueError(f"codes of {codes.dtype} cannot be read")
    if scheme.strategy != "block":
        scale = scale.expand(out, 1) if scale.numel() == 1 else scale.view(out, -1)
    if scheme.inputs is not None:
        if scheme.bits != 8 or not scheme.symmetric or (scheme.strategy == "block") != (scheme.inputs == "group"):
            raise ValueError("such weights cannot be multiplied by such activations")
        if own.get("input_zero_point", torch.zeros(1)).any():
            raise ValueError("asymmetric activations cannot be multiplied")
        if scheme.strategy == "group":
            raise ValueError("weights in groups cannot be multiplied by rounded activations")
        x_scale = own["input_scale"].float().reshape(()) if scheme.inputs == "tensor" else None
        scale = scale.float().contiguous() if scheme.strategy == "block" else scale.float().reshape(-1).contiguous()
        return EightBit(W8("rows", codes.contiguous(), scale, (out, columns)), x_scale)
    if scheme.strategy == "block":
        return Dense(EightBit(W8("rows", codes, scale.float(), (out, columns))).dequantize())
    if codes.dtype != torch.int8:
        return Dense((codes.float().view(*scale.shape, -1) * scale.float()[..., None]).view(out, columns))
    zero = own.get("weight_zero_point")
    zero = None if scheme.symmetric or zero is None else (zero.view(scale.shape).short() + 128).to(torch.uint8)
    return _grouped((codes.short() + 128).to(torch.uint8), scale, zero, 8)


def _gptq(quantization: dict[str, Any]) -> Read:
    """Bits and groups follow from the tensors, so that `dynamic` need not be read."""
    version = quantization.get("checkpoint_format") or "gptq"
    if version not in OFFSETS:
        raise ValueError(f"its `checkpoint_format` is {version!r}; {' and '.join(OFFSETS)} can be read")
    offset = OFFSETS[version]

    def read(name: str, module: nn.Module, own: dict[str, Tensor]) -> Format:
        scale = own["scales"].T  # [out, groups]
        out, groups = scale.shape
        columns = module.in_features if isinstance(module, nn.Linear) else len(own["g_idx"])
        bits = own["qweight"].shape[0] * 32 // columns
        if own["qweight"].dtype != torch.int32 or bits not in BITS:
            raise ValueError(f"{name} has {bits} bits in words of {own['qweight'].dtype}, which cannot be read")
        # Version 1 stores a zero point of 0 as -1; the sum wraps around at `bits` bits, as in its authors' code.
        zero = (from_words(own["qzeros"], bits, out).T.short() + offset) & ((1 << bits) - 1)
        zero = None if (zero == 1 << (bits - 1)).all() else zero
        codes = bytes_of_words(own["qweight"].T, bits, columns)
        part = IntGroup(_with_zero(codes, scale, zero, bits, (out, columns)))
        return _in_order(part, own.get("g_idx"))

    return read


def _in_order(part: IntGroup, g_idx: Tensor | None) -> Format:
    """The weight itself if neighbours share their scales; else dequantised, with the group of each column."""
    columns = part.shape[1]
    neighbours = torch.arange(columns) // part.group_size
    if g_idx is None or (g_idx < 0).all() or torch.equal(g_idx.long(), neighbours):
        return part
    packed = part.packed
    codes = unpack_bits(packed.codes, packed.bits, columns).float()
    zero = torch.full(packed.scale.shape, 1 << (packed.bits - 1))
    if packed.zero is not None:
        zero = unpack_bits(packed.zero, packed.bits, packed.scale.shape[1])
    group = g_idx.long()
    if group.shape != (columns,) or int(group.min()) < 0 or int(group.max()) >= packed.scale.shape[1]:
        raise ValueError(f"its columns name groups outside of the {packed.scale.shape[1]} that are stored")
    return Dense((codes - zero.float()[:, group]) * packed.scale.float()[:, group])


READERS = {"compressed-tensors": _compressed_tensors, "gptq": _gptq}
