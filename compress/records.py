"""Records of the parts of a model that a method compressed: rows of the run record."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerRecord:
    """How one weight was compressed; a row of the run record's `layers`.

    error: ||(W - Ŵ)X||² / ||WX||² over the calibration tokens (or ||W - Ŵ||² / ||W||² where there were none, as `notes`
    says). `rtn_error`: the same for round-to-nearest on the same grid, with scales chosen as the method chooses them;
    None where there is no such comparison. bits_per_weight: stored, floats that are cast with the model counted as 16
    bits. sparsity: the share of Ŵ that is 0. choice: the method that was chosen for this weight where several were at
    hand, and choices: {method: what the layer
        would lose with it alone}, as it was measured to choose; a layer may be several weights that share a choice.
    distortion: {ratio of this weight's entries set to 0, others as they were: KL of the model's predictions, nats per
        token}, as
    the method measured it to choose the ratio; None where it did not.
    """

    name: str
    shape: tuple[int, int]
    format: str
    bits_per_weight: float
    error: float
    rtn_error: float | None
    seconds: float
    tokens: int
    notes: tuple[str, ...] = ()
    sparsity: float = 0.0
    distortion: dict[str, float] | None = None
    choice: str | None = None
    choices: dict[str, float] | None = None


@dataclass(frozen=True)
class AllocationRecord:
    """How a budget of bytes was shared out among layers; the record's `allocation`.

    loss: what was to be least in all. budget_bytes: of the whole model. beside_bytes: of what was not shared out.
    chosen: (bytes of the whole model, predicted loss). curve: the same for other budgets, from the smallest choices to
    the largest. layers: how many had a choice. seconds: that it took to measure and choose.
    """

    loss: str
    budget_bytes: int
    beside_bytes: int
    chosen: tuple[int, float]
    curve: tuple[tuple[int, float], ...]
    layers: int
    seconds: float


@dataclass(frozen=True)
class DropRecord:
    """A part of a block that was dropped, or might have been; a row of the record's `drops`.

    kind: "attention", "mlp" or "block". block: its number in the model as it was. importance: 1 - cosine of the
        residual stream
    before and after, mean over the calibration tokens, when it was measured last. order: 1 for what was dropped first;
    None: it stays. parameters: how many went with it.
    """

    name: str
    kind: str
    block: int
    importance: float
    order: int | None = None
    parameters: int = 0


@dataclass(frozen=True)
class FoldRecord:
    """What was moved from a producer (a norm, or a linear) into the linears that read it, or how the input of these was
    rotated; a row of the record's `folds`.

    alpha: strength of the migration, None where all scales stayed 1, and for rotations.
    x_*, w_*: the largest magnitudes, channel by channel, of the consumers' input over the calibration tokens and of
        their weights' columns, as {"max", "p99", "median"} over the channels. For rotations the inputs are those of the
        first calibration window, and x_* has "kurtosis" too, the mean of that of a token's values. For keys x_* are
        the lengths of the keys' pairs, and w_* those of the rows of what gives the queries.
    error_*: ||WX - Q(W)Q(X)||² / ||WX||² over all consumers, rounded to nearest as the method aims at, without and with
        the scales; None where it was not measured.
    difference: ||y - y'|| / ||y|| of the block's output y without quantisation.
    channels: the magnitudes themselves, {"x_before": [...], "x_after", "w_before", "w_after"}, for a few.
    """

    name: str
    kind: (
        str  # "norm", "linear", "keys", "rotation of the stream", "rotation of heads", "online rotation", "online map"
    )
    consumers: tuple[str, ...]
    alpha: float | None
    x_before: dict[str, float]
    x_after: dict[str, float]
    w_before: dict[str, float]
    w_after: dict[str, float]
    error_before: float | None
    error_after: float | None
    difference: float
    seconds: float
    notes: tuple[str, ...] = ()
    channels: dict[str, list[float]] | None = None


@dataclass
class Usage:
    """What a compression takes, in bytes.

    Attributes:
        predicted_peak, peak: of the process's memory, all of it; peak is None where the system does not tell.
        predicted_disk, disk: the most that lay in the work folder; 0 for a model in memory.
        max_memory: the limit that was asked for, None if none was.
        weights, activations: where they were kept, "memory" or "disk".
    """

    predicted_peak: int
    predicted_disk: int
    weights: str
    activations: str
    max_memory: int | None = None
    peak: int | None = None
    disk: int | None = None
