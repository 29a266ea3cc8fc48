"""What a compression did, part by part: rows of the run record, which `compress` writes and pages read.

Any value may be missing in an early record; it is then None, "" or empty (`eval.record.reading.row`).
"""

import math
from dataclasses import dataclass, field


@dataclass(frozen=True)
class LayerRecord:
    """The compression of one weight; a row of the run record's `layers`.

    error: ||(W - Ŵ)X||² / ||WX||² over the calibration tokens (or ||W - Ŵ||² / ||W||² if there were none, as `notes`
    says). `rtn_error`: the same for round-to-nearest on the same grid, with scales chosen as the method chooses them;
    None if there is no such comparison. bits_per_weight: stored, floats that are cast with the model counted as 16
    bits. sparsity: the share of Ŵ that is 0. choice: the method that was chosen for this weight, if there were several,
    and choices: {method: the layer's measured loss with it alone}, by which it was chosen; a layer may be several
    weights that share a choice. distortion: {ratio of this weight's entries set to 0, with all other weights unchanged:
    KL of the model's predictions, nats per token}, which the method measured to choose the ratio; empty if it did not.
    """

    name: str
    shape: tuple[int, ...]
    format: str
    bits_per_weight: float | None
    error: float | None
    rtn_error: float | None
    seconds: float | None
    tokens: int | None
    notes: tuple[str, ...] = ()
    sparsity: float | None = 0.0
    distortion: dict[str, float] = field(default_factory=dict)
    choice: str | None = None
    choices: dict[str, float] = field(default_factory=dict)

    @property
    def weights(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class AllocationRecord:
    """The division of a budget of bytes among layers, or the smallest model within a loss; the record's `allocation`.

    loss: the loss whose sum counted. budget_bytes: of the whole model; None if the loss was given, `max_loss`.
    beside_bytes: of weights without a choice. chosen: (bytes of the whole model, predicted loss). curve: the same for
    other budgets, from the smallest choices to the largest. layers: the number of layers with a choice. seconds: time
    to measure and choose.
    """

    loss: str
    budget_bytes: float | None
    beside_bytes: float | None
    chosen: tuple[float, ...]
    curve: tuple[tuple[float, ...], ...]
    layers: int | None
    seconds: float | None
    max_loss: float | None = None


@dataclass(frozen=True)
class DropRecord:
    """A part of a block that was dropped or made narrower, or a candidate; a row of the record's `drops`.

    kind: "attention", "mlp" or "block"; "units", "heads" or "experts" of a part that lost some of these. block: its
    number in the original model. importance: at the last measurement, by `metric`, as a mean over the calibration
    tokens: 1 - cosine of the residual stream before and after ("cosine", "block_influence"; None in older records), or
    what the predictions lose without it, KL in nats per token ("output"); of units and the like the share of their
    importance that was lost. order: 1 for the part that was dropped first; None: it stays. parameters: the number of
    parameters that were removed. left, of: the numbers of units, heads or experts that stayed and that there were.
    """

    name: str
    kind: str
    block: int | None
    importance: float | None
    order: int | None = None
    parameters: int | None = 0
    left: int | None = None
    of: int | None = None
    metric: str | None = None


@dataclass(frozen=True)
class DepthRow:
    """The work of one block of the original model; a row of the record's `depth`. Means over the same tokens.

    attention, mlp: the length of what this part adds to the residual stream, relative to the length of the stream
        before it; None if the block has no such part. attention_cosine, mlp_cosine: of both.
    turned: 1 - cosine between the stream before and after the block, the score of `layer_drop`.
    later: if the block is skipped, the largest relative change, ||change|| / ||contribution||, of what a later block
        adds; None for the last block.
    output: KL of the predictions without the block from those of the whole model, nats per token.
    lens, lens_agreement: of the predictions that the final norm and the head make of the stream behind this block
        (the logit lens): KL of them from those of the whole model, and the share of tokens with the same likeliest one.
    """

    block: int | None
    attention: float | None
    attention_cosine: float | None
    mlp: float | None
    mlp_cosine: float | None
    turned: float | None
    later: float | None
    output: float | None
    lens: float | None
    lens_agreement: float | None


@dataclass(frozen=True)
class RecoveryPoint:
    """A score of a model during its recovery.

    step, tokens, seconds: updates, trained tokens and time of training so far. loss: mean of the updates since the last
    score. divergence: KL of the held-out windows, nats per token, of the teacher's likeliest tokens.
    """

    step: int
    tokens: int
    seconds: float
    loss: float | None
    divergence: float


@dataclass(frozen=True)
class RecoveryRecord:
    """The recovery of a compressed model by training; a row of the record's `recoveries`.

    method: as in the recipe. windows, held_out: number of windows of text that were there, and of those not trained on.
    learned: the number of values that learn. teacher_seconds: time of the original model's predictions. curve: the
    first score is that before training. kept: the update whose values the model has. ended: why training ended. moved:
    by weight, ||change|| / ||weight||. fixed: the number of compressed linears of which nothing learns.
    """

    method: str
    windows: int | None
    held_out: int | None
    learned: int | None
    teacher_seconds: float | None
    curve: tuple[RecoveryPoint, ...]
    kept: int | None
    ended: str
    moved: dict[str, float] = field(default_factory=dict)
    fixed: int | None = 0


@dataclass(frozen=True)
class Magnitudes:
    """Magnitudes of channels: the largest, the 99th percentile and the median; kurtosis: of inputs, the mean over
    tokens of the kurtosis of a token's values."""

    max: float | None
    p99: float | None
    median: float | None
    kurtosis: float | None = None

    @property
    def outlier(self) -> float:
        """The largest channel relative to the typical one."""
        return (self.max or 0.0) / max(self.median or 0.0, 1e-30)


@dataclass(frozen=True)
class Channels:
    """The magnitudes themselves, channel by channel."""

    x_before: tuple[float, ...]
    x_after: tuple[float, ...]
    w_before: tuple[float, ...]
    w_after: tuple[float, ...]


@dataclass(frozen=True)
class FoldRecord:
    """Scales that were moved from a producer (a norm, or a linear) into the linears that read it, or a rotation of the
    input of linears; a row of the record's `folds`.

    kind: "norm", "linear", "keys", "rotation of the stream", "rotation of heads", "online rotation" or "online map".
    alpha: strength of the migration, None if all scales stayed 1, and for rotations.
    x_*, w_*: of the largest magnitudes, channel by channel, of the consumers' input over the calibration tokens and of
        their weights' columns. For rotations the inputs are those of the first calibration window. For keys x_* are
        the lengths of the keys' pairs, and w_* the lengths of the rows of the module that gives the queries.
    error_*: ||WX - Q(W)Q(X)||² / ||WX||² over all consumers, rounded to nearest on the grid that the method aims at,
        without and with the scales; None if it was not measured.
    difference: ||y - y'|| / ||y|| of the block's output y without quantisation.
    channels: for a few.
    """

    name: str
    kind: str
    consumers: tuple[str, ...]
    alpha: float | None
    x_before: Magnitudes
    x_after: Magnitudes
    w_before: Magnitudes
    w_after: Magnitudes
    error_before: float | None
    error_after: float | None
    difference: float | None
    seconds: float | None
    notes: tuple[str, ...] = ()
    channels: Channels | None = None


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
