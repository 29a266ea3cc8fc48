"""The interface of a stored weight, and the shared code of small parts that are added to a larger one."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from compress.formats.scales import bits_in_groups
from compress.transforms import Hadamard, Permutation, Transform
from compress.transforms.rounding import Rounding
from kernels.hadamard.codes import hadamard_codes, rotates_into_codes
from kernels.int_matmul import Packed
from kernels.lut_matmul import Codebook
from kernels.w4a8_matmul import fast, w4a8_matmul
from kernels.w4a8_matmul.codes import multiplies_codes, w4a8_codes_matmul


class Trainable(nn.Module):
    """A stored weight as a differentiable function of its trainable tensors; `Format.trainable` makes one.

    `weight` always gives the same values as `stored().dequantize()`, so that storing a trained weight does not round it
    again. `offsets` and `factors` have gradients; both are in relative units, so that one learning rate serves all
    formats.

    Attributes:
        offsets: [out, in], how far each weight was moved from its stored code, in steps of its grid or a multiple of
            them.
        factors: one number for each scale, which is multiplied by its exponential; None: scales do not change.
    """

    offsets: nn.Parameter
    factors: nn.Parameter | None

    def weight(self) -> Tensor:
        """W [out, in] in float32; gradients pass straight through the roundings (arXiv:1308.3432)."""
        raise NotImplementedError

    @property
    def learns(self) -> int:
        """How many of its numbers are trained."""
        return sum(number.numel() for number in self.parameters() if number.requires_grad)

    def fix_codes(self) -> None:
        """From now on `offsets` stay as they are."""
        self.offsets.requires_grad_(False)

    def keep_zeros(self, kept: Tensor) -> None:
        """From now on only the `offsets` of these weights, bool [out, in], have gradients."""
        self.offsets.register_hook(lambda gradient: gradient * kept)

    def on_turned_inputs(self) -> Callable[[Tensor], Tensor] | None:
        """Make `weight` and `collect` those of the product with inputs [..., in] that the returned map has turned, if
        that is quicker than turning the weight; None: inputs stay as they are."""
        return None

    def collect(self, gradient: Tensor) -> None:
        """Add what the gradient of `weight()`, [out, in], means for `offsets` and `factors` to their gradients."""
        with torch.enable_grad():
            weight = self.weight()
        weight.backward(gradient.to(weight.dtype))

    def stored(self) -> "Format":
        """The trained weight in its original format, with the same number of bytes."""
        raise NotImplementedError


class Format(nn.Module):
    """One stored weight [out, in], which consists of its buffers, in memory and on disk.

    Subclasses set `name` and implement the methods below. The layout of their buffers may depend on the device, but
    `state_dict` always holds the canonical tensors, and `from_tensors` takes these.
    """

    name: ClassVar[str]
    shape: tuple[int, int]  # (out, in)
    follows: ClassVar[tuple[str, ...]] = ()  # buffers of floats that are cast with the model
    looks_up: ClassVar[bool] = False  # whether it has `look_up`, so that it can be a token embedding
    keeps: ClassVar[bool] = False  # whether it has `keep_in`, so that it can be part of a larger tensor
    # Whether it is multiplied by x before x is rounded for the other parts. Such a part in 16 bits is not changed when
    # a later method of a recipe stores the rest of the weight.
    exact: ClassVar[bool] = False
    settings: ClassVar[tuple[str, ...]] = ()  # attributes that its specification holds beside the shape
    activation_bits: int | None = None  # bits to which `matmul` rounds x; None: x is not rounded

    def dequantize(self) -> Tensor:
        """W [out, in] in float32."""
        raise NotImplementedError

    def matmul(self, x: Tensor) -> Tensor:
        """y [..., out] = x [..., in] Wᵀ, in x's dtype."""
        raise NotImplementedError

    @property
    def integers(self) -> Packed | Codebook | None:
        """The weight in the form for integer products; None if it is not stored in integers."""
        return None

    def keep_in(self, integers: Packed) -> None:
        """From now on, keep the same weight in these tensors, which may be views. Only if `keeps`."""
        raise NotImplementedError

    def matmul_rounded(self, x: Tensor, rounding: Rounding, before: Transform | None = None) -> Tensor:
        """`matmul` of the x that `rounding` has rounded. If that is fast, a kernel rounds x to integers or float8 and
        multiplies the codes by the integers of the weight.

        Args:
            before: a transform of x before the rounding, which some kernels do in the same pass; None: none.
        """
        w, group, order = self.integers, None if rounding.group_size == -1 else rounding.group_size, None
        float8 = rounding.in_float8
        integers = w is not None and (rounding.in_integers or float8) and fast(x, w, group, float8)
        rotates = integers and isinstance(before, Hadamard) and rounding.step is None and not float8
        if rotates and rotates_into_codes(x, before.block, group) and multiplies_codes(w, group, x.device):
            how = {"block": before.block, "bits": rounding.bits, "group": group, "wide": rounding.wide}
            return w4a8_codes_matmul(*hadamard_codes(x, before.signs, **how), w, dtype=x.dtype)
        if integers and isinstance(before, Permutation):
            order = before.order
        elif before is not None:
            x = before(x)
        if integers:
            how = {"x_bits": rounding.bits, "x_group": group, "x_scale": rounding.step, "x_wide": rounding.wide}
            return w4a8_matmul(x, w, **how, x_order=order, x_float=float8)
        return self.matmul(rounding(x))

    def look_up(self, ids: Tensor) -> Tensor:
        """Rows [n, in] of W in float32, for ids [n]; the other rows are not dequantised. Only if `looks_up`."""
        raise NotImplementedError

    @classmethod
    def stacks(cls, spec: dict[str, Any]) -> bool:
        """Whether any weights of this specification can be joined row by row. Every stored tensor then has a part for
        each row of W."""
        return False

    @classmethod
    def stacked(cls, parts: Sequence["Format"]) -> "Format":
        """The weight with the rows of these weights, one after the other. Only if `stacks`."""
        states = [part.state_dict() for part in parts]
        spec = {**parts[0].spec(), "shape": [sum(part.shape[0] for part in parts), parts[0].shape[1]]}
        return cls.from_tensors(spec, {name: torch.cat([state[name] for state in states]) for name in states[0]})

    def spec(self) -> dict[str, Any]:
        """The description of this weight beside its tensors, as JSON: `format`, `shape`, the format's own settings."""
        return self.spec_of(self.shape, **{name: getattr(self, name) for name in self.settings})

    @classmethod
    def spec_of(cls, shape: tuple[int, int], **settings: Any) -> dict[str, Any]:
        """The `spec()` of a weight of this shape, with a value for each of `settings`."""
        return {"format": cls.name, "shape": list(shape), **settings}

    @classmethod
    def expected_bits(cls, spec: dict[str, Any], float_bits: int, zeros: float = 0.0) -> float:
        """About the stored bits per weight of this specification, for predictions: by default those of its codes, and
        of the scales and zero points of its groups.

        Args:
            float_bits: bits of each float that is cast with the model.
            zeros: the share of the weights that is 0, if zeros are not stored.
        """
        return bits_in_groups(spec, float_bits)

    @classmethod
    def macs(cls, spec: dict[str, Any]) -> int:
        """Multiply-adds of the product with one token; those of few entries beside a larger part are not counted."""
        return 0 if cls.exact else spec["shape"][0] * spec["shape"][1]

    @classmethod
    def from_tensors(cls, spec: dict[str, Any], tensors: dict[str, Tensor]) -> "Format":
        """The weight that `spec()` and `state_dict()` described.

        Raises:
            ValueError: a setting, or the shape, the dtype or a value of a tensor does not fit the others
                (`compress.formats.stored`).
        """
        raise NotImplementedError

    def checked(self) -> "Format":
        """The same weight, whose tensors `from_tensors` has checked."""
        return self.from_tensors(self.spec(), self.state_dict())

    @property
    def nbytes(self) -> int:
        """Bytes of the canonical tensors, which are stored."""
        return sum(t.nbytes for t in self.state_dict().values())

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per weight, floats that are cast with the model counted as the 16 bits in which models are
        deployed."""
        state = self.state_dict().items()
        return (
            8
            * sum(2 * t.numel() if name in self.follows else t.nbytes for name, t in state)
            / (self.shape[0] * self.shape[1])
        )

    def for_compute(self, dtype: torch.dtype, device: torch.device) -> None:
        """Lay the buffers out for activations of this dtype on this device; called whenever the model moves."""

    def trainable(self, original: Tensor | None = None) -> Trainable | None:
        """A differentiable view of this weight; None if it has no trainable tensors.

        Args:
            original: [out, in], the weight before rounding, which shows on which side of its code each weight lies.
        """
        return None

    def trainable_scales(self) -> Trainable | None:
        """A differentiable view of this weight in which scales alone move, if it has none in which codes could."""
        return None

    def trainable_factors(self) -> Trainable | None:
        """A differentiable view of this weight if it is a product of two factors in floats."""
        return None

    def trainable_floats(self) -> Trainable | None:
        """A differentiable view of this weight if it is stored in floats; zeros that a pruning method made stay."""
        return None


class AsStored(Format):
    """A weight whose stored buffers keep their dtypes when the model is cast.

    The product reads further buffers, which are not stored, and which `lay_out` makes from the stored ones.
    """

    def __init__(self) -> None:
        super().__init__()
        self._laid_out_for: tuple[torch.dtype, torch.device] | None = None
        self.register_load_state_dict_post_hook(_lay_out_again)

    def lay_out(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Buffers by name, made from the stored ones, for activations of this dtype."""
        raise NotImplementedError

    def for_compute(self, dtype: torch.dtype, device: torch.device) -> None:
        if self._laid_out_for == (dtype, device):
            return
        for name, tensor in self.lay_out(dtype).items():
            self.register_buffer(name, tensor, persistent=False)
        self._laid_out_for = dtype, device

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "AsStored":
        # Devices change; dtypes do not: `.to(bfloat16)` is about the activations.
        for name, tensor in self._buffers.items():
            self._buffers[name] = None if tensor is None else tensor.to(fn(tensor.new_empty(0)).device)
        return self


def _lay_out_again(weight: AsStored, _) -> None:
    """Lay the buffers for products out again after loading."""
    laid_out_for, weight._laid_out_for = weight._laid_out_for, None
    if laid_out_for is not None:
        weight.for_compute(*laid_out_for)
