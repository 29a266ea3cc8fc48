"""Builds a C++ library for torch from a folder of sources, and keeps it and its objects in the user's cache folder.

The library's name is a hash of all that determines its content, so that a library that was built earlier is found on a
machine whose compiler has gone. An object's name is a hash of its own source, of what that includes, and of the flags:
after one source was edited, one is compiled.
"""

import hashlib
import importlib.metadata
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kernels.support.user_cache import cache_folder

COMPILERS = ("g++", "c++", "clang++")  # the first of them that there is, if CXX names none
FLAGS = ("-O3", "-std=c++20", "-fPIC", "-DAT_PARALLEL_OPENMP=1", "-w")
OPENMP = "#include <omp.h>\nint main() { return omp_get_max_threads() < 1; }\n"
ONE_THREAD = "-one-thread"  # in the name of a library that was built without OpenMP
KEPT = 60  # objects; the oldest ones beyond are deleted


def compiler() -> list[str]:
    """The command of the C++ compiler: $CXX, or the first of COMPILERS on the path; [] if there is none."""
    return shlex.split(os.environ.get("CXX", "")) or [name for name in COMPILERS if shutil.which(name)][:1]


def built_library(folder: Path) -> Path | None:
    """The library of the sources in `folder` that was built earlier: by this compiler, or by any if there is none."""
    commands = [found] if (found := compiler()) else [[name] for name in COMPILERS]
    places = [place(folder, command) for command in commands]
    if not found:  # whoever has a compiler gets a library with OpenMP as soon as there is OpenMP
        places += [path.with_stem(path.stem + ONE_THREAD) for path in places]
    return next((path for path in places if path.exists()), None)


def place(folder: Path, command: list[str]) -> Path:
    """The path of the library that the compiler `command` builds from the sources in `folder`."""
    sources = b"".join(path.read_bytes() for path in sorted(folder.glob("*.cpp")) + sorted(folder.glob("*.inc")))
    name = hashlib.sha256(sources + " ".join(_circumstances(command)).encode()).hexdigest()[:16]
    return cache_folder(folder.name) / f"{name}.so"


def build(folder: Path) -> Path:
    """Compile the sources in `folder`, those that have no object yet, and link the library. Returns its path.

    It is linked into a temporary file next to its place and renamed, so that concurrent builds do no harm. A compiler
    without OpenMP builds another library, whose kernels run on one thread. OpenMP is searched for at every start, so
    that it is used as soon as it is available.

    Raises:
        RuntimeError: there is no compiler, or it failed.
    """
    from torch.utils.cpp_extension import include_paths, library_paths

    if not (command := compiler()):
        raise RuntimeError("no C++ compiler (g++ or clang++) was found")
    library = place(folder, command)
    with tempfile.TemporaryDirectory(dir=library.parent) as name:
        scratch = Path(name)
        include = [f"-I{path}" for path in include_paths("cpu")]
        link = [f"-L{path}" for path in library_paths("cpu")] + ["-lc10", "-ltorch_cpu", "-ltorch"]
        threads = openmp(command, include, [Path(path) for path in library_paths("cpu")], scratch)
        compiling, linking = threads or ([], [])
        if threads is None:
            library = library.with_stem(library.stem + ONE_THREAD)
        if not library.exists():
            print("Building the C++ kernels, once (one to two minutes) ...", file=sys.stderr, flush=True)
            objects = _compile(folder, [*command, *FLAGS, *compiling], include, scratch)
            _run([*command, *FLAGS, "-shared", *objects, "-o", scratch / library.name, *linking, *link])
            os.replace(scratch / library.name, library)
    if threads is None:
        print(f"{command[0]} has no OpenMP: the C++ kernels run on one thread.", file=sys.stderr, flush=True)
    return library


def included(source: Path) -> set[Path]:
    """The source and the files of its folder that it includes."""
    names = re.findall(r'^ *# *include "([^"]+)"', source.read_text(), re.MULTILINE)
    return {source}.union(*(included(source.parent / name) for name in names))


def openmp(
    command: list[str], include: list[str], libraries: list[Path], scratch: Path
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
            _run([*command, *compiling, *include, source, "-o", scratch / "openmp", *linking])
        except RuntimeError:
            continue
        return compiling, linking
    return None


def _circumstances(command: list[str]) -> list[str]:
    """Whatever beside the sources determines what a compiler builds."""
    return [importlib.metadata.version("torch"), sys.platform, platform.machine(), *FLAGS, *command]


def _compile(folder: Path, command: list[str], include: list[str], scratch: Path) -> list[Path]:
    """The objects of all sources in `folder`, several at once; those that are there already are not compiled."""
    kept = cache_folder(folder.name) / "objects"
    kept.mkdir(mode=0o700, exist_ok=True)

    def object_name(source: Path) -> str:
        files = b"".join(path.read_bytes() for path in sorted(included(source)))
        return f"{source.stem}-{hashlib.sha256(files + ' '.join(_circumstances(command)).encode()).hexdigest()[:16]}.o"

    def compile_one(source: Path) -> Path:
        name = object_name(source)
        if (kept / name).exists():
            (kept / name).touch()
            return kept / name
        _run([*command, *include, "-c", source, "-o", scratch / name])
        if object_name(source) != name:
            raise RuntimeError(f"{source.name} was edited while it was compiled")
        os.replace(scratch / name, kept / name)
        return kept / name

    jobs = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPoolExecutor(jobs) as several:
        try:
            objects = list(several.map(compile_one, sorted(folder.glob("*.cpp"))))
        finally:
            several.shutdown(cancel_futures=True)  # after one has failed, no other is begun
    for old in sorted(kept.glob("*.o"), key=lambda path: path.stat().st_mtime, reverse=True)[KEPT:]:
        old.unlink(missing_ok=True)
    return objects


def _run(command: list[str | Path]) -> None:
    """Run the command; RuntimeError with its first error's line if it fails."""
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200])
        raise RuntimeError(f"{command[0]} failed: {first}")
