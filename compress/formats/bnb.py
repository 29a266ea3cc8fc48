"""Weights as bitsandbytes stores and multiplies them: its tensors, its kernels. Needs `pip install .[bnb]`."""

import importlib
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from compress.formats.base import Format
from compress.formats.stored import Stored
from kernels.registry import ran
from kernels.support.errors import errors_only

BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
NESTED = 256  # scales of blocks that share a scale
PANEL = 32  # rows that the CPU kernel of bitsandbytes for 4 bits takes at a time


def library() -> ModuleType:
    """The package bitsandbytes.

    Raises:
        ValueError: the package is not installed, or is too old.
    """
    # Beside its own CPU kernel it also looks for PyPI's package `kernels`, which has the same name as ours.
    try:
        with errors_only("bitsandbytes.backends.cpu.ops"):
            bnb = importlib.import_module("bitsandbytes")
            importlib.import_module("bitsandbytes.functional")
    except ImportError:
        raise ValueError(
            "bitsandbytes is not installed; `pip install bitsandbytes` or `pip install .[bnb]` works"
        ) from None
    if not hasattr(torch.ops.bitsandbytes, "gemm_4bit"):
        raise ValueError(f"bitsandbytes {bnb.__version__} is too old; 0.50 works")
    return bnb


class _Bitsandbytes(Format):
    """Formats whose buffers follow the model's device and never its dtype."""

    def _apply(self, fn, recurse=True):
        device = fn(next(self.buffers()).new_empty(0, dtype=torch.float32)).device
        for name, tensor in self._buffers.items():
            self._buffers[name] = None if tensor is None else tensor.to(device)
        return self


