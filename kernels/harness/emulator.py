"""Emulates a Gluon kernel on a CPU: its results, and whether its copies, products and barriers wait for each other.

Triton's interpreter does not support Gluon. Here the kernel's source runs as plain Python, with replacements for
Gluon's modules: a tensor is a torch tensor, a partition of `warp_specialize` a thread. Timing is the worst case: a
product reads its operands only when a wait for it occurs, a copy completes at once or (`late`) only when a thread waits
for it, and shared memory initially holds NaN, or codes of 15. A stage that is overwritten or read too early therefore
changes the result, and barriers that never complete raise an error. Layouts have no effect here: the compiler compares
them (`assert_trivial`), and the machine code shows the use of registers.
"""

import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch

PATIENCE = 10.0  # seconds that a thread waits for a barrier before the kernel counts as stuck


class Pointer:
    """Pointers to elements of a flat tensor, by index."""

    def __init__(self, data, at=0):
        self.data, self.at, self.dtype = data, at, SimpleNamespace(element_ty=data.dtype)

    def __add__(self, offset):
        return Pointer(self.data, self.at + offset)

    def __getitem__(self, index):
        return Pointer(self.data, self.at[index])


class Descriptor:
    """A TMA descriptor of a tensor [rows, columns]: reads boxes, with 0 outside the tensor."""

    def __init__(self, data, box):
        self.data, self.box, self.layout, self.dtype = data, box, None, data.dtype
        self.block_type = SimpleNamespace(nbytes=box[0] * box[1] * data.element_size())

    def read(self, row, column):
        found = torch.zeros(self.box, dtype=self.data.dtype)
        part = self.data[row : row + self.box[0], column : column + self.box[1]]
        found[: part.shape[0], : part.shape[1]] = part
        return found


class Shared:
    """A view of shared memory; the function `view` gives the tensor at the time of the read."""

    def __init__(self, view):
        self.view, self.dtype = view, view().dtype

    def index(self, i):
        return Shared(lambda: self.view()[int(i)])

    def permute(self, order):
        return Shared(lambda: self.view().permute(order))

    def load(self, layout):
        return self.view().clone()


class Constant:
    """gl.constexpr: in modules a value, in functions an annotation."""

    def __init__(self, value):
        self.value = value

    def __index__(self):
        return self.value

    def __mul__(self, other):
        return self.value * other

    def __rmul__(self, other):
        return other * self.value

    def __rfloordiv__(self, other):
        return other // self.value


class Barrier:
    """An mbarrier: a phase is complete when `pending` arrivals and `bytes` bytes have arrived."""

    def __init__(self, count):
        self.count = self.pending = count
        self.bytes, self.phase, self.copies = 0, 0, []

    def settle(self, machine):
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase ^ 1, self.count
            machine.blocked.clear()
            machine.changed.notify_all()


class Barriers:
    def __init__(self, number):
        self.items = [None] * number

    def index(self, i):
        return SimpleNamespace(owner=self, i=int(i))


class Products:
    """Accumulators, and the products that have not been waited for yet."""

    def __init__(self, acc, waiting=()):
        self.acc, self.waiting = acc, waiting


