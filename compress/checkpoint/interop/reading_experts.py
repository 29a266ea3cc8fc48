"""Models with experts as other libraries read them, made comparable with the model in memory."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from compress.checkpoint.interop.experts import StoredNames, expert_shapes
from compress.checkpoint.interop.schemes import FLOATS, Scheme
from compress.checkpoint.shards import Shards
from compress.linear import sharing_copy
from compress.walk.experts import is_fused_experts, split_experts
from kernels.w8a8_matmul import BLOCK, quantize_rows

# Two models that round differently choose other experts for some tokens; another router does so for nearly all. Allowed
# are this share of tokens whose experts have other weights, by more than this part of the largest one.
OTHER_CHOICES, OTHER_WEIGHT = 0.25, 0.25


def with_split_experts(model: nn.Module) -> nn.Module:
    """The model; where its experts are fused, a model that shares its weights, with experts split as methods split
    them."""
    if not any(map(is_fused_experts, model.modules())):
        return model
    split = sharing_copy(model)
    split_experts(split)
    return split


@contextmanager
def same_routing(model: nn.Module, loaded: nn.Module) -> Iterator[None]:
    """In the context, the tokens of a loaded model go to the experts to which the last call of a model sent them.

    The choice of experts is not continuous: where two have nearly equal scores, rounding chooses, and the outputs
    differ by more than rounding. The loaded model's own choices are therefore compared by themselves.

    Raises:
        RuntimeError: at the end, if the loaded model chose otherwise for more tokens than rounding explains.
    """
    chosen: dict[str, tuple[Tensor, Tensor]] = {}
    share: dict[str, float] = {}  # of tokens with other choices, in the first call of the loaded model

    def record(name: str, experts: nn.Module, args: tuple[Tensor, ...]) -> None:
        chosen[name] = args[1:]

    def follow(name: str, experts: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, index, weight = args
        expected = _dense(*chosen[name], experts.num_experts)
        apart = (_dense(index, weight, experts.num_experts) - expected).abs().amax(1)
        share.setdefault(name, float((apart > OTHER_WEIGHT * expected.amax(1)).float().mean()))
        return x, chosen[name][0], chosen[name][1].to(weight.dtype)

    hooks = [
        one.get_submodule(name).register_forward_pre_hook(partial(act, name))
        for one, act in ((model, record), (loaded, follow))
        for name in expert_shapes(one)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    for name, other in share.items():
        if other > OTHER_CHOICES:
            raise RuntimeError(
                f"the loaded model chooses or weighs other experts for {other:.0%} of the tokens in {name}"
            )


def _dense(index: Tensor, weight: Tensor, experts: int) -> Tensor:
    """Weights of all experts for every token: [tokens, k] -> [tokens, experts + 1], the last column for no expert."""
    return torch.zeros(len(index), experts + 1).scatter(1, index.cpu(), weight.float().cpu())


def decoded(folder: Path, model: nn.Module, schemes: Mapping[str, Scheme]) -> dict[str, Tensor]:
    """The tensors of a written folder under their stored names, dequantised by the compressed-tensors library.

    Args:
        model: the model in memory. schemes: of its quantised linears, by its own names.
    """
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    names, shards, dense = StoredNames.of(model), Shards(folder), {}
    scheme_by_name = {stored: scheme for name, scheme in schemes.items() for stored in names.linears(name)}
    parts: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name in shards.names():
        owner, _, key = name.rpartition(".")
        if owner in scheme_by_name and key != "bias":
            parts[owner][key] = shards.read(name)
        else:
            dense[name] = shards.read(name)
    for owner, stored in parts.items():
        scheme = scheme_by_name[owner]
        compressor = BaseCompressor.get_value_from_registry(scheme.format)
        stored = compressor.decompress(stored, QuantizationScheme(**scheme.as_config(["Linear"])))
        dense[f"{owner}.weight"] = stored["weight"].to(model.dtype)
    return dense


def round_inputs(loaded: nn.Module, model: nn.Module, schemes: Mapping[str, Scheme]) -> None:
    """Let the linears of a loaded model that do not round their activations round them as those of the model do.

    compressed-tensors' own attributes switch the rounding off and on.
    """
    for name, scheme in schemes.items():
        linear = loaded.get_submodule(name)
        if scheme.inputs is None or hasattr(linear, "quantization_scheme"):
            continue
        linear.quantization_scheme, linear.quantization_enabled = scheme, True
        step = {
            "dtype": torch.float8_e4m3fn if scheme.format == FLOATS else torch.int8,
            "scale": getattr(model.get_submodule(name).parts[0], "x_scale", None),
            "block": BLOCK if scheme.inputs == "group" else None,
        }
        linear.register_forward_pre_hook(partial(_rounded, **step))


def _rounded(
    linear: nn.Module, args: tuple[Tensor], dtype: torch.dtype, scale: Tensor | None, block: int | None
) -> tuple[Tensor] | None:
    if not linear.quantization_enabled:
        return None
    (x,) = args
    codes, steps = quantize_rows(x, dtype, scale=scale, block=block)
    steps = steps if block is None else steps.repeat_interleave(block, -1)[..., : x.shape[-1]]
    return ((codes.float() * steps).to(x.dtype),)
