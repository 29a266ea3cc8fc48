"""The predictions of the original model for the text on which a compressed one is trained, computed once and kept on
disk."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from compress.recover.at_head import AtHead
from compress.recover.divergence import likeliest
from compress.recover.learned import fast_products
from compress.walk.capture import device_of
from compress.walk.finite import NotFinite
from compress.walk.parallel.ranks import current, progress_bar
from compress.walk.resume import BlockStore
from kernels.huge_pages import freed_memory_kept
from kernels.linear import fast_linear

KEPT = 128  # likeliest tokens of a position that are kept, with their log-probabilities
POSITIONS = 128  # positions whose logits are in memory at once, or more if they are fewer numbers than LOGITS together
LOGITS = 1 << 25
TOKENS = 1024  # most tokens of a pass over several windows
AT_ONCE = 4  # most windows of such a pass of the original


def positions(vocabulary: int) -> int:
    """For how many positions the logits are in memory at once."""
    return max(POSITIONS, LOGITS // vocabulary)


def together(windows: Sequence[Tensor], most: int) -> list[list[int]]:
    """The numbers of windows that one pass takes, in order: at most so many, of one length, with few tokens together.

    Weights are read, and cast, once for all of them."""
    passes: list[list[int]] = []
    for i, window in enumerate(windows):
        length, last = window.shape[1], passes[-1] if passes else []
        fits = last and windows[last[0]].shape[1] == length and len(last) < min(most, TOKENS // length)
        last.append(i) if fits else passes.append([i])
    return passes


class Teacher:
    """The likeliest tokens of the original model at every position of every window.

    Of several processes, each runs its share of the passes, and all call the same methods in the same order.

    Args:
        store: the folder of the first process, with a file for each window; None in the others.
    """

    def __init__(self, store: BlockStore | None) -> None:
        self.store = store

    @torch.no_grad()
    def write(self, model: nn.Module, windows: Sequence[Tensor], *, least: int, seconds: float = 0.0) -> None:
        """Write the predictions for these windows, LongTensors [1, T]; those that are on disk already stay, and their
        time counts.

        Products are rounded as those of training are (`compress.recover.learned.fast_products`): on a device with
        instructions for bfloat16 their results, and so the logits, have 8 significant bits, and log-probabilities are
        computed from them in float32. The divergence of these predictions from those in float32 is below 0.001 nats per
        token for the embedded model, two thirds of which come from the logits. A compressed model whose divergence is
        as small as that gains nothing from training.

        Args:
            least: the number of windows that are written in any case.
            seconds: the time after which no further window is begun; 0: all are written.
        """
        ranks, device, count = current(), device_of(model), len(windows)
        already = ranks.from_first(self._already(len(windows)) if self.store else None)
        if already is None:
            return
        first, before = already
        start = time.perf_counter() - before
        at_head = AtHead(model)
        rows = positions(model.get_input_embeddings().num_embeddings)
        passes = [several for several in together(windows, AT_ONCE) if several[-1] >= first]
        progress = progress_bar(total=len(windows), initial=first, desc="predictions of the original", unit="window")
        with progress, freed_memory_kept(), fast_linear(), fast_products(model):
            for turn in range(0, len(passes), ranks.count):
                own = passes[turn : turn + ranks.count]
                if seconds and own[0][0] >= least and ranks.from_first(time.perf_counter() - start > seconds):
                    count = own[0][0]
                    break
                made = [_predicted(at_head, windows, several, rows, device) for several in ranks.share(own)]
                made = [window for several in ranks.gathered(made) for windows_of in several for window in windows_of]
                for i, kept in made if self.store else ():
                    if i >= first:  # an earlier run may have ended between the windows of a pass
                        self.store.put(i, kept, {"seconds": time.perf_counter() - start})
                        progress.update()
        if self.store:
            self.store.put(len(windows), {}, {"windows": count, "seconds": time.perf_counter() - start})

    def _already(self, windows: int) -> tuple[int, float] | None:
        """How many windows are on disk, and the seconds that they took; None if no further one is to be written."""
        if self.store.about(windows) is not None:
            return None
        first = self.store.finished(windows)
        return first, self.store.about(first - 1)["seconds"] if first else 0.0

    def written(self, windows: int) -> tuple[int, float]:
        """Of this many windows, the number of those whose predictions were written, and the seconds that it took."""
        about = current().from_first(self.store.about(windows) if self.store else None)
        return about["windows"], about["seconds"]

    def of(self, windows: Sequence[int]) -> dict[int, tuple[Tensor, Tensor]]:
        """By window, ids and log-probabilities [T, k] of the likeliest tokens at each position, in memory."""
        return current().from_first({i: self._of(i) for i in windows} if self.store else None)

    def _of(self, window: int) -> tuple[Tensor, Tensor]:
        tensors, _ = self.store.get(window)
        return tensors["ids"], tensors["logp"]


def _predicted(
    at_head: AtHead, windows: Sequence[Tensor], several: Sequence[int], rows: int, device: torch.device
) -> list[tuple[int, dict[str, Tensor]]]:
    """The windows of one pass, each with its predictions."""
    hidden = at_head.hidden(torch.cat([windows[i] for i in several]).to(device))
    pieces = [likeliest(at_head.logits(piece), KEPT) for piece in hidden.split(rows)]
    both = (torch.cat(parts).cpu().chunk(len(several)) for parts in zip(*pieces, strict=True))
    made = []
    for i, ids, logp in zip(several, *both, strict=True):
        if not logp.isfinite().all():
            raise NotFinite(f"the original model's predictions for window {i} of the training text are NaN or infinite")
        made.append((i, {"ids": ids.int().contiguous(), "logp": logp.contiguous()}))
    return made
