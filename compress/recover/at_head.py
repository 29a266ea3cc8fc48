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
        with _given(self.core, _Hidden(last_hidden_state=hidden[None])):
            return self.model(input_ids=ids, use_cache=False).logits[0].float()

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
