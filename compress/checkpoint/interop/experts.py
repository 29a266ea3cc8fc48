"""The names under which the files of others hold the experts of a mixture: one by one, gate and up projection apart.

transformers keeps the experts of a layer as one parameter, and converts it to and from the names of the files. The
names here are taken from that conversion: labels are sent through it in place of weights, and show which rows of which
expert each stored tensor takes. vLLM reads the same names.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from compress.checkpoint.interop.schemes import FLOATS, INTS, Scheme, scheme_of
from compress.checkpoint.verify import named_weights
from compress.walk.experts import SplitExperts, is_fused_experts, split_shapes
from kernels.support.errors import kind_and_first_line
from kernels.w8a8_matmul import BLOCK

_STORED = ("weight", "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "input_scale")
LABELS = 4  # rows of an expert by which a layout is recognised: enough to tell two halves from alternating rows
STORED_EXPERTS = r"re:.*\.experts\.\d+\..*"  # the target of a group that holds the experts, by their stored names


@dataclass(frozen=True)
class RowShare:
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

    experts: dict[str, tuple[RowShare, ...]]
    others: dict[str, str]

    @classmethod
    def of(cls, model: nn.Module) -> "StoredNames":
        """The names of a model, which may be on the meta device.

        Raises:
            ValueError: its experts are not stored one by one; the message gives the reason.
        """
        labels, source = _labels(model)
        experts: dict[str, list[RowShare]] = defaultdict(list)
        others = {}
        try:
            names = revert_weight_conversion(model, labels) if labels else {}
        except Exception as error:  # a conversion that computes with the values, or with tensors that are no labels
            raise ValueError(
                f"the names of its experts in files cannot be told: transformers' conversion of {type(model).__name__} "
                f"raises {kind_and_first_line(error)}"
            ) from error
        for stored, given in names.items():
            rows = given.flatten().tolist()
            linear, start = source[rows[0]]
            if linear in labels:
                others[linear] = stored
                continue
            if given.dim() != 2 or [source[row] for row in rows] != [(linear, start + i) for i in range(len(rows))]:
                raise ValueError(
                    f"its experts are stored as one tensor ({stored}), and compressed-tensors stores linears one by one"
                )
            experts[linear].append(RowShare(stored.removesuffix(".weight"), start, start + len(rows)))
        in_order = {name: tuple(sorted(parts, key=lambda part: part.start)) for name, parts in experts.items()}
        return cls(in_order, {name: stored for name, stored in others.items() if name != stored})

    def stored(self, linear: str, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a linear under their stored names.

        Args:
            linear: its name in the model.
            tensors: by the last part of their names, such as `weight_packed`.
        """
        for rows in self.experts.get(linear, (RowShare(*self.linears(linear)),)):
            for key, tensor in tensors.items():
                yield f"{rows.name}.{key}", rows.of(key, tensor)

    def restored(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inverse of `stored`: all tensors of a file under the names of the model, gate and up projection as one.

        Raises:
            ValueError: the tensors of two halves cannot be put together.
        """
        left, restored = dict(tensors), {}
        for name, parts in self.experts.items():
            keys = {key for part in parts for key in _STORED if f"{part.name}.{key}" in left}
            halves = {key: [left.pop(f"{part.name}.{key}", None) for part in parts] for key in sorted(keys)}
            if len(parts) > 1:
                restored |= {f"{name}.{key}": tensor for key, tensor in _joined(name, halves).items()}
            else:
                restored |= {f"{name}.{key}": only for key, (only,) in halves.items()}
        own = {stored: name for name, stored in self.others.items()}
        for name, tensor in left.items():
            owner, _, key = name.rpartition(".")
            weight = own.get(f"{owner}.weight")  # of which this may be the scale or another part
            restored[own.get(name) or (f"{weight.removesuffix('weight')}{key}" if weight else name)] = tensor
        return restored

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
    (scheme,) = distinct
    if scheme is None:
        return ""
    if scheme.inputs == "tensor" or (scheme.format, scheme.strategy) == (INTS, "block"):
        return f"vLLM has no experts of this kind ({scheme}), and transformers does not read them either"
    unit = BLOCK if scheme.strategy == "block" else 32 if not scheme.symmetric else 1
    for name, parts in experts.items():
        rows = linears[name]["parts"][0]["shape"][0] // len(parts)
        if len(parts) > 1 and rows % unit:
            return (
                f"gate and up projection are stored apart, and the {rows} rows of each in {name} are no multiple of "
                f"{unit}, so that their {'zero points' if unit == 32 else 'scales'} cannot be taken apart"
            )
    return ""


def unread_experts(experts: Iterable[str], schemes: Mapping[str, Scheme]) -> str:
    """What transformers 5.23 does not read of a model's experts, all of one scheme; "" if it reads them.

    It does not load such checkpoints: the conversion of the experts ends with an error.

    Args:
        experts: names of their linears. schemes: of all quantised linears of the model, by name.
    """
    own = {schemes.get(name) for name in experts}
    if not own or not schemes:
        return ""
    (scheme,) = own
    if scheme is None:
        floats = all(other.format == FLOATS for other in schemes.values())
        return "" if floats else "experts that are not quantised beside linears that are stored as integers"
    if scheme.format == INTS:
        return "experts whose weights are int8 codes"
    if scheme.strategy == "block":
        return "experts with a scale per block"
    return "" if scheme.symmetric else "experts with zero points"


def expert_remarks(experts: Iterable[str], schemes: Mapping[str, Scheme]) -> list[str]:
    """Remarks on experts for users of transformers; arguments as in `unread_experts`."""
    if unread := unread_experts(experts, schemes):
        return [
            f"vLLM reads this checkpoint; transformers 5.23 refuses it, because it does not read {unread}: for this "
            "comparison compressed-tensors dequantised all weights, and transformers put them into the model"
        ]
    if any(name in schemes and schemes[name].inputs for name in experts):
        return [
            "transformers multiplies the experts by activations that are not rounded; for this comparison they were "
            "rounded, as this workbench and vLLM do"
        ]
    return []


def _joined(name: str, halves: Mapping[str, list[Tensor | None]]) -> dict[str, Tensor]:
    """The tensors of a linear whose rows are those of several stored ones, one below the other.

    Args:
        halves: by key, such as `weight_scale`, the tensor of each stored linear.
    """
    if any(half is None for parts in halves.values() for half in parts):
        raise ValueError(f"{name} is stored as several linears, and one of them lacks a tensor that another one has")
    rows = [len(half) for half in halves.get("weight_packed") or halves["weight"]]
    joined = {}
    for key, parts in halves.items():
        if key == "weight_shape":
            joined[key] = torch.stack([sum(part[0] for part in parts), parts[0][1]])
        elif key == "input_scale":
            if not all(torch.equal(part, parts[0]) for part in parts):
                raise ValueError(f"{name} is stored as several linears, whose stored steps of activations differ")
            joined[key] = parts[0]
        elif key == "weight_zero_point" and "weight_packed" in halves and any(count % 32 for count in rows):
            raise ValueError(f"{name} is stored as several linears, whose packed zero points cannot be put together")
        elif key in ("weight_scale", "weight_zero_point") and parts[0].shape in ((), (1,)):  # one for the whole weight
            joined[key] = torch.cat([part.reshape(1, 1).expand(n, 1) for part, n in zip(parts, rows, strict=True)])
        else:
            joined[key] = torch.cat(parts)
    return joined


def _labels(model: nn.Module) -> tuple[dict[str, Tensor], list[tuple[str, int]]]:
    """Numbers in place of the weights of a model with experts, under transformers' names; none for other models.

    Returns:
        By name, for the parameter of all experts [experts, LABELS, 1], for other tensors a scalar; and what each number
        stands for: an expert's linear and the row of it, or the name of another tensor and 0.
    """
    labels: dict[str, Tensor] = {}
    source: list[tuple[str, int]] = []
    shapes = expert_shapes(model)
    for owner, linears in shapes.items():
        for kind, count in Counter(linear.rpartition(".")[0] for linear in linears).items():
            labels[f"{owner}.{kind}"] = torch.arange(len(source), len(source) + count * LABELS).view(count, LABELS, 1)
            source += [(f"{owner}.{kind}.{expert}", row) for expert in range(count) for row in range(LABELS)]
    inside = tuple(f"{owner}." for owner in shapes)
    for name, _ in named_weights(model, shapes_only=True) if shapes else ():
        if not name.startswith(inside):
            labels[name] = torch.tensor(len(source))
            source.append((name, 0))
    return labels, source
