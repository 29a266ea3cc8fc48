"""Which weights and which cache let the most sequences decode within a memory: predicted, chosen by measured losses,
made, and decoded."""

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from operator import itemgetter

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from compress import Result
from compress.allocation.predictions import divergence
from compress.apply import apply_each
from compress.kv import CacheBatch, CompressedCache, attached
from compress.kv.attach import Attachment
from compress.linear import sharing_copy
from compress.method import Method
from compress.search.caches import in_16_bits, logits_behind, read_prompt, with_cache
from compress.walk.blocks import kept_weights
from compress.walk.identity import model_identity
from eval.evaluate import Scores
from eval.machine.memory import peak_above_start
from eval.machine.size import size
from eval.record.search import CLOSE
from eval.record.serving import Combination, ServingRecord, ServingRound, fastest, largest
from eval.speed.cost import combine
from eval.speed.device_lock import undisturbed
from eval.speed.work import Work, work
from eval.text.names import text_name
from eval.text.windows import mean_and_stderr
from kernels.clock import clock
from kernels.step.accelerate import accelerate
from kernels.support.deploy import deployed
from kernels.support.errors import check_positive
from kernels.support.modes import evaluating
from notebooks.study import costs
from notebooks.study.service import Service, Shapes

MADE = 3  # combinations that are made at most
TRIES = 5  # numbers of sequences that are decoded at most
MORE = 1.1  # factor by which the number must grow for another try
WARM = 16  # tokens of a first pass, so that what is allocated once is not counted


@dataclass(repr=False)
class Serving:
    """The model that was made, with its cache attached, and the record of the choice."""

    result: Result
    record: ServingRecord
    scores: Scores
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)

    def found(self) -> ServingRecord:
        """For the run record."""
        return self.record

    def __repr__(self) -> str:
        return "\n".join(self.record.sentences())

    def _repr_html_(self) -> str:
        return "".join(f"<p>{escape(sentence)}</p>" for sentence in self.record.sentences())


Loss = tuple[float, float | None]  # nats per token, and the standard error over texts


@dataclass(frozen=True)
class CacheMeasure:
    """Of one cache: bytes of a sequence's cache behind its prompt and a token; room: further bytes while the prompt was
    read."""

    nbytes: int
    room: int


@torch.no_grad()
def serve(
    model: PreTrainedModel,
    batches: Sequence[Tensor],
    texts: Sequence[Tensor],
    asked: Service,
    shapes: Shapes,
    *,
    corpus: str,
    new_tokens: int = 8,
    device: str | None = None,
    work_path: str | None = None,
) -> Serving:
    """Measure losses and bytes of weights and of caches, choose a combination, make it, and decode with it.

    The loss of a cache is measured with the original weights, that of weights with the original cache; both are
    assumed to add up. If the combination that was made loses more than its limit, the predictions for all others are
    corrected by its factor, and another one is chosen, at most three in all: if none is predicted to be within the
    limit any more, the one that loses least. Then as many sequences as predicted are decoded together;
    if they take more than the memory, even when they are decoded once more, fewer are.

    Args:
        batches: calibration tokens, as for `apply`.
        texts: of `contexts_of`, [1, context + scored] each: the first `context` tokens are read as a prompt, and the
            predictions for the others are compared. They are the prompts of the sequences as well, as often as needed.
        shapes: of `predict_service`.
        corpus: name of the text, for the scores.
        new_tokens: tokens that are decoded of every sequence.

    Raises:
        ValueError: of no combination that fits the losses of the parts add up to less than the limit of the divergence;
            the message says how near one comes.
    """
    check_positive(new_tokens=new_tokens)
    results = apply_each(asked.weights, model, batches, device=device, work_path=work_path or None)
    return _Service(model, texts, asked, shapes, results, new_tokens).run(text_name(corpus) or corpus)


