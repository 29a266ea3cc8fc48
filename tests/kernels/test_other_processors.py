"""The C++ kernels are read by compilers as on other processors, because the build on this machine sees one path only.

The compilers check types and templates and write no code (`-fsyntax-only`). Most of their time goes into the headers
of torch, which each of them reads once, into a precompiled header: half a minute of a core for each compiler. The
macros of what is lacking are undefined after these headers, so that only the kernels see it. How the kernels are
dispatched at run time on an older processor is in test_processor.py.
"""

import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
from torch.utils.cpp_extension import include_paths

from kernels import native
from kernels.compiler import FLAGS, included

SOURCES = sorted(native.HERE.glob("*.cpp"))
HEADERS = "#include <ATen/ATen.h>\n#include <ATen/Parallel.h>\n#include <torch/library.h>\n"
# What the kernels look at: `amx.inc` asks for Linux, and everything of x86 for the processor.
LACKING = {"AMX": "#undef __linux__\n", "x86": "#undef __x86_64__\n"}


def first_errors(compiler: str, sources: list[Path], before: str, folder: Path) -> list[str]:
    """The first errors of every source that the compiler refuses; `before` is text that it reads before the source."""
    (folder / "before.h").write_text(before)
    asked = [compiler, *FLAGS, "-fsyntax-only", "-Winvalid-pch", "-include", folder / "torch.h"]
    asked += ["-include", folder / "before.h", *includes()]
    errors = []
    for source in sources:
        done = subprocess.run([*asked, source], capture_output=True, text=True)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line]
            errors.append("\n".join(lines[:3]) or done.stderr[-500:])
    return errors


@cache
def includes() -> list[str]:
    return [f"-I{path}" for path in include_paths("cpu")]


@pytest.fixture
def with_headers(tmp_path):
    """Makes the precompiled header of a compiler. It takes half a gigabyte and is deleted when the test ends."""

    def precompile(compiler: str) -> Path:
        (tmp_path / "torch.h").write_text(HEADERS)
        asked = [compiler, *FLAGS, "-x", "c++-header", *includes(), tmp_path / "torch.h"]
        subprocess.run([*asked, "-o", tmp_path / "torch.h.gch"], check=True)
        return tmp_path

    yield precompile
    shutil.rmtree(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("lacking", LACKING)
def test_kernels_compile_without_the_instructions_of_this_processor(with_headers, lacking):
    """Without AMX, as GCC before 11; without all of x86, as clang, and as on processors without loops of their own."""
    compiler = shutil.which("g++")
    said = subprocess.run([compiler, "-v"], capture_output=True, text=True).stderr if compiler else ""
    if "gcc version" not in said or "x86_64" not in said:
        pytest.skip("needs g++ of GCC on x86-64: elsewhere the kernels are built without AMX and AVX-512 anyway")
    folder = with_headers(compiler)
    with_tiles = [source for source in SOURCES if native.HERE / "amx.inc" in included(source)]
    assert 0 < len(with_tiles) < len(SOURCES)
    sources = with_tiles if lacking == "AMX" else SOURCES
    assert first_errors(compiler, sources, LACKING[lacking], folder) == []


@pytest.mark.slow
def test_kernels_compile_for_aarch64(with_headers):
    """`make test` installs no such compiler; `make aarch64` does, and runs the kernels, too."""
    compiler = shutil.which("aarch64-linux-gnu-g++")
    if not compiler:
        pytest.skip("needs aarch64-linux-gnu-g++: apt-get install g++-aarch64-linux-gnu")
    assert first_errors(compiler, SOURCES, "", with_headers(compiler)) == []


def test_a_file_that_needs_what_a_processor_lacks_is_seen(tmp_path):
    """The check itself can fail: such a file, without torch, and one that guards what it needs."""
    compiler = shutil.which("g++")
    if not compiler:
        pytest.skip("needs g++")
    (tmp_path / "torch.h").write_text("")
    for name, text in {
        "unguarded.cpp": "#ifdef __linux__\nvoid tiles();\n#endif\nvoid product() { tiles(); }\n",
        "guarded.cpp": "#ifdef __linux__\nvoid tiles();\nvoid product() { tiles(); }\n#endif\n",
    }.items():
        (tmp_path / name).write_text(text)
    sources = [tmp_path / name for name in ("unguarded.cpp", "guarded.cpp")]
    errors = first_errors(compiler, sources, LACKING["AMX"], tmp_path)
    assert len(errors) == 1 and "unguarded.cpp:4" in errors[0] and "tiles" in errors[0]
