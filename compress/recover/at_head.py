"""A model in two parts, up to its head and from it on, so that logits are computed for a few positions at a time."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from compress.walk.capture import device_of


class AtHead:
    """Hidden states of a model's decoder, and the logits that the model makes of any of them.

    A head may be followed by a factor or a cap of the logits, which differ by architecture: the model's own code runs,
    on hidden states that are given to it. A model whose logits cannot be made in this way gives the logits of whole
    windows.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.splits = model, False
        self._cast: Tensor | None = None  # the head's matrix in the dtype of products
        for self.core in dict.fromkeys((model.get_decoder(), model.base_model)):
            self.splits = self.splits or (self.core is not model and self._splits())
            if self.splits:
                break

    def hidden(self, ids: Tensor) -> Tensor:
        """What is given to the head for tokens ids [n, T]: [n * T, hidden]; or the logits, if the model does not
        split."""
        if not self.splits:
            return self.model(input_ids=ids, use_cache=False).logits.flatten(0, 1)
        return self.core(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, vocabulary] in float32 of n rows of `hidden`."""
        if not self.splits:
            return hidden.float()
        ids = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
        with _given(self.core, _Hidden(last_hidden_state=hidden[None])), self._cast_once(hidden.device.type):
            return self.model(input_ids=ids, use_cache=False).logits[0].float()

    @contextmanager
    def _cast_once(self, kind: str) -> Iterator[None]:
        """While the context lasts, the head's matrix, which does not learn, has the dtype of autocast. It would be cast
        to it for every few positions."""
        head = self.model.get_output_embeddings()
        own = ((name, p) for name, p in head.named_parameters(recurse=False) if p.dim() == 2 and not p.requires_grad)
        name, matrix = next(own, ("", None))
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        if matrix is None or dtype in (None, matrix.dtype):
            yield
            return
        if self._cast is None or self._cast.dtype != dtype:
            self._cast = matrix.detach().to(dtype)
        vars(head)[name] = self._cast  # found before the parameter, which others may share
        try:
            yield
        finally:
            del vars(head)[name]

    @torch.no_grad()
    def _splits(self) -> bool:
        ids = torch.arange(3, device=device_of(self.model))[None]
        whole = self.model(input_ids=ids, use_cache=False).logits[0].float()
        self.splits = True
        try:
            return torch.allclose(self.logits(self.hidden(ids)), whole, rtol=1e-3, atol=1e-3 * whole.abs().max().item())
        except (AttributeError, TypeError, ValueError, RuntimeError):  # models of other authors return other things
            return False


class _Hidden(BaseModelOutputWithPast):
    """The output of a decoder of any class; what some classes add to it is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


@contextmanager
def _given(core: nn.Module, output: BaseModelOutputWithPast) -> Iterator[None]:
    """While the context lasts, this module gives this output, whatever its input."""
    former = vars(core).get("forward")
    core.forward = lambda *_, **__: output
    try:
        yield
    finally:
        del core.forward
        if former is not None:
            core.forward = former