class Machine:
    """Runs one block of threads at a time. late: does a copy complete only when a thread waits for it?"""

    def __init__(self, late):
        self.late, self.changed, self.place = late, threading.Condition(), (0, 0, 0)
        self.alive, self.blocked = set(), set()  # threads; those waiting since a barrier last changed

    def launch(self, kernel, grid, *arguments, **constants):
        for z in range(grid[2]):
            for n in range(grid[1]):
                for m in range(grid[0]):
                    self.place = (m, n, z)
                    kernel(*arguments, **constants)

    def wait(self, bar, phase):
        bar = bar.owner.items[bar.i]
        with self.changed:
            while bar.phase == int(phase):
                if bar.copies:  # a late copy completes in the thread that waits
                    bar.copies.pop(0)()
                    bar.settle(self)
                    continue
                if threading.get_ident() not in self.blocked:
                    self.blocked.add(threading.get_ident())
                    self.changed.notify_all()
                if not self.changed.wait(PATIENCE):
                    raise RuntimeError("a barrier that never completes")

    def expect(self, bar, size):
        bar = bar.owner.items[bar.i]
        with self.changed:
            bar.bytes, bar.pending = bar.bytes + size, bar.pending - 1
            bar.settle(self)

    def arrive(self, bar, count=1, pred=True):
        bar = bar.owner.items[bar.i]
        with self.changed:
            if pred:
                bar.pending -= count
                assert bar.pending >= 0, "more arrivals than the barrier counts"
                bar.settle(self)
            others = self.alive - {threading.get_ident()}  # these continue as far as they can before this thread does
            self.changed.wait_for(lambda: others & self.alive <= self.blocked, PATIENCE)

    def copy(self, descriptor, coordinates, bar, target):
        bar = bar.owner.items[bar.i]

        def land():
            target.view().copy_(descriptor.read(*map(int, coordinates)))
            bar.bytes -= descriptor.block_type.nbytes

        with self.changed:
            if self.late:
                bar.copies.append(land)
                self.changed.notify_all()
            else:
                land()
                bar.settle(self)

    def specialize(self, partitions, warps, registers):
        raised = []

        def run(function, arguments):
            with self.changed:
                pass
            try:
                function(*(a.clone() if isinstance(a, torch.Tensor) else a for a in arguments))
            except Exception as error:  # raised again in the waiting thread
                raised.append(error)
            finally:
                with self.changed:
                    self.alive.discard(threading.get_ident())
                    self.changed.notify_all()

        threads = [threading.Thread(target=run, args=each) for each in partitions]
        with self.changed:  # no thread continues before all are counted
            for thread in threads:
                thread.start()
            self.alive = {thread.ident for thread in threads}
        for thread in threads:
            thread.join()
        if raised:
            raise raised[0]


def mma(a, b, acc, is_async=False):
    products = acc if isinstance(acc, Products) else Products(acc)
    waiting = (*products.waiting, lambda: a.float() @ b.view().float())
    assert is_async
    return Products(products.acc, waiting)


def mma_wait(outstanding, deps):
    (products,) = deps
    now = len(products.waiting) - outstanding
    acc = products.acc
    for product in products.waiting[: max(now, 0)]:
        acc = acc + product()
    rest = products.waiting[max(now, 0) :]
    return Products(acc, rest) if rest else acc


def asm(program, constraints, args, dtype, pure, pack):
    """PTX of 32-bit registers, two 16-bit elements of the result in each."""
    args = torch.broadcast_tensors(*(torch.as_tensor(a) for a in args))
    low, high = (
        [a.reshape(-1, 2)[:, i].view(torch.int16).long() if a.is_floating_point() else a.reshape(-1, 2)[:, i].long()
         for a in args] for i in (0, 1)
    )  # fmt: skip
    registers, number = {}, 1
    for a, first, second in zip(args, low, high, strict=True):
        if a.is_floating_point():
            registers[f"${number}"] = (first & 0xFFFF) | ((second & 0xFFFF) << 16)
            number += 1
        else:
            registers[f"${number}"], registers[f"${number + 1}"] = first & 0xFFFFFFFF, second & 0xFFFFFFFF
            number += 2
    assert number == constraints.count("r"), "as many registers as constraints"
    for line in program.value.replace("{", "").replace("}", "").split(";"):
        mnemonic, _, operands = line.strip().partition(" ")
        if mnemonic and not mnemonic.startswith(".reg"):
            target, *sources = (operand.strip() for operand in operands.split(","))
            values = [registers[s] if s in registers else torch.tensor(int(s, 0)) for s in sources]
            registers[target] = STEPS[mnemonic](*values)
    result = registers["$0"]
    return of_bits(torch.stack([result, result >> 16], -1), dtype).reshape(args[0].shape)


def permuted(a, b, selector):
    joined = (a & 0xFFFFFFFF) | (b << 32)
    return sum(((joined >> (8 * ((selector >> (4 * i)) & 7))) & 255) << (8 * i) for i in range(4))


def in_pairs(operation, dtype):
    def run(a, b):
        halves = []
        for shift in (0, 16):
            x, y = (of_bits(v >> shift, dtype).float() for v in (a, b))
            halves.append(operation(x, y).to(dtype).view(torch.int16).long() & 0xFFFF)
        return halves[0] | (halves[1] << 16)

    return run