class _Service:
    """The measurements of one service, and what is chosen by them."""

    def __init__(
        self,
        model: PreTrainedModel,
        texts: Sequence[Tensor],
        asked: Service,
        shapes: Shapes,
        results: Mapping[str, Result],
        new_tokens: int,
    ) -> None:
        self.model, self.texts, self.asked, self.shapes, self.results, self.new_tokens = (
            model, texts, asked, shapes, results, new_tokens,
        )  # fmt: skip
        self.expected = logits_behind(model, [], self.texts, self.asked.context)
        self.works = {name: self._weights(self._model(name)) for name in (costs.PLAIN, *asked.weights)}
        self.alone = self._measure_alone()
        self.caches = self._measure_caches()

    def run(self, corpus: str) -> Serving:
        made: dict[tuple[str, str], Loss] = {}
        factor = 1.0
        while len(made) < MADE:
            best = self._choose(made, factor)
            if best is None or (place := (best.weights, best.cache)) in made:
                break
            if place in self.alone:  # measured already, and no sum that could be corrected
                made[place] = self.alone[place]
                continue
            made[place] = self._loss(self._model(best.weights), self._methods(best.cache))
            factor = made[place][0] / best.loss if best.loss else factor
        place = self._kept(made)
        found = self._combinations()
        kept = next(i for i, one in enumerate(found) if (one.weights, one.cache) == place)
        rounds = self._decode(found[kept])
        record = ServingRecord(
            memory=self.asked.memory,
            context=self.asked.context,
            max_kl=self.asked.max_kl,
            aim=self.asked.aim,
            device=self.asked.device,
            by_shapes=next(one for one in self.shapes.found if (one.weights, one.cache) == place),
            found=tuple(found),
            kept=kept,
            divergence=made[place][0],
            divergence_stderr=made[place][1],
            tried=len(made),
            factor=factor,
            rounds=tuple(rounds),
            weights={name: Service.text(methods) for name, methods in self.asked.weights.items()},
            caches={name: Service.text(methods) for name, methods in self.asked.caches.items()},
            windows=len(self.texts),
            scored=self.texts[0].shape[1] - self.asked.context,
            batch=self.asked.batch,
        )
        return Serving(self._result(found[kept]), record, self._scores(record, corpus))

    # What is measured of weights and caches.

    def _model(self, weights: str) -> PreTrainedModel:
        return self.model if weights == costs.PLAIN else self.results[weights].model

    def _methods(self, cache: str) -> list[Method]:
        return self.asked.caches.get(cache, [])

    def _weights(self, model: PreTrainedModel) -> tuple[Work, int]:
        """The work of a step with these weights, and their bytes in memory."""
        small = deployed(model)
        return work(small, like=self.shapes.plain), size(small).resident_bytes

    def _loss(self, model: PreTrainedModel, methods: Sequence[Method]) -> Loss:
        """The divergence behind the context, nats per token, and its standard error over texts."""
        pairs = zip(self.expected, logits_behind(model, methods, self.texts, self.asked.context), strict=True)
        scored = [wanted.shape[1] for wanted in self.expected]
        sums = [divergence([wanted], [found]) * count for (wanted, found), count in zip(pairs, scored, strict=True)]
        return mean_and_stderr(sums, scored)

    def _measure_alone(self) -> dict[tuple[str, str], Loss]:
        """The losses of combinations of which one part, or both, are in 16 bits."""
        found: dict[tuple[str, str], Loss] = {(costs.PLAIN, costs.PLAIN): (0.0, None)}
        found |= {(name, costs.PLAIN): self._loss(one.model, []) for name, one in self.results.items()}
        return found | {(costs.PLAIN, name): self._loss(self.model, own) for name, own in self.asked.caches.items()}

    def _measure_caches(self) -> dict[str, CacheMeasure]:
        names, found = (costs.PLAIN, *self.asked.caches), dict[str, CacheMeasure]()
        with in_16_bits(self.model) as small:
            _accelerate(small)
            for name in tqdm(names, desc="caches", unit="cache"):
                with attached(small, self._methods(name)) as attachment:
                    read_prompt(small, attachment.cache(), self.texts[0][:, :WARM].to(small.device))
                    with peak_above_start(small.device) as peak:
                        prompt = self.texts[0][:, : self.asked.context].to(small.device)
                        cache, token = read_prompt(small, attachment.cache(), prompt)
                        small(token, past_key_values=cache, use_cache=True)
                    found[name] = CacheMeasure(cache.nbytes, max(peak.bytes - cache.nbytes, 0))
        return found

    # What is chosen.

    def _combinations(self) -> list[Combination]:
        """All combinations, by measured bytes and losses."""
        found = []
        for weights, (step, weight_bytes) in self.works.items():
            for cache, measured in self.caches.items():
                found.append(
                    combine(
                        weights,
                        cache,
                        dataclasses.replace(step, cache=self.shapes.kept[cache]),
                        weight_bytes=weight_bytes,
                        prompt_room=measured.room,
                        step_room=self.shapes.step_room,
                        memory=self.asked.memory,
                        context=self.asked.context,
                        batch=self.asked.batch,
                        ceilings=self.shapes.ceilings,
                        cache_bytes=measured.nbytes,
                        loss=self.alone[weights, costs.PLAIN][0] + self.alone[costs.PLAIN, cache][0],
                    )
                )
        return found

    def _choose(self, made: Mapping[tuple[str, str], Loss], factor: float) -> Combination | None:
        """The best combination within the limit of the divergence, which is measured or predicted for each. If there is
        none, that of the least loss whose parts add up to less than the limit; None if each of these was made."""
        fitting = [one for one in self._combinations() if one.fits]
        if not fitting:
            raise ValueError(f"{self.asked.too_small(self._combinations())}, as measured")

        def loss(one: Combination) -> float:
            place = one.weights, one.cache
            known = made.get(place) or self.alone.get(place)
            return known[0] if known else factor * (one.loss or 0.0)

        if within := [one for one in fitting if self._keeps(loss(one))]:
            return self._best(within)
        least = min(fitting, key=lambda one: one.loss or 0.0)
        if not made:
            raise ValueError(
                f"`max_kl` (={self.asked.max_kl:g}) cannot be kept: of the combinations that fit into the memory, "
                f"weights {least.weights} with cache {least.cache} lose least, {least.loss:.4f} nats per token"
            )
        others = [one for one in fitting if (one.weights, one.cache) not in made and self._keeps(one.loss or 0.0)]
        return min(others, key=loss, default=None)

    def _keeps(self, loss: float) -> bool:
        """Whether this loss is within the limit."""
        return self.asked.max_kl is None or loss <= self.asked.max_kl * (1 + CLOSE)

    def _best(self, found: Sequence[Combination]) -> Combination:
        """The best of combinations that fit, by what is asked for."""
        best = (largest if self.asked.aim == "sequences" else fastest)(found)
        assert best is not None
        return best

    def _kept(self, made: Mapping[tuple[str, str], Loss]) -> tuple[str, str]:
        """Of the combinations that were made, the best within the limit; else the one that loses least."""
        within = [place for place, (loss, _) in made.items() if self._keeps(loss)]
        if not within:
            return min(made, key=lambda place: made[place][0])
        best = self._best([one for one in self._combinations() if (one.weights, one.cache) in within])
        return best.weights, best.cache

    # What is made.

    def _decode(self, chosen: Combination) -> list[ServingRound]:
        """Decode as many sequences as predicted, or fewer if these take more than the memory; the last round counts."""
        count, rounds = chosen.batch, list[ServingRound]()
        with in_16_bits(self._model(chosen.weights)) as small:
            _accelerate(small)
            resident, methods = size(small).resident_bytes, self._methods(chosen.cache)
            while True:
                found = self._together(small, methods, count)
                if resident + found[0] > self.asked.memory:  # which may be what libraries allocate once and keep
                    found = min(found, self._together(small, methods, count), key=itemgetter(0))
                peak, held, rate = found
                rounds.append(ServingRound(count, resident + peak, held, rate))
                count = self._next_count(rounds)
                if not count or len(rounds) == TRIES:
                    return sorted(rounds, key=self._worth)

    def _worth(self, one: ServingRound) -> int:
        """By which rounds are ordered: the more sequences the better, if they fit, and the fewer, if they do not."""
        return one.sequences if one.peak_bytes <= self.asked.memory else -one.sequences

    def _next_count(self, rounds: Sequence[ServingRound]) -> int:
        """The number of sequences to decode next: fewer, as long as none fits, by more each time, since peaks differ;
        and then more, if a tenth more would fit and had not been too many, because the peak of an earlier round was
        that of something else; 0: none."""
        memory, last = self.asked.memory, rounds[-1]
        fitting = [one for one in rounds if one.peak_bytes <= memory]
        if not fitting:
            over = (last.peak_bytes - memory) * len(rounds)
            fewer = last.sequences - max(-(-over * last.sequences // last.cache_bytes), 1)
            return max(fewer, 1) if last.sequences > 1 else 0
        best = max(fitting, key=lambda one: one.sequences)
        too_many = min((one.sequences for one in rounds if one.sequences > best.sequences), default=best.sequences + 1)
        more = (memory - best.peak_bytes) * best.sequences // best.cache_bytes
        count = min(too_many - 1, best.sequences + more)
        if last is not best:  # as many as seemed to fit did not
            count = (best.sequences + too_many) // 2
        return count if count > MORE * best.sequences else 0

    def _together(self, model: PreTrainedModel, methods: Sequence[Method], count: int) -> tuple[int, int, float | None]:
        """Decode sequences in one batch: the peak of the memory above that of the weights, the bytes of all caches, and
        tokens per second of all sequences."""
        device = model.device
        with attached(model, methods) as attachment, evaluating(model):
            read_prompt(model, attachment.cache(), self.texts[0][:, :WARM].to(device))
            with peak_above_start(device) as peak:
                read = self._read_prompts(model, attachment, count)
                caches, token = CacheBatch([cache for cache, _ in read]), torch.cat([token for _, token in read])
                with undisturbed(device):
                    begin = clock(device)
                    for _ in tqdm(range(self.new_tokens), desc="tokens", unit="step"):
                        logits = model(token, past_key_values=caches, use_cache=True, logits_to_keep=1).logits
                        token = logits[:, -1:].argmax(-1)
                    seconds = clock(device) - begin
            held = sum(cache.nbytes for cache, _ in read)
        return peak.bytes, held, count * self.new_tokens / seconds

    def _read_prompts(
        self, model: PreTrainedModel, attachment: Attachment, count: int
    ) -> list[tuple[CompressedCache, Tensor]]:
        """The caches of this many prompts with their next tokens. Each text is read once, and further sequences get
        copies of its cache; the last text is read when all other caches are there."""
        *others, last = [text[:, : self.asked.context].to(model.device) for text in self.texts[:count]]
        others = others or [last]
        progress = tqdm(others, desc="prompts", unit="prompt")
        read = [read_prompt(model, attachment.cache(), prompt) for prompt in progress]
        while len(read) < count - 1:
            read.append(copy.deepcopy(read[len(read) % len(others)]))
        return [*read, read_prompt(model, attachment.cache(), last)] if count > 1 else read

    def _result(self, chosen: Combination) -> Result:
        """The chosen model as the result of one recipe, with its cache attached."""
        methods = self._methods(chosen.cache)
        if chosen.weights in self.results:
            return with_cache(self.results[chosen.weights], methods)
        plain = Result(
            model=sharing_copy(self.model),
            recipe=[],
            asked=[],
            layers=[],
            kept=kept_weights(self.model, []),
            identity=model_identity(self.model),
            calibration=None,
            seconds=0.0,
            kernels={},
        )
        return with_cache(plain, methods)

    def _scores(self, record: ServingRecord, corpus: str) -> Scores:
        """The measurements in the form of the record."""
        plain, (_, before) = self.caches[costs.PLAIN], self.works[costs.PLAIN]
        last, kept = record.rounds[-1], record.found[record.kept]
        metrics = {
            "baseline": {"stored_bytes": before, "cache_bytes": plain.nbytes},
            "compressed": {
                f"kl_{corpus}": record.divergence,
                "stored_bytes": kept.weight_bytes,
                "cache_bytes": kept.cache_bytes,  # behind as many tokens as the baseline's
                "peak_memory_bytes": last.peak_bytes,
            },
        }
        if record.divergence_stderr is not None:
            metrics["compressed"][f"kl_{corpus}_stderr"] = record.divergence_stderr
        dtype = str(self.model.dtype).removeprefix("torch.")
        return Scores(metrics, device=self.model.device.type, dtype=dtype, deploy_dtype="bfloat16")


def _accelerate(model: PreTrainedModel) -> None:
    """Read prompts and tokens through the fast passes of a CPU, without memory beyond that of the weights."""
    if model.device.type == "cpu":
        accelerate(model, None, lay_out=False)