class BnbNF4(_Bitsandbytes):
    """NF4 of bitsandbytes (QLoRA, arXiv:2305.14314), in the form of its Linear4bit.

    Buffers: `codes` uint8 [out * in / 2, 1], the first of two columns in the high half of a byte; `absmax` per block of
        the
    flattened weight, float32 or, nested, uint8 codes with `nested_absmax`, `nested_quant_map` and `nested_offset`;
    `quant_map` [16]. Each weight holds its own maps, as in bitsandbytes. Computes with its fused kernels on a GPU. On a
    CPU with AVX512-BF16 and bfloat16 activations, codes and absmax are laid out for its kernel there (`packed`, if the
    shape allows it); Linear4bit then drops the stored absmax, which `state_dict` here keeps. For all other activations,
    including float32, which Linear4bit would round to bfloat16 on such a CPU, the weight is dequantised and multiplied.
    """

    name: ClassVar[str] = "bnb_nf4"
    settings: ClassVar[tuple[str, ...]] = ("blocksize",)

    def __init__(self, shape: tuple[int, int], blocksize: int, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        library()
        self.shape, self.blocksize, self.layout = shape, blocksize, "rows"
        for name in ("codes", "absmax", "quant_map", "nested_absmax", "nested_quant_map", "nested_offset"):
            self.register_buffer(name, tensors.get(name))
        self.register_buffer("packed_absmax", None, persistent=False)

    @classmethod
    def from_weight(cls, W: Tensor, *, blocksize: int, double_quant: bool) -> "BnbNF4":
        """W [out, in], quantised by bitsandbytes."""
        codes, state = library().functional.quantize_4bit(
            W.contiguous(), blocksize=blocksize, compress_statistics=double_quant, quant_type="nf4"
        )
        tensors = {"codes": codes, "absmax": state.absmax, "quant_map": state.code}
        if state.nested:
            nested = state.state2
            tensors |= {"nested_absmax": nested.absmax, "nested_quant_map": nested.code, "nested_offset": state.offset}
        return cls((W.shape[0], W.shape[1]), blocksize, tensors)

    def dequantize(self) -> Tensor:
        absmax = self._absmax()
        return torch.ops.bitsandbytes.dequantize_4bit(
            self._codes(), absmax, self.blocksize, "nf4", self.shape, torch.float32
        )

    def matmul(self, x: Tensor) -> Tensor:
        if not x.numel():
            return x.new_zeros(*x.shape[:-1], self.shape[0])
        if self.layout == "packed":
            ran("bnb_nf4", "bitsandbytes' CPU kernel")
            return torch.ops.bitsandbytes.gemv_4bit(
                x.contiguous(), self.codes, self.shape, self.packed_absmax, self.quant_map, self.blocksize
            )
        ran("bnb_nf4", "bitsandbytes' GPU kernels" if x.is_cuda else "bitsandbytes, dequantised")
        nested = {}
        if self.nested_absmax is not None:
            nested = {
                "absmax_8bit": self.absmax,
                "absmax_code": self.nested_quant_map,
                "absmax_offset": self.nested_offset,
            }
        absmax = self.nested_absmax if nested else self.absmax
        return torch.ops.bitsandbytes.gemm_4bit(
            x.contiguous(), self.codes, self.shape, absmax, self.blocksize, "nf4", **nested
        )

    def for_compute(self, dtype: torch.dtype, device: torch.device) -> None:
        out, columns = self.shape
        fits = out % PANEL == 0 and columns % self.blocksize == 0
        layout = "packed" if fits and dtype == torch.bfloat16 and cpu_kernel(device) else "rows"
        if layout == self.layout:
            return
        if layout == "rows":
            self.codes, self.packed_absmax = self._codes(), None
        else:
            state = SimpleNamespace(
                absmax=self._absmax(), shape=self.shape, blocksize=self.blocksize, nested=False, dtype=dtype
            )
            self.codes, _ = library().functional._convert_weight_packed_for_cpu(self.codes, state)
            self.packed_absmax = state.absmax  # bfloat16 [in / blocksize, out]
        self.layout = layout

    @classmethod
    def expected_bits(cls, spec: dict[str, Any], float_bits: int, zeros: float = 0.0) -> float:
        return 4.1

    @classmethod
    def from_tensors(cls, spec: dict[str, Any], tensors: dict[str, Tensor]) -> "BnbNF4":
        stored = Stored(spec, tensors)
        blocksize = stored.number("blocksize", BLOCKSIZES)
        count = stored.out * stored.columns
        blocks = -(-count // blocksize)
        own = {
            "codes": stored.tensor("codes", (-(-count // 2), 1), torch.uint8),
            "quant_map": stored.tensor("quant_map", (16,), torch.float32),
        }
        nested = "nested_absmax" in tensors
        own["absmax"] = stored.tensor("absmax", (blocks,), torch.uint8 if nested else torch.float32)
        if nested:
            own["nested_absmax"] = stored.tensor("nested_absmax", (-(-blocks // NESTED),), torch.float32)
            own["nested_quant_map"] = stored.tensor("nested_quant_map", (256,), torch.float32)
            own["nested_offset"] = stored.tensor("nested_offset", (), torch.float32)
        return cls(stored.shape, blocksize, own)

    def _codes(self) -> Tensor:
        """The stored `codes`."""
        if self.layout == "rows":
            return self.codes
        state = SimpleNamespace(
            packing_format_for_cpu=True,
            original_nested=False,
            original_dtype=None,
            original_qshape=(self.codes.numel(), 1),
        )
        return library().functional._convert_weight_packed_for_cpu_inverse(self.codes, state)[0]

    def _absmax(self) -> Tensor:
        """Scales of the blocks, float32 [blocks]."""
        if self.nested_absmax is None:
            return self.absmax
        wide = torch.ops.bitsandbytes.dequantize_blockwise(
            self.absmax, self.nested_absmax, self.nested_quant_map, NESTED, torch.float32
        )
        return wide + self.nested_offset

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "codes"] = self._codes()

    def _load_from_state_dict(self, state_dict, prefix, *args):
        layout = self.layout
        self.for_compute(torch.float32, self.codes.device)
        super()._load_from_state_dict(state_dict, prefix, *args)
        if layout == "packed":
            self.for_compute(torch.bfloat16, self.codes.device)


class BnbInt8(_Bitsandbytes):
    """LLM.int8() of bitsandbytes (arXiv:2208.07339), in the form of its Linear8bitLt without 16-bit weights.

    Buffers, with its names: `CB` int8 [out, in] and `SCB` float32 [out], the largest magnitudes of W's rows in float16;
    the step is SCB / 127. `matmul` rounds x to float16 first, as there; columns in which any token reaches `threshold`
    are multiplied in x's dtype by the dequantised weight, the rest in int8 with a step per token; 0: all in int8. The
    columns are chosen on each call, so that the output of a token depends on the other tokens of the call.
    """

    name: ClassVar[str] = "bnb_int8"
    settings: ClassVar[tuple[str, ...]] = ("threshold",)
    activation_bits: int | None = 8

    def __init__(self, CB: Tensor, SCB: Tensor, threshold: float) -> None:
        super().__init__()
        library()
        self.shape, self.threshold = (CB.shape[0], CB.shape[1]), threshold
        self.register_buffer("CB", CB)
        self.register_buffer("SCB", SCB)

    @classmethod
    def from_weight(cls, W: Tensor, *, threshold: float) -> "BnbInt8":
        """W [out, in], quantised by bitsandbytes."""
        CB, SCB, _ = library().functional.int8_vectorwise_quant(W.to(torch.float16).contiguous())
        return cls(CB, SCB, threshold)

    def dequantize(self) -> Tensor:
        return torch.ops.bitsandbytes.int8_vectorwise_dequant(self.CB, self.SCB)

    def matmul(self, x: Tensor) -> Tensor:
        # The functions that its MatMul8bitLt calls for inference, without a log line for each bfloat16 input.
        if not x.numel():
            return x.new_zeros(*x.shape[:-1], self.shape[0])
        ran("bnb_int8", f"bitsandbytes on {x.device.type}")
        ops = torch.ops.bitsandbytes
        rows = x.reshape(-1, x.shape[-1])
        CA, SCA, outliers = ops.int8_vectorwise_quant(rows.to(torch.float16), self.threshold)
        if self.threshold:
            y = ops.int8_mixed_scaled_mm(rows, CA, self.CB, SCA, self.SCB, outliers)[0]
        else:
            y = ops.int8_scaled_mm(CA, self.CB, SCA, self.SCB, dtype=x.dtype)
        return y.view(*x.shape[:-1], self.shape[0])

    @classmethod
    def expected_bits(cls, spec: dict[str, Any], float_bits: int, zeros: float = 0.0) -> float:
        return 8

    @classmethod
    def from_tensors(cls, spec: dict[str, Any], tensors: dict[str, Tensor]) -> "BnbInt8":
        stored = Stored(spec, tensors)
        if not isinstance(spec["threshold"], int | float):
            raise ValueError(f"`threshold` (={spec['threshold']!r}) of a stored weight must be a number")
        CB = stored.tensor("CB", stored.shape, torch.int8)
        return cls(CB, stored.tensor("SCB", (stored.out,), torch.float32), spec["threshold"])


def cpu_kernel(device: torch.device) -> bool:
    """Whether this device is a CPU for which bitsandbytes has its own kernel for 4 bits."""
    functional = library().functional
    return (
        device.type == "cpu"
        and hasattr(functional, "_convert_weight_packed_for_cpu")
        and bool(functional.has_avx512bf16())
    )
