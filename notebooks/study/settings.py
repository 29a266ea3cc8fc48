"""Values of the parameters that several notebooks share, checked when a run starts.

The knobs of methods are checked by the cells tagged `check`. The values checked here are used late in a notebook, so
that a mistake would otherwise show only after minutes of work.
"""

from collections.abc import Sequence
from typing import Any

# The smallest value of a number, or of each number in a list.
_AT_LEAST = {"samples": 1, "seqlen": 1, "window": 2, "max_windows": 1, "task_batch": 1, "speed_rounds": 0,
             "speed_new_tokens": 1, "lengths": 1, "speed_contexts": 1, "speed_batches": 1, "write_tokens": 0,
             "speed_prompts": 1, "contexts": 1, "scored_tokens": 1, "new_tokens": 1}  # fmt: skip


def check_settings(values: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Check the values that need no model and no text.

    Args:
        values, defaults: of the notebook's parameters, by name.

    Raises:
        ValueError: a later step of the notebook would refuse a value.
    """
    for name, least in _AT_LEAST.items():
        if name in values and any(number < least for number in _numbers(values[name])):
            what = f"hold numbers of {least} or more" if isinstance(values[name], list) else f"be {least} or more"
            raise ValueError(f"`{name}` (={values[name]!r}) must {what}; its default is {defaults[name]!r}")
    if values.get("speed_contexts") and values.get("speed_rounds") == 0:  # elsewhere 0 is allowed
        raise ValueError("`speed_rounds` (=0) must be 1 or more; an empty `speed_contexts` leaves timing out")
    if any(number <= 0 for number in _numbers(values.get("temperatures"))):
        raise ValueError(f"`temperatures` (={values['temperatures']!r}) must hold positive numbers, such as 0.7")
    if not all(0 <= number <= 1 for number in _numbers(values.get("depths"))):
        raise ValueError(f"`depths` (={values['depths']!r}) must hold numbers from 0 (first) to 1 (last)")
    if values.get("dtype"):
        from compress.inputs.model import DTYPES

        _among("dtype", values["dtype"], list(DTYPES))
    if "bos" in values:
        from eval.text.windows import BOS

        _among("bos", values["bos"], BOS)
    if values.get("typos"):
        from eval.text.typos import check_typos

        check_typos(values["typos"])
    if values.get("max_memory"):
        from kernels.support.units import memory_limit

        memory_limit(values["max_memory"])
    if "weights" in values:  # the place of the weights; in other notebooks, their stored form
        from compress.inputs.model import WEIGHTS

        if defaults["weights"] in WEIGHTS:
            _among("weights", values["weights"], WEIGHTS)
    if "visibilities" in values:  # the notebook asks questions about long contexts
        from eval.contexts.haystack import TASKS
        from eval.contexts.long_context import VISIBILITIES

        for name, known in (("visibilities", VISIBILITIES), ("tasks", list(TASKS))):
            for value in values[name] or [""]:
                _among(name, value, known)


def is_timed(values: dict[str, Any]) -> bool:
    """Whether a run with these parameters times something; of a notebook without such parameters it is assumed."""
    named = [name for name in ("speed_rounds", "speed_contexts") if name in values]
    if not named or any(values.get(name) for name in ("speed_batches", "efficiency")):
        return True
    return all(values[name] for name in named)


def _numbers(value: Any) -> list[float]:
    given = value if isinstance(value, list) else [value]
    return [number for number in given if isinstance(number, int | float)]


def _among(name: str, value: Any, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"`{name}` (={value!r}) must be one of {', '.join(known)}")
