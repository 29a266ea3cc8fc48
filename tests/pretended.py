"""A GPU that is not there, for tests on machines without one.

After `install()`, tensors can be put on "cuda". They compute on the CPU, but say that they lie on cuda:0, and an
operation that mixes them with tensors of the CPU raises, as it does on a GPU. Ops of ours that would launch Triton run
their reference. `watched()` lists where the host waits for the device. None of this can be taken back: it is for a
process of its own. `python -m tests.pretended` checks the methods that it is given and prints a line of JSON for each.
"""

import hashlib
import os
import subprocess
import tempfile
import time
import traceback
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # before anything in torch.cuda is replaced: it keeps a table of functions
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.cpp_extension import include_paths, library_paths

from kernels.compiler import compiler
from kernels.support.user_cache import cache_folder

ROOT = Path(__file__).resolve().parents[1]
OURS = tuple(str(ROOT / package) for package in ("compress", "eval", "kernels"))
GPU = torch.device("cuda", 0)
# Ops that take tensors of two devices on a real machine: copies, comparisons of sizes, and selections by indices on the CPU.
COPIES = {"aten::copy_", "aten::_to_copy"}
SIZES = {"aten::is_same_size"}
SELECTIONS = {
    "aten::index", "aten::_unsafe_index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_",
    "aten::_unsafe_index_put",
}  # fmt: skip
# Ops whose results, or the sizes of whose results, the host must read.
WAITS = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select", "aten::_unique2",
    "aten::unique_dim", "aten::unique_consecutive", "aten::bincount", "aten::is_nonzero",
}  # fmt: skip
PROPERTIES = {
    "name": "a pretended GPU", "major": 9, "minor": 0, "multi_processor_count": 132, "total_memory": 80 << 30,
    "shared_memory_per_block_optin": 232448, "L2_cache_size": 50 << 20, "uuid": "none",
}  # fmt: skip
DEVICE = """
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
using namespace c10;
static const Device gpu(DeviceType::CUDA, 0);
struct Guard : impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device exchangeDevice(Device) const override { return gpu; }
  Device getDevice() const override { return gpu; }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, gpu); }
  Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, gpu); }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};
static Guard guard;
static impl::DeviceGuardImplRegistrar registered(DeviceType::CUDA, &guard);
namespace at {
struct CUDAHooks : CUDAHooksInterface {
  CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return false; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  int getNumGPUs() const override { return 1; }
};
using at::CUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)
}
"""

_waits: list[str] | None = None
_launched = 0  # operations of the GPU so far


class OnGPU(torch.Tensor):
    """A tensor that says it lies on cuda:0.

    Attributes:
        on_cpu: the tensor on the CPU with the same memory.
    """

    on_cpu: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, on_cpu: torch.Tensor) -> "OnGPU":
        made = torch.Tensor._make_subclass(cls, on_cpu, False, dispatch_device=True, device_for_backend_keys=GPU)
        made.on_cpu = on_cpu
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict) -> "OnGPU":
        if id(self) not in memo:
            new = OnGPU(self.on_cpu.detach().clone()).requires_grad_(self.requires_grad)
            if getattr(self, "_is_param", False):
                new._is_param = True
            memo[id(self)] = new
        return memo[id(self)]

    def __repr__(self, **_: Any) -> str:
        return f"OnGPU({tuple(self.shape)}, {self.dtype})"

    def tolist(self) -> Any:
        _wait("tolist")
        return self.on_cpu.tolist()

    def numpy(self, *_: Any, **__: Any) -> None:
        raise TypeError("can't convert a tensor of a (pretended) cuda:0 to numpy: copy it to the CPU first")

    __array__ = numpy

    @property
    def data(self) -> "OnGPU":
        return self.detach()

    @data.setter
    def data(self, new: "OnGPU") -> None:
        with torch._C._DisableTorchDispatch():
            torch.Tensor.data.__set__(self, new)
        self.on_cpu = new.on_cpu


