"""The record of a search for the best choice of every layer (`compress.search`)."""

from dataclasses import dataclass, field

CLOSE = 0.02  # share by which the measured divergence may exceed its limit
PROMPT = 256  # tokens of the prompts that are timed in a search, as a standard


@dataclass(frozen=True)
class SearchPoint:
    """A whole model, as predicted. bytes: stored, and of the cache if there are choices for it. loss: nats per token.
    decode, prefill: tokens per second, None if nothing was timed."""

    bytes: int
    loss: float
    decode: float | None = None
    prefill: float | None = None


@dataclass(frozen=True)
class SearchRound:
    """A model that was made.

    Attributes:
        point: as predicted. factor: what the sum of the layers' losses was multiplied by.
        divergence: measured on whole windows, or behind contexts if there are choices for the cache, nats per token.
        bytes: of the model that was made, stored, and of its cache.
        decode, prefill: tokens per second as predicted, times what the model reached as a multiple of the prediction,
            both relative to the original in the same turns; None: it was not timed.
        uniform: is it the model with one choice for all linears in blocks, and one for the embedding and the head?
        minutes: of distillation after the compression; 0: none.
    """

    point: SearchPoint
    factor: float
    divergence: float
    bytes: int | None = None
    decode: float | None = None
    prefill: float | None = None
    uniform: bool = False
    minutes: float = 0.0


@dataclass(frozen=True)
class SearchLayer:
    """What a layer got. name: of its first linear. choice, bytes, loss: of the choice. fewer, more: bytes and loss of
    the choices with the next fewer and the next more bytes; () if there are none."""

    name: str
    choice: str
    bytes: int
    loss: float
    fewer: tuple[float, ...] = ()
    more: tuple[float, ...] = ()


@dataclass(frozen=True)
class SearchCaches:
    """The caches among which the search chose.

    Attributes:
        context: tokens of every sequence. batch: number of sequences. scored: tokens behind each context on which
            predictions were compared. texts: number of contexts.
        chosen: the name of the cache of the model that was kept.
        recipes, bytes, loss, decode_ratio: by name; of all sequences, with the original weights, and relative to the
            full cache. decode_ratio is empty if nothing was timed.
    """

    context: int
    batch: int
    scored: int
    texts: int
    chosen: str
    recipes: dict[str, str]
    bytes: dict[str, float]
    loss: dict[str, float]
    decode_ratio: dict[str, float] = field(default_factory=dict)

    def sentence(self) -> str:
        """What was chosen, for readers."""
        several = (
            f"{self.batch} sequences of {self.context:,} tokens each"
            if self.batch > 1
            else (f"a sequence of {self.context:,} tokens")
        )
        said = f"The cache of {several} is kept as: {self.chosen}, in {self.bytes[self.chosen] / 1e6:.1f} MB, which the"
        return (
            f"{said} sizes here count. By itself it loses {self.loss[self.chosen]:.4f} nats per token; the divergence "
            f"is that of {self.scored} tokens behind each of {self.texts} contexts."
        )


