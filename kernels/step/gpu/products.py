"""The products of a decoding step with one input: weights joined where memory allows it, inputs in 16 bits or as
codes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.capability import too_old
from kernels.int_matmul import Packed, int_matmul
from kernels.step.codes import Codes, Coding
from kernels.step.recognition.parts import together
from kernels.w4a8_matmul.codes import w4a8_codes_matmul
from kernels.w4a8_matmul.groups import triton_reads
from kernels.w8a8_matmul import W8
from kernels.w8a8_matmul.codes import w8a8_codes_matmul

SPARE = 2.0  # free memory needed to join weights, as a multiple of their size


@dataclass(frozen=True)
class StoredLinear:
    """A linear as a weight that a kernel multiplies: 16-bit floats, or codes in rows.

    coding: how the kernel reads its input; None: in 16 bits.
    """

    weight: Tensor | Packed | W8
    bias: Tensor | None
    coding: Coding | None = None

    def __call__(self, x: Tensor | Codes) -> Tensor:
        """The product [tokens, out]."""
        if isinstance(self.weight, Tensor):
            return F.linear(x, self.weight, self.bias)
        if isinstance(x, Tensor):
            y = int_matmul(x, self.weight)
        else:
            multiply = w8a8_codes_matmul if isinstance(self.weight, W8) else w4a8_codes_matmul
            y = multiply(x.codes, x.step, self.weight, dtype=x.dtype)
        return y if self.bias is None else y + self.bias

    @classmethod
    def of(cls, linear: nn.Module) -> "StoredLinear | None":
        """None: it computes more than the product with one weight, or in a format without such a kernel."""
        if type(linear) is nn.Linear:
            return cls(linear.weight.detach(), linear.bias)
        parts, transform = getattr(linear, "parts", ()), getattr(linear, "transform", None)
        if len(parts) != 1 or transform is not None and getattr(parts[0], "exact", False):
            return None
        packed, w8 = (getattr(parts[0], name, None) for name in ("packed", "w8"))
        if isinstance(packed, Packed) and packed.layout == "rows":
            coding = None if transform is None else _rounding(transform, packed)
            return cls(packed, linear.bias, coding) if transform is None or coding else None
        if isinstance(w8, W8) and w8.layout == "rows" and w8.scale.dim() == 1 and transform is None:
            coding = Coding(w8.codes.dtype, step=_scalar(getattr(parts[0], "x_scale", None)))
            return cls(w8, linear.bias, coding) if _multiplies(coding, w8.codes.device) else None
        return None

    def tensors(self) -> list[Tensor]:
        """The tensors of the weight."""
        if isinstance(self.weight, Tensor):
            return [self.weight]
        return [t for t in (self.weight.codes, self.weight.scale, getattr(self.weight, "zero", None)) if t is not None]

    def kind(self) -> tuple[Any, ...]:
        """Weights of one kind and one coding can be joined row by row."""
        w = self.weight
        about = (w.bits, w.group_size) if isinstance(w, Packed) else ()
        return type(w), about, [t.dtype for t in self.tensors()], self.bias is None


def _rounding(transform: Any, w: Packed) -> Coding | None:
    """The coding of a rounding before the product with integers (`compress.transforms.Rounding`); None for any other
    transform, and where no kernel multiplies the codes."""
    float8 = getattr(transform, "in_float8", False)
    if not float8 and not getattr(transform, "in_integers", False):
        return None
    if transform.group_size not in (-1, w.shape[1]) or transform.wide or not triton_reads(w, None):
        return None
    kind = torch.float8_e4m3fn if float8 else torch.int8
    coding = Coding(kind, transform.bits, _scalar(transform.step), even_first=True)
    return coding if _multiplies(coding, w.codes.device) else None


def _scalar(step: Tensor | None) -> Tensor | None:
    return None if step is None else step.reshape(())


def _multiplies(coding: Coding, device: torch.device) -> bool:
    """Does this device have kernels for the type of the codes?"""
    return too_old(device, float8=coding.dtype == torch.float8_e4m3fn) is None


@dataclass(frozen=True)
class Products:
    """The products of one input with several linears: [tokens, out_i] each, rows at any distance.

    parts: one for each linear, or one whose outputs are those of all. sizes: the number of outputs of each linear.
    coding: how all parts read the input; None: in 16 bits.
    """

    parts: tuple[StoredLinear | nn.Module, ...]
    sizes: tuple[int, ...]
    coding: Coding | None = None

    def __call__(self, x: Tensor | Codes) -> tuple[Tensor, ...]:
        results = tuple(part(x) for part in self.parts)
        return results if len(results) == len(self.sizes) else results[0].split(self.sizes, -1)

    @classmethod
    def of(cls, linears: Sequence[nn.Module]) -> "Products":
        """Weights that are stored alike are joined: short products do not fill a GPU. Where memory is too short for
        that, or their formats differ, they stay apart."""
        sizes, whole = tuple(linear.out_features for linear in linears), together(linears)
        modules = tuple(linears) if whole is None else (whole,)
        stored = tuple(StoredLinear.of(module) for module in modules)
        if None in stored:
            return cls(modules, sizes)
        coding = stored[0].coding
        alike = all(coding is s.coding if coding is None else coding.same(s.coding) for s in stored)
        if alike and len(stored) > 1 and (joined := _joined(stored)) is not None:
            return cls((joined,), sizes, coding)
        return cls(stored, sizes, coding) if alike and coding else cls(modules, sizes)


def _joined(stored: Sequence[StoredLinear]) -> StoredLinear | None:
    """The rows of all of these weights in one; None: they are stored in different ways, or memory is short."""
    first, tensors = stored[0], [one.tensors() for one in stored]
    size = sum(t.nbytes for own in tensors for t in own)
    if any(one.kind() != first.kind() for one in stored) or size * SPARE > free_memory(tensors[0][0].device):
        return None
    bias = None if first.bias is None else torch.cat([one.bias for one in stored])
    codes, *scales = (torch.cat(same) for same in zip(*tensors, strict=True))
    if isinstance(first.weight, Tensor):
        return StoredLinear(codes, bias)
    names = dict(zip(("scale", "zero"), scales, strict=False))
    weight = first.weight._replace(codes=codes, **names, shape=(len(codes), first.weight.shape[1]))
    return replace(first, weight=weight, bias=bias)


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on a device."""
    if device.type != "cuda":
        return 1 << 62
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached
