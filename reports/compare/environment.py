"""Differences between the machines and programs of several runs."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from reports.compare.outcome import RunOutcome
from reports.compare.variants import machine
from reports.parts.text import clean, listed, plural, public

_KEYS = ("commit", "dirty", "versions", "hardware", "threads", "device", "dtype", "deploy_dtype", "flags")


class EnvironmentDifference(NamedTuple):
    """A key of the provenance with its values, the most frequent first, and the runs that have each."""

    key: str
    found: list[tuple[str, str]]


def differences(outcomes: Sequence[RunOutcome], most: int = 6) -> list[EnvironmentDifference]:
    """The keys of the provenance that differ between runs.

    Args:
        most: number of values that are shown for a key; a last entry then gives the number of further ones.
    """
    runs = {run.key: dict(_flat(_provenance(run))) for run in outcomes if run.record}
    rows = []
    for key in sorted({key for own in runs.values() for key in own}):
        values: dict[str, list[str]] = {}
        for run, own in runs.items():
            values.setdefault(own.get(key, "not recorded"), []).append(clean(run, 60))
        if len(values) > 1:
            by_count = sorted(values.items(), key=lambda pair: -len(pair[1]))
            shown = [(value, f"{plural(len(names), 'run')}: {listed(names, 3)}") for value, names in by_count[:most]]
            shown += [(f"{len(by_count) - most} more values", "")] if len(by_count) > most else []
            rows.append(EnvironmentDifference(clean(key, 80), shown))
    return rows


def machines(outcomes: Sequence[RunOutcome]) -> dict[str, list[str]]:
    """The machines on which speeds were measured, each with the keys of its runs."""
    found: dict[str, list[str]] = {}
    for run in outcomes:
        if any("tokens_per_s" in metric for own in run.measured.scores.values() for metric in own):
            found.setdefault(machine(run.measured), []).append(clean(run.key, 60))
    return found


def _provenance(run: RunOutcome) -> dict[str, object]:
    at = run.provenance or (run.record.get("provenance") if isinstance(run.record, Mapping) else None) or {}
    found = {key: at[key] for key in _KEYS if key in at}
    if isinstance(found.get("hardware"), Mapping) and run.measured.provenance.hardware.memory_bytes:
        size = f"{run.measured.provenance.hardware.memory_bytes / 2**30:.0f} GiB"
        found["hardware"] = {**found["hardware"], "memory_bytes": size}
    return found


def _flat(value: object, name: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield from _flat(one, f"{name}.{key}" if name else str(key))
    elif name == "commit":
        yield name, clean(value or "none")[:12]
    else:
        yield name, public(", ".join(map(str, value)) if isinstance(value, list) else value, 160) or "none"
