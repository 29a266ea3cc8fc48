"""A weight in 8 bits, int8 or fp8, whose product rounds the activations to the same 8 bits."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from compress.formats.base import Format
from compress.formats.stored import Stored
from kernels import native
from kernels.int_matmul import int_matmul
from kernels.int_matmul.layout import Packed, pack
from kernels.int_matmul.panels import panels_fit, to_panels
from kernels.w8a8_matmul import BLOCK, LARGEST, W8, prepacked_fits, quantize_rows, to_prepacked, to_rows, w8a8_matmul


class EightBit(Format):
    """w = scale * code, with a scale per output channel or per 128 x 128 block; x is rounded in steps, too.

    Buffers: `codes` and `scale`, laid out as in `kernels.w8a8_matmul.W8`, and `x_scale`, the step of all activations
    (float32, no dimensions), or None: a step per token (block-wise: per token and 128 columns), computed on each call.
    On a CPU with int8 dot products int8 codes lie prepacked. Prepacked codes cannot be saved, copied or moved, so that
    they are turned into rows before that, and in `state_dict`.
    """

    name: ClassVar[str] = "eight_bit"
    activation_bits: int | None = 8

    def __init__(self, w: W8, x_scale: Tensor | None = None) -> None:
        super().__init__()
        self.shape = w.shape
        self._panels: Packed | None = None
        self._set(w, x_scale)

    @property
    def w8(self) -> W8:
        return W8(self.layout, self.codes, self.scale, self.shape)

    @property
    def panels(self) -> Packed | None:
        """int8 codes for decoding steps that multiply them by rounded inputs as floats, on a CPU without dot products
        of integers; they are made here, beside the rows, and from then on products use them, too. None for other
        weights and on other processors."""
        if self._panels is None and self.layout == "rows" and self.codes.dtype == torch.int8 and self.scale.dim() == 1:
            columns = self.shape[1]
            shape = Packed("rows", self.codes, self.scale[:, None], None, 8, columns, self.shape)
            if not native.integers() and panels_fit(shape, torch.bfloat16, self.codes.device):
                codes = self.codes.to(torch.int16) + 128
                self._panels = to_panels(pack(codes, shape.scale, None, bits=8, group_size=columns))
        return self._panels

    def dequantize(self) -> Tensor:
        out, columns = self.shape
        scale = self.scale[:, None]  # [out, 1]
        if self.scale.dim() == 2:  # [ceil(out / 128), ceil(in / 128)]
            scale = self.scale.repeat_interleave(BLOCK, 0)[:out].repeat_interleave(BLOCK, 1)[:, :columns]
        return to_rows(self.w8).codes.float() * scale

    def matmul(self, x: Tensor) -> Tensor:
        if self._panels is not None and panels_fit(self._panels, torch.float32, x.device):
            codes, step = quantize_rows(x, torch.int8, scale=self.x_scale)
            return (int_matmul(codes.float(), self._panels) * step).to(x.dtype)
        return w8a8_matmul(x, self.w8, x_scale=self.x_scale)

    def for_compute(self, dtype: torch.dtype, device: torch.device) -> None:
        if prepacked_fits(self.w8):
            self._set(to_prepacked(self.w8), self.x_scale)

    def spec(self) -> dict[str, Any]:
        in_blocks, static = self.scale.dim() == 2, self.x_scale is not None
        return self.spec_of(self.shape, self.codes.dtype, in_blocks=in_blocks, static=static)

    @classmethod
    def spec_of(cls, shape: tuple[int, int], dtype: torch.dtype, *, in_blocks: bool, static: bool) -> dict[str, Any]:
        """The `spec()` of a weight of this shape.

        Args:
            in_blocks: a scale per 128 x 128 block, not per output channel.
            static: one step for all activations.
        """
        settings = {"dtype": str(dtype).removeprefix("torch."), "block": BLOCK if in_blocks else None, "static": static}
        return {"format": cls.name, "shape": list(shape), **settings}

    @classmethod
    def expected_bits(cls, spec: dict[str, Any], float_bits: int, zeros: float = 0.0) -> float:
        return 8 * getattr(torch, spec["dtype"]).itemsize

    @classmethod
    def from_tensors(cls, spec: dict[str, Any], tensors: dict[str, Tensor]) -> "EightBit":
        stored = Stored(spec, tensors)
        codes = stored.tensor("codes", stored.shape, LARGEST)
        blocks = (-(-stored.out // BLOCK), -(-stored.columns // BLOCK))
        scale = stored.tensor("scale", (stored.out,) if spec["block"] is None else blocks, torch.float32)
        x_scale = stored.tensor("x_scale", (), torch.float32) if spec["static"] else None
        return cls(W8("rows", codes, scale, stored.shape), x_scale)

    def _set(self, w: W8, x_scale: Tensor | None) -> None:
        self.layout, self._panels = w.layout, None
        self.register_buffer("codes", w.codes)
        self.register_buffer("scale", w.scale)
        self.register_buffer("x_scale", x_scale)

    def _apply(self, fn, recurse=True):
        # Devices change; dtypes do not: `.to(bfloat16)` is about the activations.
        device = fn(self.scale.new_empty(0)).device
        if device != self.scale.device:
            rows, x_scale = to_rows(self.w8), self.x_scale
            rows = rows._replace(codes=rows.codes.to(device), scale=rows.scale.to(device))
            self._set(rows, None if x_scale is None else x_scale.to(device))
        return self

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[prefix + "codes"] = to_rows(self.w8).codes
        destination[prefix + "scale"] = self.scale
        if self.x_scale is not None:
            destination[prefix + "x_scale"] = self.x_scale

    def _load_from_state_dict(self, state_dict, prefix, *args):
        self._set(to_rows(self.w8), self.x_scale)
        super()._load_from_state_dict(state_dict, prefix, *args)
        self.for_compute(torch.float32, self.scale.device)

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: rows, because the target may not support prepacked codes, and bytes, because pickle
        cannot read float8."""
        rows = to_rows(self.w8)
        codes = rows.codes.view(torch.int8)
        return {
            **self.__dict__,
            "layout": "rows",
            "_panels": None,
            "dtype": rows.codes.dtype,
            "_buffers": {**self._buffers, "codes": codes},
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        dtype = state.pop("dtype")
        super().__setstate__(state)
        self.codes = self.codes.view(dtype)
        self.for_compute(torch.float32, self.scale.device)