class _Dispatched(TorchDispatchMode):
    """Sees operations that make tensors, too."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


class _Called(TorchFunctionMode):
    """Gives "cuda" its number, as the driver does."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0].to(GPU)
        if func is torch.Tensor.pin_memory:
            return args[0]
        _check_generator(args, kwargs)
        if func is torch.Tensor.to or "device" in kwargs:
            args, kwargs = tuple(map(_numbered, args)), {name: _numbered(x) for name, x in kwargs.items()}
        if func in (torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__) and isinstance(args[0], OnGPU):
            return getattr(args[0], func.__name__)()
        return func(*args, **kwargs)


def _numbered(value: Any) -> Any:
    named = value == "cuda" if isinstance(value, str) else isinstance(value, torch.device) and value.index is None
    return GPU if named and torch.device(value).type == "cuda" else value


class _Event:
    """A mark in the work of the GPU. The host waits for it if nothing else was launched since."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._launched, self._at = 0, 0.0

    def record(self, stream: Any = None) -> None:
        self._launched, self._at = _launched, time.perf_counter()

    def synchronize(self) -> None:
        if self._launched == _launched:
            _wait("Event.synchronize")

    def elapsed_time(self, later: "_Event") -> float:
        return (later._at - self._at) * 1000


class _Generator(torch.Generator):
    """A generator of random numbers, whose numbers are those of the CPU wherever it lies."""

    def __new__(cls, device: torch.device | str = "cpu") -> "_Generator":
        made = super().__new__(cls, "cpu")
        made.on_gpu = torch.device(device).type == "cuda"
        return made


def _run(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """An operation on the tensors behind those of the GPU, if a GPU would do it."""
    global _launched
    name = func._schema.name
    if name == "prim::device":
        return GPU
    tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
    there, here = [t for t in tensors if isinstance(t, OnGPU)], [t for t in tensors if not isinstance(t, OnGPU)]
    device = kwargs.get("device")
    on_gpu = bool(there) if device is None else torch.device(device).type == "cuda"
    if name == "aten::copy_":
        on_gpu = isinstance(args[0], OnGPU)
    if not there and not on_gpu:
        return func(*args, **kwargs)
    _check(func, name, args, there, here)
    _launched += 1
    late = name == "aten::_to_copy" and kwargs.get("non_blocking") and there  # into memory that is pinned for it
    if name in WAITS or (name in COPIES and there and (here or not on_gpu) and not late) or _counts(name, args):
        _wait(name)
    elif name in COPIES and not there or (name in SELECTIONS and any(t.dim() for t in here)):
        _wait(f"{name} from the CPU")
    behind = {id(t.on_cpu): t for t in there}
    args, kwargs = tree_map(lambda t: t.on_cpu if isinstance(t, OnGPU) else t, (args, kwargs))
    if device is not None and on_gpu:
        kwargs = kwargs | {"device": torch.device("cpu")}
    if kwargs.get("pin_memory"):
        kwargs = kwargs | {"pin_memory": False}
    if name.startswith("workbench::"):
        args = tuple("reference" if x == "triton" else x for x in args)
    copied = name == "aten::_to_copy" and on_gpu != bool(there)  # else a copy to the same device would be the same
    with torch._C._DisableTorchDispatch():
        result = func(*args, **kwargs)
    for t in there:  # `out` may have been resized
        if t.shape != t.on_cpu.shape:
            t.data = OnGPU(t.on_cpu)
    given = {id(t) for t in here}

    def wrapped(t: Any) -> Any:
        if not isinstance(t, torch.Tensor) or id(t) in given:
            return t
        if id(t) in behind and not copied:
            return behind[id(t)]
        return OnGPU(t) if on_gpu else t

    return tree_map(wrapped, result)


def _check(func: Any, name: str, args: tuple, there: list[OnGPU], here: list[torch.Tensor]) -> None:
    """Raise RuntimeError where a GPU would, for these tensors there and on the CPU."""
    ours = bool(there) and name.startswith("workbench::")
    if ours and not torch._C._dispatch_has_computed_kernel_for_dispatch_key(func.name(), "CUDA"):
        raise NotImplementedError(f"{name} has no kernel for CUDA")
    if not there or name in COPIES | SIZES or name.startswith("prim::"):
        return
    mixed = [t for t in here if t.dim()]
    if name in SELECTIONS:  # indices may lie on the CPU, and nothing else
        mixed = [t for t in (args[0], *args[2:3]) if isinstance(t, torch.Tensor) and t.dim()]
        mixed = [t for t in mixed if not isinstance(t, OnGPU)]
    if mixed:
        shapes = [tuple(t.shape) for t in there], [tuple(t.shape) for t in mixed]
        raise RuntimeError(f"{name} got tensors of two devices: on cuda:0 {shapes[0]}, on the CPU {shapes[1]}")


def _check_generator(args: tuple, kwargs: dict[str, Any]) -> None:
    """Raise RuntimeError if numbers would be drawn on another device than that of the generator."""
    generator = kwargs.get("generator")
    if generator is None:
        return
    device = kwargs.get("device") or next((x.device for x in args if isinstance(x, torch.Tensor)), "cpu")
    if (torch.device(device).type == "cuda") != getattr(generator, "on_gpu", False):
        raise RuntimeError(f"a generator of another device cannot give numbers on {device}")


def _counts(name: str, args: tuple) -> bool:
    """Whether the host must know how many elements of a mask are true, or a sum of repeats."""
    if name in SELECTIONS and any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1]):
        return True
    return name == "aten::repeat_interleave"


def _wait(what: str) -> None:
    if _waits is not None:
        _waits.append(f"{what} in {_place()}")


def _place() -> str:
    frames = [f for f in traceback.extract_stack() if f.filename != __file__ and "/torch/" not in f.filename]
    ours = [f for f in frames if f.filename.startswith(OURS)]
    frame = ours[-1] if ours else frames[-1]
    return f"{Path(frame.filename).name}:{frame.lineno} ({frame.name})"


@contextmanager
def watched() -> Iterator[list[str]]:
    """The places where the host waits for the device, or copies to it, while the context lasts."""
    global _waits
    _waits = []
    try:
        yield _waits
    finally:
        _waits = None


def library() -> Path:
    """A library that tells torch's C++ of the device, if it is loaded before torch (LD_PRELOAD); built once."""
    where = [str(Path(path).resolve()) for path in library_paths("cpu")]  # another environment may hold the same torch
    content = hashlib.sha256("\n".join([DEVICE, *where]).encode()).hexdigest()[:8]
    library = cache_folder("pretended") / f"{torch.__version__}-{content}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            source, built = Path(folder, "guard.cpp"), Path(folder, library.name)
            source.write_text(DEVICE)
            flags = ["-std=c++20", "-shared", "-fPIC", *(f"-I{path}" for path in include_paths("cpu"))]
            link = [f"{flag}{path}" for path in where for flag in ("-L", "-Wl,-rpath,")]
            link += ["-lc10", "-ltorch_cpu"]
            subprocess.run([*compiler(), *flags, source, "-o", built, *link], check=True)
            os.replace(built, library)
    return library


