"""Checks that weights, activations and errors are finite: a NaN in one of them would reach every later result."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from compress.walk.parallel.places import Place


class NotFinite(ValueError):
    """A weight, an activation or an error that is NaN or infinite; the message names it."""


@contextmanager
def naming(method: str) -> Iterator[None]:
    """While the context lasts, the message of a NotFinite begins with the name of this method."""
    try:
        yield
    except NotFinite as error:
        raise NotFinite(f"{method}: {error}") from None


def is_finite(x: Tensor) -> bool:
    """Whether no value is NaN or infinite; the sum is tested first, which takes a tenth of the time. A tensor on the
    meta device has no values."""
    if x.is_meta or not x.is_floating_point():
        return True
    return bool(x.sum(dtype=torch.float32).isfinite()) or bool(x.float().isfinite().all())


def check_activations(x: Tensor, what: str, place: Place) -> None:
    """Raise NotFinite, with the numbers of the calibration windows, if an activation of a micro-batch is not finite.

    Args:
        x: [windows, tokens, channels], or [tokens, channels] if the tokens' windows are not known; anything but a
            tensor is not checked.
        what: the name of the activation in the message.
    """
    if not isinstance(x, Tensor) or is_finite(x := x.detach()):
        return
    windows = range(place.window, place.window + place.windows)
    if x.dim() == 3 and len(x) == place.windows:
        broken = (~torch.isfinite(x)).flatten(1).any(1).tolist()
        windows = [window for window, bad in zip(windows, broken, strict=True) if bad]
    named = f" for `batches[{', '.join(map(str, windows))}]`" if len(windows) else ""
    raise NotFinite(
        f"{what} holds NaN or infinity{named}; check these tokens, the model's weights, and its `dtype` (float16 "
        "overflows where bfloat16 does not)"
    )


def check_error(name: str, error: float) -> None:
    """Raise NotFinite if the error of a weight's replacement is NaN or infinite, because the replacement is."""
    if not math.isfinite(error):
        raise NotFinite(f"the error of {name} is {error}: what would be stored in its place holds NaN or infinity")


def check_statistics(name: str, values: Mapping[str, Tensor]) -> None:
    """Raise NotFinite if a statistic of finite inputs is not finite: its sum has overflowed."""
    for statistic, value in values.items():
        if not is_finite(value):
            raise NotFinite(f"the statistic {statistic!r} of the inputs of {name} overflows float32; check its inputs")
