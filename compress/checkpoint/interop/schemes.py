"""The schemes by which compressed-tensors describes stored linears in `config_groups`, and vLLM's support of them."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from compress.checkpoint.interop.transformers_config import linear_names
from compress.linear import shape_of
from kernels.w8a8_matmul import BLOCK

PACKED, INTS, FLOATS, MIXED = "pack-quantized", "int-quantized", "float-quantized", "mixed-precision"
# Linears that vLLM multiplies as one, by the name of that one. Where keys serve as values there is no v_proj.
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "w13": ("w1", "w3"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}
MARLIN_OUTPUTS = 64  # the same kernel takes outputs in multiples of this, all fused linears together
MARLIN_GROUPS = (32, 64, 128)  # columns; vLLM's kernel for NVIDIA GPUs takes these groups and whole rows


@dataclass(frozen=True)
class Scheme:
    """The stored form of one or more linears, as a `QuantizationScheme` without its targets.

    Attributes:
        format: one of PACKED, INTS, FLOATS.
        bits: of a weight. symmetric: whether its zero point is the middle code.
        strategy: the part of a weight that shares a scale: "channel" (a row), "group" or "block".
        group_size: columns of a group, if strategy is "group".
        inputs: the rounding of activations: "token" or "group" with steps that are computed on each call, "tensor" with
            a stored step; None: no rounding.
    """

    format: str
    bits: int
    symmetric: bool
    strategy: str
    group_size: int | None = None
    inputs: str | None = None

    def as_config(self, targets: list[str]) -> dict[str, Any]:
        """The entry of `config_groups`."""
        kind = "float" if self.format == FLOATS else "int"
        weights = {
            "num_bits": self.bits,
            "type": kind,
            "symmetric": self.symmetric,
            "strategy": self.strategy,
            "group_size": self.group_size,
            "dynamic": False,
        }
        if self.strategy == "block":
            weights["block_structure"] = [BLOCK, BLOCK]
        inputs = None
        if self.inputs is not None:
            inputs = {
                "num_bits": 8,
                "type": kind,
                "symmetric": True,
                "strategy": self.inputs,
                "group_size": BLOCK if self.inputs == "group" else None,
                "dynamic": self.inputs != "tensor",
            }
        return {
            "targets": targets,
            "weights": weights,
            "input_activations": inputs,
            "output_activations": None,
            "format": self.format,
        }

    def __str__(self) -> str:
        zero = "" if self.symmetric else ", asymmetric"
        share = f"groups of {self.group_size}" if self.strategy == "group" else f"a scale per {self.strategy}"
        steps = "" if self.inputs is None else f", activations per {self.inputs}"
        return f"{self.format}: {self.bits} bits, {share}{zero}{steps}"


def scheme_of(linear: dict[str, Any]) -> Scheme | None:
    """The scheme of a linear that `CompressedLinear.spec()` describes; None for a linear that is stored as floats.

    Raises:
        ValueError: compressed-tensors has no scheme for it; the message gives the reason.
    """
    stored = plain_spec(linear)
    _, columns = stored["shape"]
    if stored.get("scales"):
        raise ValueError(f"its scales are stored as {stored['scales']}, and this format has them in 16 bits")
    if linear.get("looked_up") and stored["format"] != "dense":
        raise ValueError("it is the token embedding, which the readers of this format need in 16 bits")
    match stored["format"]:
        case "dense":
            return None
        case "int_group":
            strategy = "channel" if stored["group_size"] == columns else "group"
            group_size = None if strategy == "channel" else stored["group_size"]
            return Scheme(PACKED, stored["bits"], stored["symmetric"], strategy, group_size)
        case "eight_bit":
            inputs = "tensor" if stored["static"] else "token" if stored["block"] is None else "group"
            if stored["block"] is not None and columns % BLOCK:
                raise ValueError(
                    f"its scales are per {BLOCK} x {BLOCK} weights, and its in_features (={columns}) are no multiple "
                    f"of {BLOCK}; a scale per channel works"
                )
            strategy = "channel" if stored["block"] is None else "block"
            return Scheme(INTS if stored["dtype"] == "int8" else FLOATS, 8, True, strategy, None, inputs)
    raise ValueError(f"it is stored as {stored['format']}, which this format does not have")


@dataclass(frozen=True)
class Group:
    """A scheme, and the linears to which it applies: names, classes, or patterns of names behind "re:"."""

    scheme: Scheme
    targets: tuple[str, ...]


def groups_of(quantization: dict[str, Any]) -> list[Group]:
    """The groups of a `quantization_config` of compressed-tensors, in their order.

    Raises:
        ValueError: one of the groups is of a kind that cannot be read.
    """
    if quantization.get("quantization_status") == "decompressed":
        raise ValueError(
            "its weights are decompressed and its config calls them quantised: transformers saved it after the model "
            "had run; take the folder from which that model was loaded"
        )
    for key in ("transform_config", "sparsity_config"):
        if quantization.get(key):
            raise ValueError(f"its `quantization_config` has a {key}, which cannot be read")
    return [
        Group(_scheme_of_config(group, quantization.get("format")), tuple(group["targets"]))
        for group in quantization["config_groups"].values()
    ]


def scheme_for(name: str, kind: str, groups: Sequence[Group]) -> Scheme:
    """The scheme of a quantised linear: the first whose targets match its name, else its class.

    Raises:
        ValueError: no group applies to the linear.
    """

    def matches(target: str, value: str) -> bool:
        return bool(re.match(target[3:], value)) if target.startswith("re:") else target == value

    for value in (name, kind):
        for group in groups:
            if any(matches(target, value) for target in group.targets):
                return group.scheme
    raise ValueError(f"{name} is quantised, and no group of its `quantization_config` is for it")


def _scheme_of_config(group: dict[str, Any], default_format: str | None) -> Scheme:
    kind, weights, inputs = group.get("format") or default_format, group.get("weights"), group.get("input_activations")
    kind = {"naive-quantized": FLOATS if weights and weights["type"] == "float" else INTS}.get(kind, kind)
    if kind not in (PACKED, INTS, FLOATS) or not weights or weights.get("dynamic") or group.get("output_activations"):
        known = f"{PACKED}, {INTS} and {FLOATS}"
        raise ValueError(f"its linears are stored as {kind} or round their outputs; what can be read: {known}")
    group_size = weights.get("group_size")
    strategy = weights.get("strategy") or ("group" if (group_size or -1) > 0 else "channel" if group_size else "tensor")
    if strategy == "block" and list(weights.get("block_structure") or ()) != [BLOCK, BLOCK]:
        raise ValueError(f"its blocks are {weights.get('block_structure')}; {BLOCK} x {BLOCK} can be read")
    step = None
    if inputs is not None:
        step = inputs.get("strategy") or ("token" if inputs.get("dynamic") else "tensor")
        alike = inputs["num_bits"] == 8 and inputs["type"] == weights["type"] and inputs.get("symmetric", True)
        right = {"token": True, "tensor": False, "group": True}.get(step) == bool(inputs.get("dynamic"))
        if not alike or not right or (step == "group" and inputs.get("group_size") != BLOCK):
            raise ValueError(
                f"its activations are rounded to {inputs['num_bits']}-bit {inputs['type']} per {step}, which cannot be "
                "multiplied; 8 bits of the weights' own type, symmetric, per token or by a stored step, can be read"
            )
    return Scheme(
        kind,
        weights["num_bits"],
        weights.get("symmetric", True),
        strategy,
        group_size if strategy == "group" else None,
        step,
    )


def plain_spec(linear: dict[str, Any]) -> dict[str, Any]:
    """The specification of the part that a linear stores, with the zeros of pruning in place.

    Raises:
        ValueError: the linear is a sum of parts, or transforms its input.
    """
    if linear.get("transform"):
        raise ValueError("its input is transformed first, and this format has no place for that")
    if len(linear["parts"]) != 1:
        shown = " + ".join(part["format"] for part in linear["parts"])
        raise ValueError(f"it is stored as a sum of parts ({shown}), and this format holds one")
    part = linear["parts"][0]
    if part["format"] == "bitmap":
        return {**part, "format": "dense" if part["bits"] is None else "int_group"}
    if part["format"] == "sparse24":
        values = part["values"]
        wide = {"group_size": 2 * values["group_size"]} if values["format"] == "int_group" else {}
        return {**values, **wide, "shape": part["shape"]}
    return part


def quantization_config(
    schemes: Mapping[str, Scheme], model: nn.Module, targets: Callable[[Iterable[str]], list[str]]
) -> dict[str, Any]:
    """`quantization_config` of config.json.

    Args:
        schemes: by name, the schemes of the quantised linears; at least one.
        targets: gives the stored names of linears, or patterns of these.
    """
    by_scheme: dict[Scheme, list[str]] = defaultdict(list)
    for name, scheme in schemes.items():
        by_scheme[scheme].append(name)
    # A single scheme is given by class, so that the file stays short; several are given by the names of the linears.
    groups = {
        f"group_{i}": scheme.as_config(["Linear"] if len(by_scheme) == 1 else targets(names))
        for i, (scheme, names) in enumerate(by_scheme.items())
    }
    formats = sorted({scheme.format for scheme in by_scheme})
    return {
        "quant_method": "compressed-tensors",
        "format": formats[0] if len(formats) == 1 else MIXED,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": targets(name for name in linear_names(model) if name not in schemes),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def vllm_remarks(schemes: Mapping[str, Scheme], model: nn.Module) -> list[str]:
    """Remarks for users of vLLM 0.33 on the linears that it multiplies, from its sources."""
    remarks = _of_fused(schemes, model)
    for scheme in dict.fromkeys(schemes.values()):
        if scheme.strategy == "block" and scheme.format == INTS:
            remarks.append("vLLM does not load this: it has no int8 weights with a scale per block")
        if scheme.format != PACKED:
            continue
        if scheme.bits not in (4, 8) or (scheme.bits == 8 and not scheme.symmetric):
            kind = f"{scheme.bits}-bit {'symmetric' if scheme.symmetric else 'asymmetric'}"
            remarks.append(f"vLLM multiplies {kind} weights with its Humming kernel, which must be installed")
        elif scheme.group_size is not None and scheme.group_size not in MARLIN_GROUPS:
            remarks.append(
                f"vLLM's Marlin kernel takes groups of {', '.join(map(str, MARLIN_GROUPS))} or whole rows, not of "
                f"{scheme.group_size}"
            )
        if scheme.bits != 4:
            remarks.append(
                "vLLM does not run this on a CPU, where it multiplies packed weights of 4 bits only, and some have "
                f"{scheme.bits}"
            )
    return remarks


def vllm_snippet(schemes: Iterable[Scheme]) -> str:
    """How vLLM serves a checkpoint of these schemes, for its card; PATH stands for the folder."""
    others = sorted({scheme.bits for scheme in schemes if scheme.format == PACKED} - {4})
    where = f", on a GPU (on a CPU it multiplies packed weights of 4 bits only, not of {others[0]})" if others else ""
    return f"""vLLM{where}; the command works for its builds for CPUs, too, where `vllm serve` does not:

```sh
python -m vllm.entrypoints.openai.api_server --model PATH
```"""


def _of_fused(schemes: Mapping[str, Scheme], model: nn.Module) -> list[str]:
    """Remarks on linears that vLLM multiplies together, one of each kind."""
    remarks: dict[tuple[str, str], str] = {}
    fused = fused_linears(model)
    alone = set(schemes) - {name for names in fused.values() for name in names}
    for one, names in [*fused.items(), *((name, [name]) for name in schemes if name in alone)]:
        kind, found = one.rpartition(".")[2], {schemes.get(name) for name in names}
        if len(found) > 1:
            shown = "; ".join(f"{name.rpartition('.')[2]}: {schemes.get(name) or 'not quantised'}" for name in names)
            remark = f"vLLM does not load this: it multiplies {', '.join(names)} as one, stored as {shown}"
            remarks.setdefault(("apart", kind), remark)
        outputs = sum(shape_of(model.get_submodule(name))[0] for name in names)
        if any(scheme and scheme.format == PACKED for scheme in found) and outputs % MARLIN_OUTPUTS:
            remark = (
                f"vLLM's Marlin kernel takes outputs in multiples of {MARLIN_OUTPUTS}, and {' and '.join(names)} "
                f"{'have' if len(names) > 1 else 'has'} {outputs}; without that kernel, it needs a slower one or fails"
            )
            remarks.setdefault(("narrow", "alone" if one in alone else kind), remark)
    return list(remarks.values())


def fused_linears(model: nn.Module) -> dict[str, list[str]]:
    """By the name of the linear that vLLM makes of them, the names of a model's linears that it multiplies as one, for
    models with the usual names."""
    names = set(linear_names(model))
    groups = {}
    for name in linear_names(model):
        parent, _, child = name.rpartition(".")
        for one, together in FUSED.items():
            there = [f"{parent}.{other}" for other in together if f"{parent}.{other}" in names]
            if child == together[0] and len(there) >= 2 and there[:2] == [f"{parent}.{n}" for n in together[:2]]:
                groups[f"{parent}.{one}"] = there
    return groups
