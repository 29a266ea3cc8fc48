"""Squared gradients of the next-token loss, block by block from the last one to the first.

A pass forward keeps the input of every block in files. The pass backward takes one block after the other, the last one
first: it runs the block again for one window at a time, and turns the gradient of the block's output into the
gradients of its weights and of its input. Memory holds one block, its sums, and one gradient for each token.
"""

import copy
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers.pytorch_utils import Conv1D

from compress.linear import compressed_linears, is_linear
from compress.walk.blocks import find_blocks
from compress.walk.capture import (
    Call,
    Stop,
    Tail,
    activations_on_disk,
    advance,
    block_calls,
    device_of,
    on_device,
    run_block,
)
from compress.walk.chain import Chain
from compress.walk.fisher.saved import SavedFisher
from compress.walk.identity import tokens_sha256, weights_sha256
from compress.walk.parallel.ranks import current, progress_bar
from compress.walk.resume import BlockStore
from compress.walk.shards import WorkFolder
from kernels.linear import fast_linear
from kernels.support import source


def fisher(
    model: nn.Module, batches: Sequence[Tensor], *, device: torch.device, folder: str | Path | None = None
) -> SavedFisher:
    """F of every linear in the blocks, of the token embedding and of the head: how much the loss reacts to each weight.

    F = (1/n) Σ_s g_s², where g_s is the gradient of Σ_t -log p(x_t+1 | x_≤t) over window s, and n is the number of
    predicted tokens. The gradients are squared window by window. The gradients of different tokens of a window are
    uncorrelated if the model's predictions are right, so that the mean is that of the tokens' own squared gradients
    (the diagonal of the empirical Fisher matrix), at the cost of one backward pass for each window instead of one for
    each token. The estimate is noisy if there are few windows: k windows give a relative standard deviation of about
    √(2/k) for one weight. More and shorter windows therefore give a better estimate for the same time.

    Then ½ Σ F (w - ŵ)² approximates the KL divergence of the predictions, in nats per token, for independent errors.

    Args:
        model: a decoder with weights in floating point, in memory or on disk; it is not changed.
        batches: calibration tokens, LongTensors [1, T] with T >= 2.
        device: where to compute, one block at a time.
        folder: where F is kept, keyed by the weights and the tokens. A pass that was killed goes on there, and a
            finished one is read. None: a temporary folder that lives as long as the result.

    Returns:
        {name: F [out, in], or [vocabulary, hidden] for the embedding, in float32}, read from disk at each look-up.
        A tied head has the F of the embedding, whose gradient is the sum of both uses.

    Raises:
        ValueError: there are no batches, or one is too short; or the model holds compressed weights.

    Source: arXiv:2306.07629, section 4.1 (squared gradients as the diagonal of the Hessian), which sums over windows
    and does not divide by the tokens.
    """
    if not batches or min(batch.shape[1] for batch in batches) < 2:
        raise ValueError("`batches` must hold windows of at least 2 tokens, whose next ones are predicted")
    if stored := list(compressed_linears(model)):
        raise ValueError(f"`model` holds {stored[0]} compressed already; gradients need the weights before compression")
    held = None if folder else WorkFolder()
    code = source.code_sha256(Path(__file__))
    about = [weights_sha256(model), tokens_sha256(list(batches)), device.type, code]
    key = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]
    store = BlockStore(Path(folder or held.path) / f"fisher-{key}")
    backward = _Backward(model, batches, device, store)
    if min(current().gathered(store.finished(backward.steps))) < backward.steps:
        backward.run()
    return SavedFisher(store, backward.steps, backward.same, held)


