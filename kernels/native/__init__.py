"""The C++ kernels of this package: compiled on first use (one to two minutes), kept, and loaded into torch.

A missing C++ compiler or a failed build is not an error: `why_not()` gives the reason, and the ops use their next best
implementation, which `registry.ran` names. `WORKBENCH_NATIVE=0` in the environment switches them off, and
`WORKBENCH_ISA` (kernels/processor.py) keeps them to the instructions of older processors.
"""

import os
import sys
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from kernels.compiler import build, built_library
from kernels.processor import limit_libraries
from kernels.support.errors import kind_and_first_line

HERE = Path(__file__).parent
# There are loops for each of these, the best first; `runs` tells which ones a machine has. "neon bf16" is NEON with
# products of pairs of bfloat16. "portable" is compiled from loops without instructions of a particular processor.
ISAS = ("avx512bf16", "avx512", "avx2", "neon bf16", "neon", "portable")
FEW = 8  # up to this many tokens, AVX-512 multiplies bytes even if the processor has AMX
FEW_ROUNDED = 16  # the same for packed weights with rounded activations
_LOCK = threading.Lock()
_shapes: dict[str, Callable] = {}  # by ops that do not exist yet, see `shapes_of`
limit_libraries()  # before torch computes anything


@torch.compiler.assume_constant_result
def why_not() -> str | None:
    """None once the kernels are loaded into `torch.ops.workbench`; else the reason why they cannot be, in one line."""
    return _load()


def _load() -> str | None:
    with _LOCK:  # two threads must not register the same ops
        return _load_once()


@cache
def _load_once() -> str | None:
    if os.environ.get("WORKBENCH_NATIVE", "1") == "0":
        return "switched off by WORKBENCH_NATIVE=0"
    try:
        torch.ops.load_library(built_library(HERE) or build(HERE))
    except (
        Exception
    ) as error:  # no home, a cache that cannot be written, no setuptools, a compiler of another kind, ...
        return _told(kind_and_first_line(error))
    while _shapes:
        _register(*_shapes.popitem())
    return None


def shapes_of(op: str) -> Callable[[Callable], Callable]:
    """A decorator for the function that makes the empty outputs of an op of this library, which torch.compile needs.

    torch takes it only for an op that exists, so that it waits until the library is loaded.
    """

    def keep(outputs: Callable) -> Callable:
        with _LOCK:
            if hasattr(torch.ops.workbench, op):
                _register(op, outputs)
            else:
                _shapes[op] = outputs
        return outputs

    return keep


def _register(op: str, outputs: Callable) -> None:
    torch.library.register_fake(f"workbench::{op}", outputs)


def _told(reason: str) -> str:
    print(f"The C++ kernels cannot be used ({reason}); slower ones take their place.", file=sys.stderr)
    return reason


@torch.compiler.assume_constant_result
def isa(dtype: torch.dtype, many: bool = False) -> str:
    """The instruction set that the loaded kernels use on this machine for activations of `dtype`.

    many: for more tokens than `most_in_loops()`, whose products with packed weights use `tiles` if the processor has
    them.
    """
    if many and dtype == torch.bfloat16 and tiles():
        return tiles()
    return _isa("panels_isa", dtype == torch.bfloat16)


@torch.compiler.assume_constant_result
def rows_isa(dtype: torch.dtype, columns: int, *, kept: bool = False, step: bool = False) -> str:
    """The instructions that multiply a few tokens by 16-bit rows of so many columns.

    kept: rows without their zeros. step: in a step of decoding, which uses tiles if the processor has them.
    """
    return _rows_isa(dtype == torch.bfloat16, columns, kept, step)


@cache
def _rows_isa(*how: bool | int) -> str:
    return torch.ops.workbench.rows_isa(*how)


@torch.compiler.assume_constant_result
def most_in_loops() -> int:
    """The largest number of tokens for which packed weights are multiplied in loops instead of `tiles`."""
    return _most_in_loops()


@cache
def _most_in_loops() -> int:
    return torch.ops.workbench.panels_most_in_loops() if why_not() is None else FEW


@torch.compiler.assume_constant_result
def tiles() -> str:
    """The instructions that multiply many tokens of bfloat16 by packed weights on this machine.

    "amx", which also multiplies bytes and which Linux must permit for this process; "avx512 tiles", with AVX512-BF16;
    or "" if there are neither.
    """
    return _tiles()


@cache
def _tiles() -> str:
    return torch.ops.workbench.tiles_isa() if why_not() is None else ""


@torch.compiler.assume_constant_result
def walks_in_tiles() -> str:
    """The same as `tiles` for weights in walks through a trellis; AVX512-VBMI and AVX512-VNNI are needed as well."""
    return _walks_in_tiles()


@cache
def _walks_in_tiles() -> str:
    return torch.ops.workbench.trellis_tiles_isa() if why_not() is None else ""


@torch.compiler.assume_constant_result
def kv_decode_isa(dtype: torch.dtype) -> str:
    """The same for `kv_decode` with queries of `dtype`."""
    return _isa("kv_decode_isa", dtype == torch.float32)


@cache
def _isa(op: str, flag: bool) -> str:
    return getattr(torch.ops.workbench, op)(flag)  # cached, because eager products call this each time


@torch.compiler.assume_constant_result
def integers(many: bool = False) -> str:
    """The instructions that multiply 8-bit codes by rounded activations here, by their names in records; "" if none.

    "native" is AVX512-VNNI, the name in all records; "neon dotprod" means NEON's dot products; "amx" is used for many
    tokens, more than FEW or FEW_ROUNDED, if the processor has it.
    """
    return "amx" if many and tiles() == "amx" else _integers()


@cache
def _integers() -> str:
    found = torch.ops.workbench.integer_isa() if why_not() is None else ""
    return "native" if found == "avx512vnni" else found


@torch.compiler.assume_constant_result
def matrices() -> str:
    """The instructions by which packed weights and more than FEW_ROUNDED rounded tokens are multiplied where tiles are
    not used, by their name in records, if they differ from those for fewer tokens: "neon i8mm" on ARM; else ""."""
    return _matrices()


@cache
def _matrices() -> str:
    return torch.ops.workbench.matrices_isa() if why_not() is None else ""


def w4a8_runs() -> bool:
    """Are the kernels loaded, on a CPU that multiplies weights in panels by rounded activations as integers?"""
    return integers() != ""


@torch.compiler.assume_constant_result
def prompt_attention_runs() -> bool:
    """Are the kernels loaded, on a CPU with AVX2 or NEON, which attend to prompts in 16 bits?"""
    return _prompt_attention_runs()


@cache
def _prompt_attention_runs() -> bool:
    return why_not() is None and torch.ops.workbench.prompt_attention_runs()


def runs(isa: str) -> bool:
    """Does this machine have the instruction set, and does the build have loops for it?"""
    return torch.ops.workbench.panels_runs(isa)
