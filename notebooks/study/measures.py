"""Optional measurements of a notebook beside text and speed, chosen by its parameters: tasks, writings, grids of speed,
efficiency, cost, lossless speed by guesses.

A measurement that was not chosen is an `Unasked`, which a notebook shows and which is not part of the record.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from html import escape
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from eval.evaluate import Scores
from eval.record.speed import SpeedGrid
from eval.speed.cost import cost_model, speed_rows
from eval.speed.device_lock import undisturbed
from eval.speed.efficiency import check_efficiency, measure_efficiency
from eval.speed.layercast import layercast
from eval.speed.lossless import check_lossless, measure_lossless
from eval.speed.speed_grid import check_speed_grid, measure_speed_grid
from eval.speed.work import work
from eval.tasks.tasks import answer_tasks, check_tasks
from eval.writing.generation_sweep import check_generations, compare_generations
from kernels.harness import roofline
from notebooks.study.run import Run

_EXACTLY = "bfloat16 weights, float32 arithmetic (LayerCast)"
GRID_TOKENS = 16  # tokens decoded in each cell of the grid of speeds


class Measured(Protocol):
    """The results of a measurement: numbers for the scores, and the rest for the record."""

    @property
    def metrics(self) -> dict[str, dict[str, float]]: ...

    def found(self) -> Any: ...


@dataclass(frozen=True)
class Unasked:
    """A measurement that was not chosen, and the parameter that chooses it."""

    parameter: str

    @property
    def metrics(self) -> dict[str, dict[str, float]]:
        return {}

    def found(self) -> None:
        return None

    def _repr_html_(self) -> str:
        return f"<p>Not asked for: <code>{escape(self.parameter)}</code> does.</p>"


@dataclass(frozen=True)
class Asked:
    """The measurements that the parameters of a notebook choose; the notebook explains the parameters."""

    run: Run
    tasks: Sequence[str] = ()
    task_path: str = ""
    task_limit: int = 0
    few_shot: int = -1
    task_batch: int = 1
    temperatures: Sequence[float] = ()
    write_tokens: int = 48
    speed_batches: Sequence[int] = ()
    speed_prompts: Sequence[int] = (512,)
    speed_rounds: int = 5
    efficiency: bool = False
    lossless: bool = False
    exact: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        """Check what can be checked without a model.

        Raises:
            ValueError: a task cannot be answered, or a number is not valid.
        """
        if self.task_limit < 0:
            raise ValueError(f"`task_limit` (={self.task_limit}) must be a number of questions; 0 asks all of them")
        if self.few_shot < -1:
            raise ValueError(f"`few_shot` (={self.few_shot}) must be a number of examples; -1 leaves it to the task")
        if self.tasks:
            check_tasks(self.tasks, **self._how)

    @property
    def _how(self) -> dict[str, Any]:
        """The settings of tasks, by their names in `eval.tasks.tasks`."""
        return {
            "task_path": self.task_path,
            "limit": self.task_limit or None,
            "batch_size": self.task_batch,
            "num_fewshot": None if self.few_shot < 0 else self.few_shot,
        }

    @property
    def _writing(self) -> dict[str, Any]:
        return {"temperatures": self.temperatures, "new_tokens": self.write_tokens}

    def check(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, drafts: Collection[str] = ()) -> None:
        """Check the rest against the model and the names of its drafts; quick.

        Raises:
            ValueError: a number is not valid for this model, or its work cannot be counted and is asked for.
        """
        if self.temperatures:
            check_generations(model, tokenizer, **self._writing)
        if self.speed_batches:
            try:
                check_speed_grid(model, self.speed_batches, self.speed_prompts, GRID_TOKENS, rounds=self.speed_rounds)
            except ValueError as error:  # with the names of the notebook's parameters
                raise ValueError(re.sub(r"`(batches|prompts|rounds)`", r"`speed_\1`", str(error))) from error
        if self.efficiency:
            check_efficiency(model)
        if counted := "efficiency" if self.efficiency else "speed_batches" if self.speed_batches else "":
            try:
                work(model)
            except ValueError as error:
                raise ValueError(f"`{counted}` compares times with the work of a step: {error}") from error
        if self.lossless:
            try:
                check_lossless(
                    model, tokenizer, guess_tokens=self.write_tokens, speed_rounds=self.speed_rounds, drafts=drafts
                )
            except ValueError as error:  # likewise
                raise ValueError(str(error).replace("`guess_tokens`", "`write_tokens`")) from error

    def answers(self, models: Mapping[str, nn.Module], tokenizer: PreTrainedTokenizerBase) -> Measured:
        """Tasks, answered by every model; all samples go into the run's folder.

        Answers are kept beside the runs by the hash of the model's weights: a sweep computes its baseline's once.
        """
        if not self.tasks:
            return Unasked("tasks")
        kept = self.run.folder.parent / ".answers"
        found = answer_tasks(self._exactly(models), tokenizer, self.tasks, seed=self.seed, cache_path=kept, **self._how)
        if self.exact:
            found.settings = replace(found.settings, dtype=_EXACTLY)
        found.save(self.run.folder)
        return found

    def writings(self, models: Mapping[str, nn.Module], tokenizer: PreTrainedTokenizerBase) -> Measured:
        """The texts that every model writes, greedily and at each temperature; all are kept in the run's folder."""
        if not self.temperatures:
            return Unasked("temperatures")
        found = compare_generations(self._exactly(models), tokenizer, **self._writing)
        if self.exact:
            found.settings = replace(found.settings, dtype=dict.fromkeys(models, _EXACTLY))
        found.save(self.run.folder)
        return found

    def speeds(self, models: Mapping[str, nn.Module]) -> Measured:
        """Speed by batch and prompt."""
        if not self.speed_batches:
            return Unasked("speed_batches")
        return measure_speed_grid(
            models,
            batches=self.speed_batches,
            prompts=self.speed_prompts,
            new_tokens=GRID_TOKENS,
            rounds=self.speed_rounds,
        )

    def uses(self, models: Mapping[str, nn.Module]) -> Measured:
        """EfficientLLM's six metrics."""
        if not self.efficiency:
            return Unasked("efficiency")
        return measure_efficiency(models, ceilings=_ceilings(device_of(models)))

    def guesses(self, models: Mapping[str, nn.Module], tokenizer: PreTrainedTokenizerBase) -> Measured:
        """The models as drafts of the baseline, and the speed of its texts by guesses."""
        if not self.lossless:
            return Unasked("lossless")
        return measure_lossless(models, tokenizer, guess_tokens=self.write_tokens, speed_rounds=self.speed_rounds)

    def costs(self, models: Mapping[str, nn.Module], scores: Scores, speeds: Measured) -> Measured:
        """The costs of a decoded token that the machine's ceilings predict, beside the measured ones."""
        if not self.efficiency and not isinstance(speeds, SpeedGrid):
            return Unasked("efficiency")
        rows = [*speed_rows(scores.speed), *(speeds.rows if isinstance(speeds, SpeedGrid) else [])]
        return cost_model(
            models,
            rows,
            _ceilings(device_of(models)),
            "measured in this run by kernels.harness.roofline, on main memory and dense products",
        )

    def _exactly(self, models: Mapping[str, nn.Module]) -> Mapping[str, nn.Module]:
        return {name: layercast(model) for name, model in models.items()} if self.exact else models


def device_of(models: Mapping[str, nn.Module]) -> torch.device:
    return next(next(iter(models.values())).parameters()).device


@cache
def _ceilings(device: torch.device) -> roofline.Ceilings:
    """The device's ceilings, measured once."""
    with undisturbed(device):
        return roofline.measure(device)