class _Backward:
    """The pass backward. Step i < number of blocks takes block (number - 1 - i); the last step takes the weights
    outside the blocks."""

    def __init__(self, model: nn.Module, batches: Sequence[Tensor], device: torch.device, store: BlockStore) -> None:
        self.model, self.batches, self.device, self.store = model, batches, device, store
        self.prefix, self.blocks = find_blocks(model)
        self.steps = len(self.blocks) + 1
        self.predicted = sum(batch.shape[1] - 1 for batch in batches)
        names = {module: name for name, module in model.named_modules()}
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        self.outside = {names[embedding]: [embedding]}  # the modules that use one weight, by the first one's name
        self.same: dict[str, str] = {}
        if head is not None and head.weight is embedding.weight:
            self.outside[names[embedding]].append(head)
            self.same = {names[head]: names[embedding]}
        elif head is not None:
            self.outside[names[head]] = [head]

    def run(self) -> None:
        """Do the steps that are not finished."""
        last = len(self.blocks) - 1
        inputs: dict[int, list[Call]] = {}  # inputs of the unfinished blocks
        with torch.no_grad(), fast_linear(), activations_on_disk(WorkFolder(self.store.folder)):
            calls = block_calls(self.model, self.blocks, self.batches, stacked=False)
            if calls[0].passed:
                raise ValueError(
                    f"`model` ({type(self.model).__name__}): its blocks pass on more than one tensor, and gradients of "
                    "the loss are followed through one: methods that use no Fisher information work"
                )
            tail = Tail(self.model, self.blocks, self.batches, stacked=False)
            gradients = [copy.copy(call) for call in calls]  # of the current block's output
            chain = Chain(self.store, gradients)
            finished = chain.resume(self.steps)
            for index in progress_bar(range(last + 1), desc="Fisher, forward", unit="block"):
                if index <= last - finished:
                    inputs[index] = [copy.copy(call) for call in calls]
                with on_device(self.blocks[index], self.device):
                    advance(self.blocks[index], calls, index, self.device)
        with torch.enable_grad(), _only(self.model):
            for i, call in enumerate(calls if not finished else ()):
                gradients[i].hidden = self._of_loss(tail, i, call.hidden)
            for step in progress_bar(range(finished, self.steps), desc="Fisher, backward", unit="block"):
                index = last - step
                if index >= 0:
                    sums = self._of_block(index, inputs.pop(index), gradients)
                else:
                    sums = self._of_outside(tail, calls, gradients)
                with chain.keeping(step, last=index < 0):
                    self.store.put(step, sums, {"names": list(sums)})

    def _of_loss(self, tail: Tail, i: int, hidden: Tensor) -> Tensor:
        """Gradient [1, T, hidden] of window i's loss with respect to the last block's output."""
        hidden = hidden.detach().requires_grad_()
        return torch.autograd.grad(self._loss(tail, i, hidden), hidden)[0]

    def _loss(self, tail: Tail, i: int, hidden: Tensor) -> Tensor:
        logits = tail.logits(i, hidden)[0, :-1].float()
        return cross_entropy(logits, self.batches[i][0, 1:].to(logits.device), reduction="sum")

    def _of_block(self, index: int, inputs: Sequence[Call], gradients: Sequence[Call]) -> dict[str, Tensor]:
        """F of a block's linears; afterwards `gradients` are those of its input."""
        block = self.blocks[index]
        with on_device(block, self.device):
            linears = {f"{self.prefix}.{index}.{name}": [m] for name, m in block.named_modules() if is_linear(m)}
            sums = _Sums(linears, self.predicted)
            with _only(block, *sums.weights):
                for call, gradient in zip(inputs, gradients, strict=True):
                    hidden = call.hidden.detach().requires_grad_()
                    output = run_block(block, Call(hidden, call.arguments), index, self.device)
                    own = gradient.hidden.to(self.device)
                    passed, *grads = torch.autograd.grad(output, [hidden, *sums.weights], own, allow_unused=True)
                    gradient.hidden = passed
                    sums.add(grads)
        return sums.result()

    def _of_outside(self, tail: Tail, outputs: Sequence[Call], gradients: Sequence[Call]) -> dict[str, Tensor]:
        """F of the embedding and of the head, from the last block's outputs and the gradients of the first one's
        input."""
        home = device_of(self.model)
        with ExitStack() as stack:
            for modules in self.outside.values():
                for module in modules:
                    stack.enter_context(on_device(module, home))
            sums = _Sums(self.outside, self.predicted)
            stack.enter_context(_only(self.model, *sums.weights))
            for i, (output, gradient) in enumerate(zip(outputs, gradients, strict=True)):
                loss = self._loss(tail, i, output.hidden.detach())
                embedded = self._embedded(self.batches[i].to(home))
                own = [torch.ones_like(loss), gradient.hidden.to(embedded.device)]
                sums.add(torch.autograd.grad([loss, embedded], sums.weights, own, allow_unused=True))
        return sums.result()

    def _embedded(self, batch: Tensor) -> Tensor:
        """The input of the first block, [1, T, hidden], with its autograd graph."""
        seen: list[Tensor] = []

        def hook(_, args: tuple, kwargs: dict) -> None:
            seen.append(args[0] if args else kwargs["hidden_states"])
            raise Stop

        # This hook runs first: before a rotation of the stream is applied, and before a block on disk is read.
        handle = self.blocks[0].register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
        try:
            with suppress(Stop):
                self.model(batch, use_cache=False)
        finally:
            handle.remove()
        return seen[0]


class _Sums:
    """Squared gradients of weights, each used by one module or by several, summed over windows."""

    def __init__(self, users: Mapping[str, Sequence[nn.Module]], predicted: int) -> None:
        self.predicted = predicted
        self.is_transposed = {name: isinstance(modules[0], Conv1D) for name, modules in users.items()}
        # A tied weight is one parameter in memory, and one for each of its users if it was read from the disk.
        self.used = {name: list(dict.fromkeys(m.weight for m in modules)) for name, modules in users.items()}
        self.weights = [weight for weights in self.used.values() for weight in weights]
        self.sums = {name: torch.zeros_like(own[0], dtype=torch.float32) for name, own in self.used.items()}

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Add one window's gradients of `weights`; None for a weight that the window did not reach (an expert's)."""
        left = list(gradients)
        for name, weights in self.used.items():
            reached = [gradient.float() for gradient in left[: len(weights)] if gradient is not None]
            del left[: len(weights)]
            if reached:
                gradient = sum(reached[1:], reached[0])
                self.sums[name].addcmul_(gradient, gradient)

    def result(self) -> dict[str, Tensor]:
        """F [out, in] by name."""
        turned = {name: F.t() if self.is_transposed[name] else F for name, F in self.sums.items()}
        return {name: (F / self.predicted).cpu().contiguous() for name, F in turned.items()}


@contextmanager
def _only(module: nn.Module, *weights: nn.Parameter) -> Iterator[None]:
    """While the context lasts, gradients go to these parameters of the module alone."""
    before = {parameter: parameter.requires_grad for parameter in (*module.parameters(), *weights)}
    try:
        for parameter in before:
            parameter.requires_grad_(any(parameter is weight for weight in weights))
        yield
    finally:
        for parameter, state in before.items():
            parameter.requires_grad_(state)
