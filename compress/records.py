"""Records of the parts of a model that a method compressed: rows of the run record."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerRecord:
    """The compression of one weight; a row of the run record's `layers`.

    error: ||(W - Ŵ)X||² / ||WX||² over the calibration tokens (or ||W - Ŵ||² / ||W||² if there were none, as `notes`
    says). `rtn_error`: the same for round-to-nearest on the same grid, with scales chosen as the method chooses them;
    None if there is no such comparison. bits_per_weight: stored, floats that are cast with the model counted as 16
    bits. sparsity: the share of Ŵ that is 0. choice: the method that was chosen for this weight, if there were several,
    and choices: {method: the layer's measured loss with it alone}, by which it was chosen; a layer may be several
    weights that share a choice. distortion: {ratio of this weight's entries set to 0, with all other weights unchanged:
    KL of the model's predictions, nats per token}, which the method measured to choose the ratio; None if it did not.
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
    """The division of a budget of bytes among layers; the record's `allocation`.

    loss: the loss whose sum was minimised. budget_bytes: of the whole model. beside_bytes: of weights without a choice.
    chosen: (bytes of the whole model, predicted loss). curve: the same for other budgets, from the smallest choices to
    the largest. layers: the number of layers with a choice. seconds: time to measure and choose.
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
    """A part of a block that was dropped, or a candidate; a row of the record's `drops`.

    kind: "attention", "mlp" or "block". block: its number in the original model. importance: 1 - cosine of the residual
    stream before and after, mean over the calibration tokens, at the last measurement. order: 1 for the part that was
    dropped first; None: it stays. parameters: the number of its parameters.
    """

    name: str
    kind: str
    block: int
    importance: float
    order: int | None = None
    parameters: int = 0


@dataclass(frozen=True)
class FoldRecord:
    """Scales that were moved from a producer (a norm, or a linear) into the linears that read it, or a rotation of the
    input of linears; a row of the record's `folds`.

    alpha: strength of the migration, None if all scales stayed 1, and for rotations.
    x_*, w_*: the largest magnitudes, channel by channel, of the consumers' input over the calibration tokens and of
        their weights' columns, as {"max", "p99", "median"} over the channels. For rotations the inputs are those of the
        first calibration window, and x_* also has "kurtosis", the mean kurtosis of a token's values. For keys x_* are
        the lengths of the keys' pairs, and w_* the lengths of the rows of the module that gives the queries.
    error_*: ||WX - Q(W)Q(X)||² / ||WX||² over all consumers, rounded to nearest on the grid that the method aims at,
        without and with the scales; None if it was not measured.
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
    """The memory and disk space of a compression, in bytes.

    Attributes:
        predicted_peak, peak: of the memory of the whole process; peak is None if the system does not report it.
        predicted_disk, disk: the largest size of the work folder; 0 for a model in memory.
        max_memory: the limit that the user gave, or None.
        weights, activations: where they were kept, "memory" or "disk".
    """

    predicted_peak: int
    predicted_disk: int
    weights: str
    activations: str
    max_memory: int | None = None
    peak: int | None = None
    disk: int | None = None
