"""The C++ kernels of this package: compiled on first use (one to two minutes), kept, and loaded into torch.

A missing C++ compiler or a failed build is not an error: `why_not()` gives the reason, and the ops use their next best
implementation, which `registry.ran` names. `WORKBENCH_NATIVE=0` in the environment switches them off.
"""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from functools import cache
from pathlib import Path

import torch

from kernels.errors import kind_and_first_line
from kernels.user_cache import cache_folder

HERE = Path(__file__).parent
SOURCES = tuple(
    f"{name}.cpp"
    for name in (
        "between", "panels", "panels_tiles", "half", "int8", "kv_decode", "prompt_attention", "step", "trellis", "w4a8",
    )
)  # fmt: skip
# There are loops for each of these, the best first; `runs` tells which ones a machine has. "neon bf16" is NEON with
# products of pairs of bfloat16. "portable" is compiled from loops without instructions of a particular processor.
ISAS = ("avx512bf16", "avx512", "avx2", "neon bf16", "neon", "portable")
FEW = 8  # up to this many tokens, AVX-512 multiplies bytes even if the processor has AMX
FEW_ROUNDED = 16  # the same for packed weights with rounded activations
FLAGS = ("-O3", "-std=c++20", "-fPIC", "-DAT_PARALLEL_OPENMP=1", "-w")
OPENMP = "#include <omp.h>\nint main() { return omp_get_max_threads() < 1; }\n"
_LOCK = threading.Lock()


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
        compiler = (
            shlex.split(os.environ.get("CXX", ""))
            or [found for name in ("g++", "c++", "clang++") if (found := shutil.which(name))][:1]
        )
        library = _place(compiler)
        if not library.exists():
            if not compiler:
                return _told("no C++ compiler (g++ or clang++) was found")
            library = _build(compiler, library)
        torch.ops.load_library(library)
    except (
        Exception
    ) as error:  # no home, a cache that cannot be written, no setuptools, a compiler of another kind, ...
        return _told(kind_and_first_line(error))
    _register_fakes()
    return None


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
def most_in_loops() -> int:
    """The largest number of tokens for which packed weights are multiplied in loops instead of `tiles`."""
    return _most_in_loops()


@cache
def _most_in_loops() -> int:
    return torch.ops.workbench.panels_most_in_loops() if why_not() is None else FEW


@cache
def tiles() -> str:
    """The instructions that multiply many tokens of bfloat16 by packed weights on this machine.

    "amx", which also multiplies bytes and which Linux must permit for this process; "avx512 tiles", with AVX512-BF16;
    or "" if there are neither.
    """
    return torch.ops.workbench.tiles_isa() if why_not() is None else ""


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
    """Are the kernels loaded, on a CPU with AVX512-BF16, which multiplies pairs of bfloat16?"""
    return _prompt_attention_runs()


@cache
def _prompt_attention_runs() -> bool:
    return why_not() is None and torch.ops.workbench.prompt_attention_runs()


def runs(isa: str) -> bool:
    """Does this machine have the instruction set, and does the build have loops for it?"""
    return torch.ops.workbench.panels_runs(isa)


def _place(compiler: list[str]) -> Path:
    """The path of the built library; its name is a hash of everything that determines its content."""
    sources = b"".join(path.read_bytes() for path in sorted(HERE.glob("*.cpp")) + sorted(HERE.glob("*.inc")))
    what = (
        f"{torch.__version__} {torch.compiled_with_cxx11_abi()} {sys.platform} {platform.machine()} {FLAGS} {compiler}"
    )
    name = hashlib.sha256(sources + what.encode()).hexdigest()[:16]
    return cache_folder("native") / f"{name}.so"


def _build(compiler: list[str], library: Path) -> Path:
    """Compile into a temporary file next to the library and rename it, so that concurrent builds do no harm.

    A compiler without OpenMP builds another library, whose kernels run on one thread. Returns the path of the library
    that was built. OpenMP is searched for at every start, so that it is used as soon as it is available.
    """
    from torch.utils.cpp_extension import include_paths, library_paths

    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        include = [f"-I{path}" for path in include_paths("cpu")]
        link = [f"-L{path}" for path in library_paths("cpu")] + ["-lc10", "-ltorch_cpu", "-ltorch"]
        threads = _openmp(compiler, include, [Path(path) for path in library_paths("cpu")], Path(scratch))
        compiling, linking = threads or ([], [])
        if threads is None:
            library = library.with_stem(f"{library.stem}-one-thread")
        if not library.exists():
            print("Building the C++ kernels, once (one to two minutes) ...", file=sys.stderr, flush=True)
            objects = [str(Path(scratch) / f"{source}.o") for source in SOURCES]
            commands = [[*compiler, *FLAGS, *compiling, *include, "-c", str(HERE / source)] for source in SOURCES]
            _run_all([[*command, "-o", to] for command, to in zip(commands, objects, strict=True)])
            built = Path(scratch) / library.name
            _run_all([[*compiler, *FLAGS, "-shared", *objects, "-o", str(built), *linking, *link]])
            os.replace(built, library)
    if threads is None:
        print(f"{compiler[0]} has no OpenMP: the C++ kernels run on one thread.", file=sys.stderr, flush=True)
    return library


