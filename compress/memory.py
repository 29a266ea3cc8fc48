"""The memory and disk space of a compression: predicted before any work, refused if it is too much, and measured.

The prediction counts one block, the activations between blocks, the statistics of one linear, and the memory that the
method needs while it solves that linear. The rest of the process is assumed to keep the size that it has when the
compression begins.
"""

import dataclasses
import shutil
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import Tensor, nn

from compress.checkpoint.fits import linears_to_be
from compress.formats import Dense, bits_of
from compress.linear import is_linear, sharing_copy
from compress.method import Method
from compress.recover.learned import product_dtype
from compress.recover.teacher import positions
from compress.walk.blocks import find_blocks, targets
from compress.walk.capture import micro_batches
from compress.walk.folds.folding import FoldingMethod
from compress.walk.layerwise import LayerwiseMethod
from compress.walk.offload import is_offloaded, offloaded_parts
from compress.walk.original.lockstep import HELD_BYTES
from compress.walk.statistics import PAIRED
from eval.record.compression import Usage
from kernels.support.units import memory_limit

SLACK = 1.03  # memory of allocators and libraries, relative to the counted memory


def predicted(
    recipe: Sequence[Method], model: nn.Module, batches: Sequence[Tensor], max_memory: int | str | None = None
) -> Usage:
    """The predicted usage of a compression. Activations go to disk if they would not fit into `max_memory`.

    Args:
        recipe: the methods, settled.

    Raises:
        ValueError: it needs more than `max_memory`, or more than is free on the disk, and the message says what would
            fit; or `max_memory` is more than the memory of this machine.
    """
    limit = memory_limit(max_memory)
    case = _Case.of(recipe, model, batches)
    cases = {"memory": case, "disk": dataclasses.replace(case, activations="disk")}
    where = next((name for name, one in cases.items() if limit is None or one.peak() <= limit), None)
    if where is None:
        raise ValueError(_refusal(case, limit))
    usage = Usage(cases[where].peak(), case.disk(), "disk" if case.on_disk else "memory", where, limit)
    for part in list(offloaded_parts(model).values())[:1]:
        free = shutil.disk_usage(part.folder.path).free
        if usage.predicted_disk > free:
            raise ValueError(
                f"`offload_path` (={str(part.folder.path.parent)!r}): this compression writes up to "
                f"{_gb(usage.predicted_disk)} there, and {_gb(free)} are free; another disk works"
            )
    return usage


@contextmanager
def measured(usage: Usage, model: nn.Module) -> Iterator[None]:
    """While the context lasts, measure the peaks of memory and of the work folder."""
    folders = {id(part.folder): part.folder for part in offloaded_parts(model).values()}
    for folder in folders.values():
        folder.peak = folder.bytes
    start = sum(folder.bytes for folder in folders.values())
    told = _reset_peak()
    try:
        yield
    finally:
        usage.peak = _peak() if told else None
        usage.disk = sum(folder.peak for folder in folders.values()) - start


