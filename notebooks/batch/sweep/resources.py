"""The resources that a run needs: its number of GPUs, and the options of SLURM. They are checked before anything is
started."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, get_type_hints

from notebooks.study.parameters import parse_value, short_repr

MOST_GPUS = 64  # of one run: more are a mistake


@dataclass(frozen=True, kw_only=True)
class SlurmOptions:
    """The resources that every run of a sweep requests from SLURM; GPUs are set by `gpus`.

    Args:
        partition, account, qos, constraint: as in `sbatch`; the cluster's defaults if empty.
        time_min: minutes after which SLURM ends a run.
        cpus: cores of a run.
        memory_gb: of a run; the cluster's default if None.
        exclusive: a run uses its node alone, which valid timings need.

    Raises:
        ValueError: a value of the wrong type, or out of range.
    """

    partition: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    time_min: int = 240
    cpus: int = 8
    memory_gb: float | None = None
    exclusive: bool = False

    def __post_init__(self) -> None:
        for name in ("partition", "account", "qos", "constraint"):
            value = getattr(self, name)
            if not isinstance(value, str) or value != value.strip() or "\n" in value:
                raise ValueError(f"`{name}` (={short_repr(value)}) of `slurm` must be a name of the cluster, as text")
        for name in ("time_min", "cpus"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(
                    f"`{name}` (={short_repr(value)}) of `slurm` must be a positive whole number, such as 60"
                )
        memory = self.memory_gb
        if memory is not None and (type(memory) not in (int, float) or not memory > 0):
            raise ValueError(f"`memory_gb` (={short_repr(memory)}) of `slurm` must be gigabytes above 0, such as 64")
        if type(self.exclusive) is not bool:
            raise ValueError(f"`exclusive` (={short_repr(self.exclusive)}) of `slurm` must be true or false")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "SlurmOptions":
        """The options of a mapping.

        Raises:
            ValueError: a key is none of these options, or a value is not valid.
        """
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                raise ValueError(f"`slurm` has no option `{name}`; it has {', '.join(known)}")
        return cls(**given)

    def changed_by(self, texts: Sequence[str]) -> "SlurmOptions":
        """These options with some replaced, each given as NAME=VALUE, as on a command line.

        Raises:
            ValueError: as in `of`; or a text does not have this form.
        """
        given = {}
        for name, equals, text in (text.partition("=") for text in texts):
            if not equals:
                raise ValueError(f"`--slurm` (={short_repr(name)}) must be NAME=VALUE, such as partition=gpu")
            kind = get_type_hints(SlurmOptions).get(name, str)
            given[name] = text.lower() == "true" if text.lower() in ("true", "false") else parse_value(text, kind)
        return SlurmOptions.of(asdict(self) | given)


def check_gpus(gpus: int | None, values: Mapping[str, Any], where: str) -> None:
    """Raise ValueError if a run of these parameters cannot use this number of GPUs.

    Args:
        where: the place where the number was given.
    """
    if gpus is None:
        return
    if type(gpus) is not int or not 1 <= gpus <= MOST_GPUS:
        raise ValueError(f"`gpus` (={short_repr(gpus)}) of {where} must be a whole number from 1 to {MOST_GPUS}")
    device = str(values.get("device", "cpu"))
    if not (device == "auto" or device.startswith("cuda")):
        raise ValueError(
            f"`gpus` (={gpus}) of {where} is for runs on a GPU; `device` (={short_repr(device)}) of this one must "
            "be cuda or auto"
        )
    if gpus > 1 and ":" in device:
        raise ValueError(f"`gpus` (={gpus}) of {where}: `device` (={short_repr(device)}) names one GPU; cuda names any")
