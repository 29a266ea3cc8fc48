"""The training loop: a model's predictions are drawn to those of a teacher, within a budget of updates and minutes."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from compress.recover.at_head import AtHead
from compress.recover.divergence import divergence
from compress.recover.learned import Learned, fast_products
from compress.recover.teacher import Teacher, positions, together
from compress.walk.blocks import find_blocks
from compress.walk.capture import device_of
from compress.walk.finite import NotFinite
from compress.walk.parallel.ranks import current, progress_bar
from compress.walk.resume import BlockStore
from eval.record.compression import RecoveryPoint
from kernels.huge_pages import freed_memory_kept, heap_in_huge_pages

WARM_UP = 0.05  # share of the updates in which the rate rises to its full size
TIMED = (3, 12)  # updates after which their number within a budget of minutes is taken from the time of the latest ones
SETTLED = 2  # updates after which the process holds all the memory that training takes
CHECKS = 10  # most scores of the held-out windows during training, beside that before it
SCORING = 0.2  # the largest share of the time of updates that these scores take
LATE = 1.25  # share of the minutes from which on a run says that they were too few
FLAT = 2  # scores without an improvement after which the rate is lowered
WORSE = 1.02  # of the score before training: at one above it the rate is lowered at once
LOWERED = 0.25  # factor of the rate then
MOST_LOWERED = 2  # times
PATIENCE = 4  # scores without an improvement after which training ends, if the rate is not lowered any more
LARGEST_GRADIENT = 1.0  # norm of all gradients together, beyond which they are scaled down


@dataclass(frozen=True)
class Schedule:
    """The schedule of training.

    steps: number of updates. minutes: the time after which training ends, 0 for no limit; it fixes the number of
        updates after the first twelve, so that a run that was interrupted has the same number.
    batch: windows per update. rate: size of the largest updates, relative to the numbers that learn. loss: see
        `compress.recover.divergence`. held_out: the number of first windows, which are scored and not trained on.
    spent: seconds of the budget that have gone by before training. gradient_checkpointing: blocks keep their inputs
        alone for the gradients.
    """

    steps: int
    minutes: float
    batch: int
    rate: float
    loss: str
    held_out: int
    spent: float = 0.0
    gradient_checkpointing: bool = False


@dataclass
class Training:
    """The state of training that a file keeps beside the numbers that learn, and its result.

    step: updates so far. steps: updates in all. checks: scores after the first one. tokens: tokens trained on so far.
    seconds: time of training so far. curve: scores of the held-out windows. best: the update with the best score, whose
    numbers are the result. lowered: how often the rate was lowered; since: the number of scores before the last time.
    ended: why training ended.
    """

    step: int = 0
    steps: int = 0
    checks: int = CHECKS
    tokens: int = 0
    seconds: float = 0.0
    curve: list[RecoveryPoint] = field(default_factory=list)
    best: int = 0
    lowered: int = 0
    since: int = 0
    ended: str = ""


class Loop:
    """Trains what learns in a model; it has the values with the best score afterwards, or those from before.

    A run that is killed goes on, with the same `store`, from its last score. On a CPU it gives the same result bit
    by bit.

    Args:
        windows: LongTensors [1, T], of which the first ones are held out.
        name: of the method, for the progress bar.
    """

    def __init__(
        self,
        model: nn.Module,
        learned: Learned,
        windows: Sequence[Tensor],
        teacher: Teacher,
        schedule: Schedule,
        *,
        name: str,
        store: BlockStore | None,
    ) -> None:
        self.model, self.learned, self.windows, self.teacher = model, learned, windows, teacher
        self.schedule, self.name, self.store = schedule, name, store
        self.device, self.latent = device_of(model), learned.latent
        self.trained = len(windows) - schedule.held_out
        self.rows = positions(model.get_input_embeddings().num_embeddings)
        self.optimizer = torch.optim.AdamW(self.latent.values(), betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        self.state = Training(steps=schedule.steps)
        self.best = {key: p.detach().clone() for key, p in self.latent.items()}
        self.losses: list[float] = []  # of the updates since the last score

    def run(self) -> Training:
        """Train, and say how it went."""
        with freed_memory_kept():
            return self._run()

    def _run(self) -> Training:
        self.learned.prepare(exact=True)
        self.at_head = AtHead(self.model)
        self._resume()
        state = self.state
        if not state.curve:
            self._check()
        progress = progress_bar(total=state.steps, initial=state.step, desc=self.name, unit="update")
        times: list[float] = []
        began = state.step
        while state.step < state.steps and not state.ended:
            start = time.perf_counter()
            self._update()
            state.seconds += time.perf_counter() - start
            times.append(time.perf_counter() - start)
            if state.step == began + SETTLED and self.device.type == "cpu":
                heap_in_huge_pages()
            if state.step in TIMED and self.schedule.minutes:
                timed = times[1:] or times  # the first update takes longer than others
                self._fit(sum(timed) / len(timed))
                times.clear()
                progress.total = state.steps
            if not state.ended and (state.step in self._checks()):
                self._check()
            progress.update()
            last = state.curve[-1].divergence
            loss = f"loss {self.losses[-1]:.4f}, " if self.losses else ""
            progress.set_postfix_str(f"{loss}held out {last:.4f} (at first {state.curve[0].divergence:.4f})")
        progress.close()
        self._load(self.best)
        self.learned.prepare(exact=True)
        allowed = 60 * self.schedule.minutes
        over = allowed and self.schedule.spent + state.seconds > LATE * allowed
        late = (
            f"the {self.schedule.minutes:g} minutes were too few: they were over before {state.step} updates were done"
        )
        state.ended = state.ended or (late if over else "all updates are done")
        if state.lowered:
            state.ended += f", with a rate that was lowered to {self._rate():.3g}"
        return state

    def _checks(self) -> set[int]:
        """The updates after which the held-out windows are scored."""
        return {math.ceil(self.state.steps * (i + 1) / self.state.checks) for i in range(self.state.checks)}

    def _fit(self, seconds: float) -> None:
        """Set the number of updates of this many seconds that the budget of minutes allows."""
        left = 60 * self.schedule.minutes - self.schedule.spent - self.state.seconds
        updates = left / seconds
        score = self.state.curve[0].seconds / seconds  # the time of a score of the held-out windows, in updates
        self.state.checks = min(CHECKS, max(2, int(SCORING * updates / score)))
        fitting = self.state.step + int(updates - score * self.state.checks)
        self.state.steps = max(self.state.step, min(self.schedule.steps, fitting))
        self.state.steps, self.state.checks = current().from_first((self.state.steps, self.state.checks))
        self._keep()

    def _update(self) -> None:
        state, batch = self.state, min(self.schedule.batch, self.trained)
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate() * _warm(state.step, state.steps)
        numbers = [self._window(i) for i in range(state.step * batch, (state.step + 1) * batch)]
        given, own, total = self.teacher.of(numbers), current().share(numbers), 0.0
        for several in together([self.windows[i] for i in own], batch):
            total += self._backward([own[i] for i in several], given, batch)
        total = sum(current().gathered(total))
        if not math.isfinite(total):
            state.ended = f"the loss of update {state.step + 1} was {total}"
            return
        self.learned.collect()
        self._add_up_gradients()
        norm = nn.utils.clip_grad_norm_(self.latent.values(), LARGEST_GRADIENT).item()
        if not math.isfinite(norm):
            state.ended = f"the gradient of update {state.step + 1} was {norm}"
            return
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.learned.prepare()
        state.step, state.tokens = state.step + 1, state.tokens + sum(self.windows[i].shape[1] for i in numbers)
        self.losses.append(total)

    def _add_up_gradients(self) -> None:
        """Over all processes, each of which has run a part of the windows, or none."""
        if current().count > 1:
            for number in self.latent.values():
                number.grad = torch.zeros_like(number) if number.grad is None else number.grad
            current().add_up([number.grad for number in self.latent.values()])

    def _rate(self) -> float:
        """The size of the largest updates."""
        return self.schedule.rate * LOWERED**self.state.lowered

    def _lower(self) -> None:
        """Go on from the best state with a lower rate."""
        self.state.lowered, self.state.since = self.state.lowered + 1, len(self.state.curve)
        self._load(self.best)
        self.optimizer.state.clear()
        self.learned.prepare()

    def _window(self, i: int) -> int:
        """The i-th window that is trained on: all of them in a random order, and again in another one."""
        turn, place = divmod(i, self.trained)
        order = torch.randperm(self.trained, generator=torch.Generator().manual_seed(turn))
        return self.schedule.held_out + int(order[place])

    def _backward(self, numbers: Sequence[int], given: Mapping[int, tuple[Tensor, Tensor]], batch: int) -> float:
        """What windows of one length, which one pass takes, add to the mean loss of an update of `batch` windows; its
        gradients are added to those of the leaves.

        Args:
            given: by window, the teacher's predictions.
        """
        with torch.enable_grad():
            by_blocks = checkpointed(self.model) if self.schedule.gradient_checkpointing else nullcontext()
            with fast_products(self.model, self.learned.passes), by_blocks:
                hidden = self.at_head.hidden(torch.cat([self.windows[i] for i in numbers]).to(self.device))
            states, total = hidden.detach().requires_grad_(), 0.0
            for piece, ids, logp in self._pieces(states, [given[i] for i in numbers]):
                with fast_products(self.model, self.learned.passes):
                    logits = self.at_head.logits(piece)
                share = len(numbers) / (len(states) * batch)  # of a position in the mean over tokens and windows
                loss = divergence(logits, ids, logp, self.schedule.loss).sum() * share
                loss.backward()
                total += loss.item()
            hidden.backward(states.grad)
        return total

    @torch.no_grad()
    def _score(self) -> float:
        """The mean forward divergence of the held-out windows, nats per token."""
        ranks, total, tokens = current(), 0.0, 0
        for first in range(0, self.schedule.held_out, ranks.count):
            numbers = range(first, min(first + ranks.count, self.schedule.held_out))
            given = self.teacher.of(numbers)
            for i in ranks.share(numbers):
                hidden = self.at_head.hidden(self.windows[i].to(self.device))
                pieces = self._pieces(hidden, [given[i]])
                total += sum(divergence(self.at_head.logits(h), *teacher).sum().item() for h, *teacher in pieces)
                tokens += len(hidden)
        both = ranks.gathered((total, tokens))
        return sum(total for total, _ in both) / sum(tokens for _, tokens in both)

    def _pieces(self, hidden: Tensor, given: Sequence[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, ...]]:
        """Hidden states of some windows together, with the ids and log-probabilities that the teacher has there, a few
        positions at a time."""
        ids, logp = (torch.cat(parts).to(self.device) for parts in zip(*given, strict=True))
        return zip(*(x.split(self.rows) for x in (hidden, ids.long(), logp)), strict=True)

    def _check(self) -> None:
        """Score the held-out windows, remember the best state, keep all of it on disk, and see whether to go on."""
        state, start = self.state, time.perf_counter()
        self.learned.prepare(exact=True)
        score = self._score()
        self.learned.prepare()
        loss = sum(self.losses) / len(self.losses) if self.losses else None
        best = state.curve[_best(state.curve)].divergence if state.curve else math.inf
        state.seconds += time.perf_counter() - start
        state.curve.append(RecoveryPoint(state.step, state.tokens, state.seconds, loss, score))
        self.losses.clear()
        if len(state.curve) == 1 and not math.isfinite(score):
            raise NotFinite("the compressed model's predictions for held-out text are NaN or infinite before training")
        flat = len(state.curve) - max(_best(state.curve) + 1, state.since)
        at_first, lowers = state.curve[0].divergence, state.lowered < MOST_LOWERED
        diverged, worse = not score < 2 * at_first, not score < WORSE * at_first
        if score < best:
            state.best, self.best = state.step, {key: p.detach().clone() for key, p in self.latent.items()}
        elif lowers and (worse or flat >= FLAT):
            self._lower()
        elif diverged:
            state.ended = f"training diverged: the held-out windows had {score:.4g} after update {state.step}"
        elif flat >= PATIENCE:
            state.ended = f"the held-out windows did not improve after update {state.best}"
        self._keep()

    def _keep(self) -> None:
        if self.store is None:
            return
        tensors = {f"now.{key}": p.detach() for key, p in self.latent.items()}
        tensors |= {f"best.{key}": p for key, p in self.best.items()}
        for key, parameter in self.latent.items():
            for name, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"{name}.{key}"] = value
        state = {**vars(self.state), "curve": [vars(point) for point in self.state.curve]}
        self.store.put(0, tensors, {"training": state, "losses": self.losses})

    def _resume(self) -> None:
        found = current().from_first(self.store.get(0) if self.store else None)
        if found is None:
            return
        tensors, about = found
        kept, self.losses = about["training"], about["losses"]
        self.state = Training(**{**kept, "curve": [RecoveryPoint(**point) for point in kept["curve"]]})
        self.best = {key: tensors[f"best.{key}"].to(p.device) for key, p in self.latent.items()}
        self._load({key: tensors[f"now.{key}"] for key in self.latent})
        for key, parameter in self.latent.items():
            own = {n: tensors[f"{n}.{key}"] for n in ("step", "exp_avg", "exp_avg_sq") if f"{n}.{key}" in tensors}
            if own:
                self.optimizer.state[parameter] = {n: t.to(parameter.device) for n, t in own.items()}
        self.learned.prepare()

    def _load(self, values: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for key, parameter in self.latent.items():
                parameter.copy_(values[key])


@contextmanager
def checkpointed(model: nn.Module) -> Iterator[None]:
    """While the context lasts, a pass keeps the inputs of blocks for its gradients, and no result inside of them: the
    gradients compute these again, block by block, as arXiv:1604.06174 does."""
    with ExitStack() as undo:
        for block in find_blocks(model)[1]:
            former = vars(block).get("forward")  # of a library that has put its own there
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
            if former is not None:
                undo.callback(setattr, block, "forward", former)
            undo.callback(delattr, block, "forward")
        yield


def _warm(step: int, steps: int) -> float:
    """The share of the full rate at an update: it rises linearly, and falls as a cosine to 0."""
    warm = max(1, round(WARM_UP * steps))
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def _best(curve: Sequence[RecoveryPoint]) -> int:
    return min(range(len(curve)), key=lambda i: curve[i].divergence if math.isfinite(curve[i].divergence) else math.inf)