@dataclass(frozen=True)
class _Case:
    """The data on which the prediction depends.

    now: bytes of the process's memory. resident: the part of them that the model's blocks take. mapped: the part of
    these that is a file in memory, whose pages stay for the whole run even if weights are replaced. itemsize: of the
    model's dtype. batches: the number of tokens of each batch.
    """

    recipe: tuple[Method, ...]
    model: nn.Module
    on_disk: bool
    now: int
    resident: int
    mapped: int
    itemsize: int
    batches: tuple[int, ...]
    activations: str = "memory"

    @classmethod
    def of(cls, recipe: Sequence[Method], model: nn.Module, batches: Sequence[Tensor]) -> "_Case":
        on_disk = is_offloaded(model)
        resident = 0 if on_disk else sum(_block_bytes(block) for block in find_blocks(model)[1])
        now = psutil.Process().memory_info().rss
        lengths = tuple(batch.shape[1] for batch in batches)
        mapped = 0 if on_disk else _mapped_bytes(model)
        return cls(tuple(recipe), model, on_disk, now, resident, mapped, model.dtype.itemsize, lengths)

    def peak(self) -> int:
        """Bytes of the process's memory at the peak."""
        return int(SLACK * (self.now - (self.resident if self.on_disk else 0) + max(self._steps(), default=0)))

    def disk(self) -> int:
        """Largest size of the work folder: blocks that a method wrote are replaced one by one by the next method's."""
        if not self.on_disk:
            return 0
        _, blocks = find_blocks(self.model)
        dense, blocks = sum(map(_block_bytes, blocks)), len(blocks)
        count = sum(method.stage != "cache" for method in self.recipe)
        written, most, kept = 0, 0, 0
        for i, method in enumerate(self.recipe[:count]):
            before, written = written, int(dense * self._share_stored(i + 1))
            if i + 1 < count:  # the former version stays, as the reference for later methods' errors
                most = max(most, kept + before + written)
                kept = before if isinstance(method, LayerwiseMethod) and not kept else kept
            else:
                most = max(most, kept + max(written // blocks + before, written + before // blocks))
        if self.activations == "disk":
            most += 2 * sum(self.batches) * self._hidden * self.itemsize
        return most

    @property
    def _hidden(self) -> int:
        return self.model.get_input_embeddings().embedding_dim

    def _steps(self) -> Iterator[int]:
        """Bytes that each step of the recipe adds at its peak."""
        _, blocks = find_blocks(self.model)
        block = max(map(_block_bytes, blocks)) * self.itemsize // self.model.dtype.itemsize if self.on_disk else 0
        yield self._probe() + block
        before = alive = self.resident - self.mapped  # bytes of the blocks' weights that are freed with them
        originals: int | None = None  # bytes of the reference weights for later methods' errors
        left, new = self, 0  # the model as drops leave it, and the bytes of weights that they have made for it
        for i, method in enumerate(self.recipe):
            case = left  # as the method finds it
            if method.stage == "drop":  # what is dropped is in memory until the last drop has ended
                left, made = case._after(method)
                new, alive = new + made, left.resident - left.mapped
                copies = new
            else:
                makes = isinstance(method, FoldingMethod | LayerwiseMethod) or method.stage == "transform"
                replaces = makes and not self.on_disk
                made = int(case.resident * case._share_stored(i + 1)) if replaces else alive
                if originals is None and isinstance(method, LayerwiseMethod) and method is not self.recipe[-1]:
                    originals, alive = alive, 0
                copies = (originals or 0) + max(made, alive) - before
                alive = made
            shapes = _largest_block(case.model, getattr(method, "skip", ""))
            flowing = self._flowing()
            if isinstance(method, FoldingMethod):
                yield block + copies + flowing + case._folding(method, shapes)
            if isinstance(method, LayerwiseMethod):
                yield block + copies + flowing + case._solving(method, shapes, case._share_stored(i + 1))
            elif trained := method.trains(max(self.batches, default=0)):
                yield block + copies + 2 * flowing + case._training(method, i, shapes, *trained)
            elif not isinstance(method, FoldingMethod) and method.stage != "cache":
                yield block + copies + flowing + case._pass(shapes)

    def _after(self, drop: Method) -> "tuple[_Case, int]":
        """This case after a method has dropped parts, and the bytes of the weights that it makes anew."""
        if self.on_disk:
            return self, 0
        smaller = sharing_copy(self.model, weights=False)
        drop.outline(smaller)
        size, rest = (sum(map(_block_bytes, find_blocks(model)[1])) for model in (self.model, smaller))
        shapes = {name: parameter.shape for name, parameter in self.model.named_parameters()}
        new = sum(p.nbytes for name, p in smaller.named_parameters() if p.shape != shapes.get(name))
        resident, made = (int(self.resident * part / size) for part in (rest, new))
        mapped = int(self.mapped * (rest - new) / size)
        return dataclasses.replace(self, model=smaller, resident=resident, mapped=mapped), made

    def _flowing(self) -> int:
        """Bytes of the inputs of a block, over all micro-batches."""
        tokens = sum(self.batches) if self.activations == "memory" else self._micro
        return tokens * self._hidden * self.itemsize

    @property
    def _micro(self) -> int:
        """Tokens of the largest micro-batch."""
        made_up = [torch.empty(1, length, dtype=torch.uint8) for length in self.batches]
        return max((batch.numel() for batch in micro_batches(made_up)), default=0)

    def _probe(self) -> int:
        """Bytes of the model's own pass over the first batch, with its logits and, from disk, its head's weight."""
        head = self.model.get_output_embeddings()
        weight = head.weight.numel() * self.itemsize if head is not None and self.on_disk else 0
        first = self.batches[0] if self.batches else 0
        vocabulary = self.model.get_input_embeddings().num_embeddings
        return weight + int(3.5 * first * vocabulary * self.itemsize)

    def _pass(self, shapes: Sequence[tuple[int, int]]) -> int:
        """Bytes for the pass of one micro-batch through a block."""
        widest = max(max(shape) for shape in shapes)
        return self._micro * self.itemsize * (4 * self._hidden + 3 * widest)

    def _solving(self, method: LayerwiseMethod, shapes: Sequence[tuple[int, int]], share: float) -> int:
        per_weight, per_gram = method.working_set
        needs = {*method.statistics, *(() if "rows" in method.statistics else ("gram",))} if self.batches else set()
        weights = sum(out * columns for out, columns in shapes)
        wide = max(columns for _, columns in shapes)
        held = 0
        if self.batches:
            held += weights * self.itemsize  # the solved linears, dequantised for later passes
            if method.sequential:
                streams = 2 if {*method.statistics} & {*PAIRED} else 1
                held += streams * sum(self.batches) * 2 * self._hidden * self.itemsize  # for every waiting micro-batch
                held += (streams - 1) * self._flowing()
                held += min(HELD_BYTES, sum(self.batches) * wide * self.itemsize)
        held += int(weights * self.itemsize * share)
        most = 0
        for out, columns in set(shapes):
            gram = 4 * columns**2 if "gram" in needs else 0
            solving = int(4 * out * columns * per_weight + (gram * per_gram))
            most = max(most, gram + max(solving, self._pass(shapes) if self.batches else 0))
        if "gram" in needs and not method.sequential:  # the statistics of all linears are collected in one pass
            most += sum(4 * columns**2 for columns in _inputs(self.model, method.skip)) - 4 * wide**2
        return held + most

    def _training(self, method: Method, i: int, shapes: Sequence[tuple[int, int]], scope: str, tokens: int) -> int:
        """Bytes of all linears of a block, or of the model, with their trainable parts, and of the passes whose
        gradients are taken, for method i of the recipe.

        Args:
            scope: "block", "model", or "model by blocks", in which a block keeps its input alone.
        """
        weights = sum(out * columns for out, columns in shapes)
        wide = sum(max(shape) for shape in shapes)
        if scope.startswith("model"):  # every block keeps data for its gradient, and the loss the logits in float32
            products = product_dtype(self.model).itemsize
            blocks, inside = len(find_blocks(self.model)[1]), 4 * 12 * self._hidden + products * wide
            saved = blocks * inside if scope == "model" else blocks * 4 * self._hidden + inside
            stored, _ = linears_to_be(self.recipe[:i], self.model)
            held = sum(
                4 * method.held_copies(name in stored, self.itemsize, products) * out * columns
                for name, (out, columns) in targets(self.model).items()
            )
            vocabulary = self.model.get_input_embeddings().num_embeddings
            logits = (8 + 2 * products) * min(tokens, positions(vocabulary)) * vocabulary  # and their gradients
            of_head = products if products < self.itemsize else 0
            of_head += self.itemsize if any(name in stored for name in targets(self.model, where="embedding")) else 0
            return int(tokens * saved + logits + held + of_head * vocabulary * self._hidden)
        return int(4 * weights * method.working_set[0]) + 3 * 4 * tokens * (8 * self._hidden + wide)

    def _folding(self, method: FoldingMethod, shapes: Sequence[tuple[int, int]]) -> int:
        weights = sum(out * columns for out, columns in shapes)
        trial = 2 * 4 * weights  # a copy of the block in float32, and passes over it
        per_weight, per_gram = method.working_set
        wide = max(shape[1] for shape in shapes)
        largest = max(2 * out * columns for out, columns in shapes)  # gate and up are scaled together
        statistics = sum(4 * n**2 for n in _inputs(self.model, "")) if "gram" in method.statistics else 0
        choosing = weights * self.itemsize + statistics + 4 * largest * per_weight + 4 * wide**2 * per_gram
        return int(max(trial, choosing + self._pass(shapes)))

    def _share_stored(self, count: int) -> float:
        """Bytes of the linears after the first `count` methods of the recipe, as a share of their dense bytes."""
        specs, _ = linears_to_be(self.recipe[:count], self.model)
        zeros = max((method.zeros for method in self.recipe[:count]), default=0.0)
        stored = dense = 0.0
        for name, (out, columns) in targets(self.model).items():
            parts = specs[name]["parts"] if name in specs else [Dense.spec_of((out, columns))]
            stored += bits_of(parts, 8 * self.itemsize, zeros) * out * columns
            dense += 8 * self.itemsize * out * columns
        return stored / dense


def _refusal(case: _Case, limit: int) -> str:
    """The message that refuses a compression, with changes that would fit."""
    ways: dict[str, _Case] = {}
    disk = dataclasses.replace(case, activations="disk")
    if not case.on_disk:
        ways["weights='disk'"] = dataclasses.replace(case, on_disk=True)
        ways["weights='disk' with activations there, too"] = dataclasses.replace(disk, on_disk=True)
    apart = tuple(
        dataclasses.replace(m, sequential=False) if isinstance(m, LayerwiseMethod) else m for m in case.recipe
    )
    ways["sequential=False"] = dataclasses.replace(disk, recipe=apart)
    if case.itemsize > 2:
        half = dataclasses.replace(
            disk, itemsize=2, now=case.now - case.resident // 2, resident=case.resident // 2, mapped=case.mapped // 2
        )
        ways["dtype='bfloat16'"] = half
        ways["sequential=False with dtype='bfloat16'"] = dataclasses.replace(half, recipe=apart)
    by_blocks = tuple(
        dataclasses.replace(m, gradient_checkpointing=True) if hasattr(m, "gradient_checkpointing") else m
        for m in case.recipe
    )
    if by_blocks != case.recipe:
        ways["gradient_checkpointing=True of distil"] = dataclasses.replace(disk, recipe=by_blocks)
    count = len(case.batches)
    while count > 1:
        count //= 2
        if (fewer := dataclasses.replace(disk, batches=case.batches[:count])).peak() <= limit:
            ways[f"samples={count}"] = fewer
            break
    fitting = [f"{way} ({_gb(one.peak())})" for way, one in ways.items() if one.peak() <= limit]
    return (
        f"`max_memory` (={_gb(limit)}): this compression needs {_gb(disk.peak())}, of which the process has "
        f"{_gb(case.now)} already; " + (f"what would fit: {', '.join(fitting)}" if fitting else "nothing less fits")
    )


def _block_bytes(block: nn.Module) -> int:
    """Bytes of the weights of a loaded block."""
    if hasattr(block, "_offloaded"):
        return block._offloaded.nbytes
    return sum(t.nbytes for t in (*block.parameters(), *block.buffers()))


def _mapped_bytes(model: nn.Module) -> int:
    """Bytes of the blocks' weights in a file that is mapped into memory; 0 if this cannot be determined."""
    with suppress(OSError):  # /proc/self/maps exists on Linux; psutil also reads sizes, which takes a tenth of a second
        maps = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
        files = [parts[0].split("-") for parts in maps if len(parts) == 6 and parts[5].startswith("/")]
        starts, ends = zip(*sorted((int(start, 16), int(end, 16)) for start, end in files), strict=True)
        tensors = [t for block in find_blocks(model)[1] for t in (*block.parameters(), *block.buffers())]
        inside = [(t.nbytes, t.data_ptr(), bisect_right(starts, t.data_ptr()) - 1) for t in tensors]
        return sum(size for size, address, i in inside if i >= 0 and address < ends[i])
    return 0


def _largest_block(model: nn.Module, skip: str) -> list[tuple[int, int]]:
    """Shapes of the linears of the block with the most weights."""
    prefix, blocks = find_blocks(model)
    by_block: dict[str, list[tuple[int, int]]] = {}
    for name, shape in (targets(model, skip) or targets(model)).items():
        by_block.setdefault(name.removeprefix(f"{prefix}.").partition(".")[0], []).append(shape)
    return max(by_block.values(), key=lambda shapes: sum(out * columns for out, columns in shapes))


def _inputs(model: nn.Module, skip: str) -> list[int]:
    """Widths of the inputs that a block's linears read: one for all linears of a module with the same width, and one
    more if all linears of a module have the same width (attention's output)."""
    prefix, blocks = find_blocks(model)
    inside = {n: m for n, m in blocks[0].named_modules() if is_linear(m)}
    shapes = targets(model, skip)
    widths: dict[str, set[int]] = {}
    for name in inside:
        if full := shapes.get(f"{prefix}.0.{name}"):
            widths.setdefault(name.rpartition(".")[0], set()).add(full[1])
    return [width for each in widths.values() for width in (each if len(each) > 1 else [*each] * 2)]


def _reset_peak() -> bool:
    """Make Linux count the peak of this process's memory from now on; False if that is not possible."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
        return True
    return False


def _peak() -> int | None:
    with suppress(OSError, IndexError, ValueError):
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
    return None


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
