"""The names under which the files of others hold the experts of a mixture: one by one, gate and up projection apart.

transformers keeps the experts of a layer as one parameter, and converts it to and from the names of the files. The
names here are taken from that conversion: labels are sent through it in place of weights, and show which rows of which
expert each stored tensor takes. vLLM reads the same names.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from compress.checkpoint.interop.schemes import FLOATS, INTS, Scheme, scheme_of
from compress.checkpoint.shards import Shards
from compress.checkpoint.verify import named_weights
from compress.walk.experts import SplitExperts, is_fused_experts, split_shapes
from kernels.w8a8_matmul import BLOCK, quantize_rows

LABELS = 4  # rows of an expert by which a layout is recognised: enough to tell two halves from alternating rows
STORED_EXPERTS = r"re:.*\.experts\.\d+\..*"  # the target of a group that holds the experts, by their stored names


@dataclass(frozen=True)
class Rows:
    """A stored linear that is a share of the rows of one of ours: from row `start` / LABELS to `stop` / LABELS."""

    name: str
    start: int = 0
    stop: int = LABELS

    def of(self, key: str, tensor: Tensor) -> Tensor:
        """The rows of one stored tensor, such as `weight_scale`, of the whole linear."""
        if (self.start, self.stop) == (0, LABELS) or key == "input_scale":
            return tensor
        if key == "weight_shape":
            out, columns = tensor.tolist()
            return torch.tensor([out * (self.stop - self.start) // LABELS, columns])
        rows = len(tensor)
        return tensor[rows * self.start // LABELS : rows * self.stop // LABELS].contiguous()


@dataclass(frozen=True)
class StoredNames:
    """The names in the files of a model with experts; for other models, the model's own names.

    Attributes:
        experts: for every expert's linear (`...experts.gate_up_proj.3`), the stored linears that hold its rows.
        others: for every other tensor of which the name differs, its stored name.
    """

    experts: dict[str, tuple[Rows, ...]]
    others: dict[str, str]

    @classmethod
    def of(cls, model: nn.Module) -> "StoredNames":
        """The names of a model, which may be on the meta device.

        Raises:
            ValueError: its experts are not stored one by one; the message gives the reason.
        """
        experts: dict[str, tuple[Rows, ...]] = {}
        owners = tuple(expert_shapes(model))
        for owner in owners:
            experts |= _stored_rows(model, owner, expert_shapes(model)[owner])
        if not experts:
            return cls({}, {})
        inside = tuple(f"{owner}." for owner in owners)
        names = [name for name, _ in named_weights(model, shapes_only=True) if not name.startswith(inside)]
        labels = {name: torch.tensor(i) for i, name in enumerate(names)}
        renamed = revert_weight_conversion(model, labels).items()
        return cls(experts, {names[label]: name for name, label in renamed if names[label] != name})

    def stored(self, linear: str, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a linear under their stored names.

        Args:
            linear: its name in the model.
            tensors: by the last part of their names, such as `weight_packed`.
        """
        for rows in self.experts.get(linear, (Rows(*self.linears(linear)),)):
            for key, tensor in tensors.items():
                yield f"{rows.name}.{key}", rows.of(key, tensor)

    def linears(self, name: str) -> list[str]:
        """The stored names of a linear."""
        if name in self.experts:
            return [rows.name for rows in self.experts[name]]
        return [self.others.get(f"{name}.weight", f"{name}.weight").removesuffix(".weight")]

    def targets(self, linears: Iterable[str]) -> list[str]:
        """The names by which readers find linears: transformers' names, other stored names, and one pattern for all
        experts."""
        shown: dict[str, None] = {}
        for name in linears:
            shown |= dict.fromkeys([STORED_EXPERTS] if name in self.experts else [name, *self.linears(name)])
        return list(shown)


def expert_shapes(model: nn.Module) -> dict[str, dict[str, tuple[int, int]]]:
    """By name of every module of experts, fused or split, the shapes (out, in) of its linears by their names in it."""
    return {
        name: split_shapes(module)
        for name, module in model.named_modules()
        if isinstance(module, SplitExperts) or is_fused_experts(module)
    }


