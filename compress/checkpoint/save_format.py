"""The interface of a checkpoint format: what it can hold, how it is written, and how the written files are verified."""

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from torch import nn
from transformers import PreTrainedTokenizerBase

from compress.checkpoint.shards import SHARD_BYTES
from compress.method import METHODS
from compress.result import Result
from eval.record.compression import DropRecord, LayerRecord
from eval.record.reading import row
from kernels.support.errors import first_line

INFO_FILE = "compression.json"  # the steps that made the model
VERIFICATION = "verification.json"  # the result of loading it again


@dataclass(frozen=True)
class CheckpointInfo:
    """The record of how a compressed model was made, as JSON: the content of `compression.json` in every checkpoint.

    Attributes:
        recipe: [{method, knobs}], each as it acts among the others, including methods of the cache.
        model: identity of the model before compression: name, weights_sha256, parameters.
        calibration: corpus, samples, seqlen, seed, sha256; None where no text was needed.
        layers, drops: one record per weight, and per part of a block that could be dropped (`eval.record.compression`).
        kept: every other weight: {name, shape, bytes, reason}.
    """

    recipe: list[dict[str, Any]]
    model: dict[str, Any]
    calibration: dict[str, Any] | None
    layers: list[dict[str, Any]] = field(default_factory=list)
    drops: list[dict[str, Any]] = field(default_factory=list)
    kept: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> "CheckpointInfo":
        """The content of a checkpoint's `compression.json`.

        Raises:
            ValueError: the folder has no such file, or it cannot be read.
        """
        path = folder / INFO_FILE
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            known = {field.name for field in fields(cls)}
            return cls(**{name: value for name, value in content.items() if name in known})
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{str(path)!r} does not say how the model was made: {first_line(error)}") from error

    @classmethod
    def of(cls, result: Result) -> "CheckpointInfo":
        return cls(
            recipe=[{"method": m.name, "knobs": m.values()} for m in result.recipe],
            model=result.identity,
            calibration=result.calibration,
            layers=[asdict(record) for record in result.layers],
            drops=[asdict(record) for record in result.drops],
            kept=result.kept,
        )

    def result(self, model: nn.Module) -> Result:
        """The result of the compression, with its model as it was loaded again; methods that are not in METHODS are
        left out."""
        steps = [METHODS[step["method"]](**step["knobs"]) for step in self.recipe if step["method"] in METHODS]
        return Result(
            model=model,
            recipe=steps,
            asked=steps,
            layers=list(row(tuple[LayerRecord, ...], self.layers)),
            drops=list(row(tuple[DropRecord, ...], self.drops)),
            kept=self.kept,
            identity=self.model,
            calibration=self.calibration,
            seconds=0.0,
            kernels={},
        )


@dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint: the model in memory, its tokenizer if there is one, and how it was made.

    shard_bytes: size above which weights are written into a further file.
    """

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase | None
    info: CheckpointInfo
    shard_bytes: int = SHARD_BYTES


@dataclass(frozen=True)
class Verification:
    """The result of loading a checkpoint again.

    Attributes:
        reader: the library that loaded it, with its version.
        largest_difference: between the logits of the model in memory and those of the loaded one.
        agreement: how near the two models are, with the tolerance that "the same logits" means; "" for a difference of
            0, or in checkpoints from before 27 November 2026, whose first remark says it.
        remarks: remarks for users, for example that KV policies are not part of this format.
    """

    reader: str
    largest_difference: float
    remarks: tuple[str, ...] = ()
    agreement: str = ""

    def __str__(self) -> str:
        """The agreement in words."""
        if self.agreement:
            return self.agreement
        if self.largest_difference == 0:
            return "every logit is the same, to the last bit"
        return f"the largest difference of a logit is {self.largest_difference:.3g}"

    @classmethod
    def read(cls, folder: Path) -> "Verification":
        """The verification that `write_checkpoint` wrote beside the checkpoint of a folder."""
        content = json.loads((folder / VERIFICATION).read_text(encoding="utf-8"))
        agreement = content.get("agreement", "")
        return cls(content["reader"], content["largest_difference"], tuple(content["remarks"]), agreement)

    def write(self, folder: Path) -> None:
        (folder / VERIFICATION).write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")


class SaveFormat:
    """A way to write a compressed model. One subclass a file; `compress.checkpoint.save.SAVE_FORMATS` lists them.

    Attributes:
        name: the value of `save_format`.
        readers: the libraries that load it, for messages and model cards: "transformers, vLLM".
        snippet: code that loads it, for the model card: Markdown, a fenced block of about three lines for each reader,
            in which PATH stands for the folder.
        library: the model's library for hubs, in the front matter of the card.
        holds_caches: whether checkpoints hold the KV policies of a recipe. If not, the caller of `write` says so in the
            card and in a warning; a format need not.
        holds_rotations: whether it can hold rotations that act while the model runs.
        takes_disk: whether it can write models whose weights lie on disk, block by block.
    """

    name: ClassVar[str]
    readers: ClassVar[str]
    snippet: ClassVar[str] = ""
    library: ClassVar[str] = "transformers"
    holds_caches: ClassVar[bool] = False
    holds_rotations: ClassVar[bool] = False
    takes_disk: ClassVar[bool] = False

    def how_to_load(self, model: nn.Module) -> str:
        """The snippet for the card of this model."""
        return self.snippet

    def read_by(self, model: nn.Module) -> str:
        """The libraries that load this model, for its card: `readers`, or some of them."""
        return self.readers

    def problem(self, linear: dict[str, Any]) -> str:
        """The reason why the format cannot hold a linear in its stored form, "" if it can.

        Args:
            linear: as `CompressedLinear.spec()` describes it: {"parts": [part.spec(), ...], "bias": bool, "transform":
                None or the transform of its input}. In checks before any work, shapes and parts are those that the
                recipe will give.
        """
        raise NotImplementedError

    def grows(self, linear: dict[str, Any], grids: Collection[str]) -> bool:
        """Whether the files hold a linear in more bytes than the workbench, for certain.

        Args:
            linear: as for `problem`. grids: to which the recipe rounds, by their names.
        """
        return False

    def problem_of_model(self, model: nn.Module, linears: Mapping[str, dict[str, Any]]) -> str:
        """The reason why the format cannot hold a model of this class, configuration or dropped parts, or linears that
        it could hold in another model; "" if it can.

        Args:
            model: no weights are read, so that a model on the meta device is enough.
            linears: by name, what `problem` is given of each.
        """
        return ""

    def problem_together(self, model: nn.Module, linears: Mapping[str, dict[str, Any]]) -> str:
        """The reason why the readers of the format cannot build this model with these linears stored as they are; ""
        if they can. Asked only if there is no other problem.

        Args:
            linears: by name, as for `problem`.
        """
        return ""

    def write(self, checkpoint: Checkpoint, folder: Path) -> None:
        """Write weights, configuration and tokenizer into an empty folder; the caller adds the other files."""
        raise NotImplementedError

    def verify(self, checkpoint: Checkpoint, folder: Path) -> Verification:
        """Load the written files with the reader of this format, and compare.

        Raises:
            RuntimeError: the files do not give the same model; the message names the first tensor that differs.
        """
        raise NotImplementedError