def of_bits(v, dtype):
    """The low 16 bits as floats of 16 bits."""
    half = v & 0xFFFF
    return (half - ((half & 0x8000) << 1)).to(torch.int16).view(dtype)


STEPS = {
    "shr.u32": lambda a, n: (a & 0xFFFFFFFF) >> n,
    "prmt.b32": permuted,
    "lop3.b32": lambda a, b, c, table: {0xEA: (a & b) | c}[int(table)],
    **{
        f"{name}.rn.{kind}x2": in_pairs(operation, dtype)
        for name, operation in (("sub", torch.sub), ("mul", torch.mul))
        for kind, dtype in (("bf16", torch.bfloat16), ("f16", torch.float16))
    },
}


def load(pointer, mask=None, other=0.0):
    at = torch.as_tensor(pointer.at)
    mask = torch.as_tensor(True if mask is None else mask).expand(at.shape)
    found = torch.full(at.shape, other, dtype=pointer.data.dtype)
    found[mask] = pointer.data.reshape(-1)[at[mask].long()]
    return found


def store(pointer, value, mask):
    at, mask = torch.broadcast_tensors(pointer.at, mask)
    assert not pointer.data.reshape(-1)[at[mask]].isfinite().any(), "an element is written twice"
    pointer.data.view(-1)[at[mask]] = value[mask]


def gluon_on(machine):
    """The replacements for Gluon's modules."""
    poison = {torch.bfloat16: float("nan"), torch.float16: float("nan"), torch.int32: -1}

    def allocate(dtype, shape, layout):
        if dtype == torch.int64:
            return Barriers(shape[0])
        data = torch.full(shape, poison[dtype], dtype=dtype)
        return Shared(lambda: data)

    def nothing(*_, **__):
        return None

    gl = ModuleType("triton.experimental.gluon.language")
    gl.__dict__.update(
        constexpr=Constant, bfloat16=torch.bfloat16, float16=torch.float16, float32=torch.float32, int32=torch.int32,
        int64=torch.int64, program_id=lambda axis: torch.tensor(machine.place[axis], dtype=torch.int32),
        arange=lambda start, end, layout: torch.arange(start, end, dtype=torch.int32),
        expand_dims=lambda t, dim: t.unsqueeze(dim), convert_layout=lambda t, *_, **__: t,
        zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
        full=lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
        minimum=lambda a, b: torch.clamp(a, max=b), load=load, store=store, static_range=range,
        inline_asm_elementwise=asm, allocate_shared_memory=allocate, warp_specialize=machine.specialize,
        NVMMADistributedLayout=nothing, DotOperandLayout=nothing, SliceLayout=nothing, BlockedLayout=nothing,
        DistributedLinearLayout=nothing,
    )  # fmt: skip
    gluon = ModuleType("triton.experimental.gluon")
    gluon.jit, gluon.constexpr_function, gluon.language = lambda f: f, lambda f: f, gl
    hopper = ModuleType("triton.experimental.gluon.language.nvidia.hopper")

    def init(bar, count):
        bar.owner.items[bar.i] = Barrier(count)

    hopper.mbarrier = SimpleNamespace(
        MBarrierLayout=nothing, init=init, invalidate=nothing, wait=machine.wait, expect=machine.expect,
        arrive=machine.arrive,
    )  # fmt: skip
    hopper.tma = SimpleNamespace(async_copy_global_to_shared=machine.copy)
    hopper.fence_async_shared, hopper.warpgroup_mma, hopper.warpgroup_mma_wait = nothing, mma, mma_wait
    experimental = ModuleType("triton.experimental")
    experimental.gluon = gluon
    return {module.__name__: module for module in (experimental, gluon, gl, hopper)}


def emulated(path: Path, late: bool, change: tuple[str, str] = ("", "")):
    """The namespace of a Gluon file, and the machine on which it runs. change: (text, replacement) in its source."""
    source = path.read_text()
    assert change[0] in source
    machine = Machine(late)
    before = {name: sys.modules.get(name) for name in gluon_on(machine)}
    names: dict = {"__name__": "emulated"}
    sys.modules.update(gluon_on(machine))
    try:
        exec(compile(source.replace(*change) if change[0] else source, str(path), "exec"), names)
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
    return SimpleNamespace(**names), machine