@dataclass(frozen=True)
class SearchRecord:
    """What was asked, predicted and measured.

    Attributes:
        max_bytes, min_decode, min_prefill, max_kl: the limits; None: there was none. Speeds are tokens per second.
        max_ttft: limit of the seconds until the first token after a prompt of `prompt` tokens; min_prefill is then
            prompt / max_ttft.
        prompt: tokens of the prompts that were timed.
        minimised: "loss", "bytes" or "decode" (which is maximised).
        rounds, kept: the models that were made, and the number of the one that was kept.
        front: the least losses for sizes between the smallest and the largest, within the limits of speed.
        choices: the methods. decode_ratio, prefill_ratio: by choice, how many times as fast as the original a model is
            in which all layers have it. original: its decode and prefill, tokens per second.
        timed_earlier: were these speeds measured by an earlier search on this machine?
        held_out: are the windows, on which whole models were measured, others than the calibration's?
        layers: number of layers that have a choice. used: by choice, the number of linears that have it.
        picked: what each layer of the model that was kept got.
        uniform: the best recipe within the limits with one choice for all linears in blocks, and one for the embedding
            and the head; None: none keeps the limits, or an earlier version made the record.
        uniform_point: the model of this recipe.
        caches: the choices for the cache; None: there were none.
    """

    max_bytes: float | None
    min_decode: float | None
    min_prefill: float | None
    max_kl: float | None
    minimised: str
    rounds: tuple[SearchRound, ...]
    kept: int
    front: tuple[SearchPoint, ...] = ()
    choices: tuple[str, ...] = ()
    decode_ratio: dict[str, float] = field(default_factory=dict)
    prefill_ratio: dict[str, float] = field(default_factory=dict)
    original: tuple[float, float] | None = None
    held_out: bool = True
    layers: int = 0
    used: dict[str, int] = field(default_factory=dict)
    timed_earlier: bool = False
    uniform: str | None = None
    uniform_point: SearchPoint | None = None
    picked: tuple[SearchLayer, ...] = ()
    caches: SearchCaches | None = None
    max_ttft: float | None = None
    prompt: int = PROMPT

    def broken(self) -> list[str]:
        """The limits that the model that was kept does not keep, in sentences."""
        kept, said = self.rounds[self.kept], list[str]()
        if self.max_kl and kept.divergence > self.max_kl * (1 + CLOSE):
            said.append(
                "The limit of the divergence is not kept: of the models that were made, this one is nearest to it, "
                f"with {kept.divergence:.4f} nats per token."
            )
        if self.max_bytes and kept.bytes and kept.bytes > self.max_bytes:
            said.append(f"The limit of bytes is not kept: the model takes {kept.bytes / 1e6:.2f} MB{self._with_cache}.")
        for what, wish, rate in (
            ("decoding", self.min_decode, kept.decode),
            ("prompts", self.min_prefill, kept.prefill),
        ):
            if wish and rate and rate < wish / (1 + CLOSE):
                said.append(f"The limit of the speed of {what} is not kept: the model reaches {rate:,.0f} tokens/s.")
        return said

    @property
    def _with_cache(self) -> str:
        """What sizes count beside the stored model, for sentences."""
        return " with its cache" if self.caches else ""

    @property
    def _until_first(self) -> str:
        """The limit of the time until the first token, for a sentence; "" if there is none."""
        return (
            "" if self.first_token_limit is None else f" ({self.prompt} tokens in {1e3 * self.first_token_limit:g} ms)"
        )

    @property
    def first_token_limit(self) -> float | None:
        """Limit of the seconds until the first token; None: there is none, or the record holds no sensible numbers."""
        sensible = bool(self.max_ttft and self.prompt) and self.max_ttft > 0 < self.prompt
        return self.max_ttft if sensible else None

    def beside_uniform(self) -> str:
        """What the best recipe with one choice for all linears gives, in a sentence; "" if it is not known."""
        if self.uniform is None or self.uniform_point is None:
            return ""
        start = f"The best recipe within the limits that has one choice for all linears is {self.uniform}"
        if self.rounds[self.kept].uniform:
            return f"{start}. It is the model that was kept."
        made = next((one for one in self.rounds if one.uniform and not one.minutes), None)
        if made is not None:
            size = f"{(made.bytes or made.point.bytes) / 1e6:.1f} MB"
            return f"{start}. Its divergence on the same windows is {made.divergence:.4f} nats per token in {size}."
        point = self.uniform_point
        predicted = f"{point.loss:.4f} nats per token in {point.bytes / 1e6:.1f} MB"
        return f"{start}. It is predicted to lose {predicted}, too far behind to be made."

    def after_training(self) -> str:
        """What training changed, in a sentence; "" if nothing was trained."""
        trained = [one for one in self.rounds if one.minutes]
        if not trained:
            return ""
        said = []
        for own in trained:
            before = [one.divergence for one in self.rounds if one.point == own.point and not one.minutes]
            said.append(f"from {min(before):.4f} to {own.divergence:.4f}" if before else f"to {own.divergence:.4f}")
        best = "The best one was" if len(trained) == 1 else f"The {len(trained)} best ones were"
        return (
            f"{best} made again and trained for {trained[0].minutes:g} minutes each by distil: the divergence went "
            f"{', '.join(said)} nats per token."
        )

    def sentences(self) -> list[str]:
        """What was asked, found and measured, for readers."""
        limits = [
            f"at most {self.max_bytes / 1e6:.1f} MB{self._with_cache}" if self.max_bytes else "",
            f"decoding at {self.min_decode:,.0f} tokens/s or more" if self.min_decode else "",
            f"prompts at {self.min_prefill:,.0f} tokens/s or more{self._until_first}" if self.min_prefill else "",
            f"a divergence of at most {self.max_kl:g} nats per token" if self.max_kl else "",
        ]
        aim = {"loss": "least divergence", "bytes": "smallest size", "decode": "fastest decoding"}
        kept = self.rounds[self.kept]
        speeds = [
            f"{rate:,.0f} tokens/s {what}"
            for rate, what in ((kept.point.decode, "of decoding"), (kept.point.prefill, "of prompts"))
            if rate
        ]
        predicted = ", ".join([f"{kept.point.bytes / 1e6:.1f} MB", *speeds])
        mix = ", ".join(f"{count} × {text}" for text, count in self.used.items() if count)
        if self.caches:
            mix = f"{mix}. {self.caches.sentence().rstrip('.')}"
        windows = "windows that are not the calibration's" if self.held_out else "windows of the calibration itself"
        count = sum(not one.minutes for one in self.rounds)
        made = "One model was" if count == 1 else f"{count} models were"
        return [
            f"The limits are: {', '.join(filter(None, limits))}. Within them, the search looked for the "
            f"{aim[self.minimised]}.",
            f"{made} made. The prediction for the chosen one is {predicted}; its divergence on {windows} is "
            f"{kept.divergence:.4f} nats per token.",
            f"Linears by choice: {mix}.",
            *filter(None, [self.after_training(), self.beside_uniform()]),
            *self.broken(),
        ]