def install() -> None:
    """Give this process the GPU."""
    nothing = lambda *_, **__: None  # noqa: E731
    for name, value in {
        "is_available": True, "is_initialized": True, "device_count": 1, "current_device": 0,
        "memory_allocated": 1 << 20, "max_memory_allocated": 2 << 20, "memory_reserved": 2 << 20,
        "mem_get_info": (70 << 30, 80 << 30), "get_device_name": PROPERTIES["name"], "get_device_capability": (9, 0),
        "get_device_properties": types.SimpleNamespace(**PROPERTIES), "is_bf16_supported": True,
        "is_current_stream_capturing": False,
    }.items():  # fmt: skip
        setattr(torch.cuda, name, lambda *_, value=value, **__: value)
    for name in (
        "_lazy_init",
        "current_stream",
        "set_device",
        "empty_cache",
        "reset_peak_memory_stats",
        "manual_seed_all",
    ):
        setattr(torch.cuda, name, nothing)
    torch.cuda.Event, torch.cuda.default_generators = _Event, (torch.default_generator,)
    torch.cuda.synchronize = lambda *_: _wait("synchronize")
    torch.Generator = _Generator
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # a parameter becomes another object
    torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor` makes its tensor here and then copies it
    _Dispatched().__enter__()
    _Called().__enter__()