def _openmp(
    compiler: list[str], include: list[str], libraries: list[Path], scratch: Path
) -> tuple[list[str], list[str]] | None:
    """The flags for OpenMP of this compiler and of the linker; None if no flags work.

    Apple's clang does not know `-fopenmp`, but its preprocessor does; there, torch includes the library and its header.
    """
    ways = [(["-fopenmp"], ["-fopenmp"])]
    for folder in libraries:
        if any(folder.glob("libomp.*")):
            ways.append((["-Xpreprocessor", "-fopenmp"], [f"-L{folder}", "-lomp", f"-Wl,-rpath,{folder}"]))
    source = scratch / "openmp.cpp"
    source.write_text(OPENMP)
    for compiling, linking in ways:
        try:
            _run_all([[*compiler, *compiling, *include, str(source), "-o", str(scratch / "openmp"), *linking]])
        except RuntimeError:
            continue
        return compiling, linking
    return None


def _run_all(commands: list[list[str]]) -> None:
    """Run the commands in parallel; RuntimeError with the first error's line if one fails."""
    running = [
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for command in commands
    ]
    for process, said in [(process, process.communicate()[1]) for process in running]:  # all of them have ended
        if process.returncode:
            first = next((line for line in said.splitlines() if "error" in line), said.strip()[:200])
            raise RuntimeError(f"{process.args[0]} failed: {first}")


def _register_fakes() -> None:
    @torch.library.register_fake("workbench::panels_matmul")
    def _(x, codes, scale, table, zero, out, isa):
        return x.new_empty(*x.shape[:-1], out)

    @torch.library.register_fake("workbench::panels_matmul_several")
    def _(x, codes, scales, tables, zeros, outs):
        return [x.new_empty(*x.shape[:-1], out) for out in outs]

    @torch.library.register_fake("workbench::panels_w4a8_several")
    def _(x, codes, scales, zeros, tables, outs, x_bits):
        return [x.new_empty(*x.shape[:-1], out) for out in outs]

    @torch.library.register_fake("workbench::int8_matmul_several")
    def _(x, codes, scales, x_scale):
        return [x.new_empty(*x.shape[:-1], scale.shape[0]) for scale in scales]

    @torch.library.register_fake("workbench::half_matmul")
    def _(x, weights, biases, isa):
        return [x.new_empty(*x.shape[:-1], weight.shape[0]) for weight in weights]

    @torch.library.register_fake("workbench::int8_matmul")
    def _(x, codes, scale, x_scale):
        return x.new_empty(*x.shape[:-1], scale.shape[0])

    @torch.library.register_fake("workbench::panels_w4a8")
    def _(x, codes, scale, zero, table, out, x_bits, x_group, x_scale, x_wide=0, x_order=None):
        return x.new_empty(*x.shape[:-1], out)

    @torch.library.register_fake("workbench::prompt_attention_native")
    def _(q, k, v, scale):
        return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])

    @torch.library.register_fake("workbench::kv_decode_native")
    def _(q, k, v, params_k, params_v, tail_k, tail_v, lengths, starts, indices, bits, group, scale, softcap,
          return_mass, return_lse, isa):  # fmt: skip
        held = k.shape[2] + (0 if tail_k is None else tail_k.shape[2])
        mass = (k.shape[0], k.shape[1], held if indices is None else indices.shape[2]) if return_mass else (0,)
        lse = q.shape[:3] if return_lse else (0,)
        return q.new_empty(q.shape), *(q.new_empty(shape, dtype=torch.float32) for shape in (mass, lse))

    @torch.library.register_fake("workbench::kv_decode_apart")
    def _(q, k, v, params_k, params_v, tail_k, tail_v, starts, bits, group, scale, softcap, isa):
        return q.new_empty(q.shape)

    @torch.library.register_fake("workbench::kv_page_list")
    def _(q, bounds, starts, lengths, pages, page, most, behind, scale, isa):
        indices = q.new_empty(*bounds.shape[:2], most * page + behind, dtype=torch.int64)
        return indices, indices.new_empty(indices.shape[:2])

    @torch.library.register_fake("workbench::kv_decode_ranked")
    def _(q, k, v, ranking, bounds, starts, lengths, pages, page, most, behind, ranking_scale, scale, softcap, isa):
        return q.new_empty(q.shape)

    @torch.library.register_fake("workbench::kv_score_list")
    def _(scores, starts, lengths, pages, page, most, behind):
        indices = scores.new_empty(*scores.shape[:2], most * page + behind, dtype=torch.int64)
        return indices, indices.new_empty(indices.shape[:2])

    @torch.library.register_fake("workbench::trellis_encode")
    def _(x, table, bits, window, isa):
        return x.new_empty(x.shape, dtype=torch.uint8), x.new_empty(x.shape[0])

    @torch.library.register_fake("workbench::trellis_decode")
    def _(codes, bits, states, isa):
        return codes.new_empty(codes.shape[1], codes.shape[0] * codes.shape[2] * 8 // bits, dtype=torch.float32)

    @torch.library.register_fake("workbench::trellis_multiply")
    def _(x, codes, bits, states, isa):
        return x.new_empty(x.shape[0], codes.shape[0] * codes.shape[2] * 8 // bits)
