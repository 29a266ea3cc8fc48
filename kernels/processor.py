"""The instructions that this process may use: those of its processor, up to the limit in WORKBENCH_ISA.

`WORKBENCH_ISA=avx2` runs everything as on a processor without AVX-512, `WORKBENCH_ISA=portable` as on one without any
vector instructions that the kernels know. The C++ kernels read the variable themselves (native/processor.inc). torch,
oneDNN and MKL have variables of their own, which `limit_libraries` sets.
"""

import os
import platform

VARIABLE = "WORKBENCH_ISA"
# The variables that keep torch's own loops (and the code of torch.compile), oneDNN and MKL below a limit.
LIBRARIES = {
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "portable": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
}  # fmt: skip
OTHERS = ("DNNL_MAX_CPU_ISA",)  # an older name of oneDNN's
ABOVE = {"avx2": ("AVX512",), "portable": ("AVX512", "AVX2")}  # torch's names of what a limit excludes


def limit() -> str:
    """The limit that is set: "avx2", "portable", or "" if there is none.

    Raises:
        ValueError: another value, or "avx2" on a processor that is not an x86.
    """
    isa = os.environ.get(VARIABLE, "")
    if isa and isa not in LIBRARIES:
        raise ValueError(f"`{VARIABLE}` (={isa}) must be 'avx2' or 'portable', or not be set")
    if isa == "avx2" and platform.machine().lower() not in ("x86_64", "amd64"):
        raise ValueError(f"`{VARIABLE}` (={isa}): this processor ({platform.machine()}) is no x86; use 'portable'")
    return isa


def limits() -> dict[str, str]:
    """The variables that limit the instructions of this process: the switch, and what the user has set beside it.

    The values that `limit_libraries` sets do not count, so that the answer is the same before and after it.
    """
    isa = limit()
    names = (*next(iter(LIBRARIES.values())), *OTHERS)
    beside = {
        name: os.environ[name]
        for name in names
        if os.environ.get(name, "") not in ("", LIBRARIES.get(isa, {}).get(name))
    }
    return {**({VARIABLE: isa} if isa else {}), **beside}


def limit_libraries() -> None:
    """Keep torch, oneDNN and MKL to the limit; what the user has set for one of them stays.

    They read their variables when they compute for the first time. This function is therefore called when the kernels
    are imported.

    Raises:
        ValueError: torch has already chosen instructions above the limit.
    """
    if not (isa := limit()):
        return
    for name, value in LIBRARIES[isa].items():
        os.environ.setdefault(name, value)
    from torch.backends.cpu import get_cpu_capability

    if (chosen := get_cpu_capability()) in ABOVE[isa]:
        raise ValueError(
            f"`{VARIABLE}` (={isa}): torch already computes with {chosen}; set the variable before Python starts, and "
            f"no `ATEN_CPU_CAPABILITY` (={os.environ['ATEN_CPU_CAPABILITY']}) above it"
        )