def problem_of_experts(model: nn.Module, linears: Mapping[str, dict[str, Any]]) -> str:
    """The reason why readers of compressed-tensors cannot take a model's experts; "" if they can.

    Args:
        linears: the specifications of all compressed linears, those of experts among them, as they will be stored.
    """
    try:
        experts = StoredNames.of(model).experts
    except ValueError as reason:
        return str(reason)
    if not experts:
        return ""
    if biased := next((name for name, spec in linears.items() if name in experts and spec["bias"]), ""):
        return f"{biased} has a bias, for which compressed-tensors' experts have no place"
    schemes = {name: scheme_of(linears[name]) if name in linears else None for name in experts}
    distinct = list(dict.fromkeys(schemes.values()))
    if len(distinct) > 1:
        shown = "; ".join(str(one or "not quantised") for one in distinct)
        return f"its readers take one scheme for all experts, and these have several ({shown})"
    others = {scheme.format for spec in linears.values() if (scheme := scheme_of(spec)) is not None}
    return _problem_of_scheme(distinct[0], others)


def _problem_of_scheme(scheme: Scheme | None, others: set[str]) -> str:
    """As `problem_of_experts`, of the one scheme of all experts; others: the formats of all quantised linears."""
    if scheme is None:
        if others <= {FLOATS}:
            return ""
        return "its experts are not quantised and other linears are integers, which transformers does not read"
    if not scheme.symmetric:
        return "its experts have zero points, which transformers does not read for experts; symmetric=True would do"
    if scheme.strategy == "block":
        return "its experts have a scale per block, which transformers does not read; weights='channel' would do"
    if scheme.inputs == "tensor":
        return "its experts have stored steps of activations, and vLLM takes a step per token only"
    return ""


def expert_remarks(schemes: Iterable[Scheme]) -> list[str]:
    """Remarks on experts of these schemes, for users of transformers 5.23."""
    if any(scheme.format == INTS for scheme in schemes):
        return [
            "vLLM reads the int8 codes of the experts; transformers 5.23 refuses them: here compressed-tensors "
            "dequantised all weights, and transformers put them into the model"
        ]
    if any(scheme.inputs for scheme in schemes):
        return [
            "transformers multiplies the experts by activations that are not rounded; for the comparison these were "
            "rounded, as this workbench and vLLM do"
        ]
    return []


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
        part, block = model.get_submodule(name).parts[0], BLOCK if scheme.inputs == "group" else None
        linear.register_forward_pre_hook(partial(_rounded, dtype=part.w8.codes.dtype, scale=part.x_scale, block=block))


def _rounded(
    linear: nn.Module, args: tuple[Tensor], dtype: torch.dtype, scale: Tensor | None, block: int | None
) -> tuple[Tensor] | None:
    if not linear.quantization_enabled:
        return None
    (x,) = args
    codes, steps = quantize_rows(x, dtype, scale=scale, block=block)
    steps = steps if block is None else steps.repeat_interleave(block, -1)[..., : x.shape[-1]]
    return ((codes.float() * steps).to(x.dtype),)


def _stored_rows(model: nn.Module, owner: str, shapes: Mapping[str, tuple[int, int]]) -> dict[str, tuple[Rows, ...]]:
    found: dict[str, list[Rows]] = {name: [] for name in shapes}
    count = len(shapes) // 2
    for kind in dict.fromkeys(name.rpartition(".")[0] for name in shapes):
        labels = torch.arange(count * LABELS).view(count, LABELS, 1)
        for name, given in revert_weight_conversion(model, {f"{owner}.{kind}": labels}).items():
            rows = given.flatten().tolist()
            expert, start = divmod(rows[0], LABELS)
            if given.dim() != 2 or rows != list(range(rows[0], rows[0] + len(rows))) or start + len(rows) > LABELS:
                raise ValueError(
                    f"its experts are stored as one tensor ({name}), and compressed-tensors stores linears one by one"
                )
            found[f"{kind}.{expert}"].append(Rows(name.removesuffix(".weight"), start, start + len(rows)))
    return {f"{owner}.{name}": tuple(sorted(rows, key=lambda one: one.start)) for name, rows in found.items()}
