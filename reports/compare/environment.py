"""What differed between the machines and programs of several runs."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from reports.compare.outcome import RunOutcome
from reports.compare.variants import machine
from reports.parts.text import clean, listed, plural

_KEYS = ("commit", "dirty", "versions", "hardware", "threads", "device", "dtype", "deploy_dtype", "flags")


def differences(outcomes: Sequence[RunOutcome], most: int = 6) -> list[dict[str, Any]]:
    """Rows of only those keys of the provenance that differ: key, and values [{value, runs}], the most frequent first.

    Args:
        most: values of a key that are told; the last then says how many more there are.
    """
    runs = {run.key: dict(_flat(_provenance(run.record))) for run in outcomes if run.record}
    rows = []
    for key in sorted({key for own in runs.values() for key in own}):
        values: dict[str, list[str]] = {}
        for run, own in runs.items():
            values.setdefault(own.get(key, "not told"), []).append(clean(run, 60))
        if len(values) > 1:
            found = sorted(values.items(), key=lambda pair: -len(pair[1]))
            told = [
                {"value": value, "runs": f"{plural(len(names), 'run')}: {listed(names, 3)}"}
                for value, names in found[:most]
            ]
            told += [{"value": f"{len(found) - most} more values", "runs": ""}] if len(found) > most else []
            rows.append({"key": clean(key, 80), "values": told})
    return rows


def machines(outcomes: Sequence[RunOutcome]) -> dict[str, list[str]]:
    """The machines on which speeds were measured, each with the keys of its runs."""
    found: dict[str, list[str]] = {}
    for run in outcomes:
        if run.record and _timed(run.record):
            found.setdefault(machine(run.record), []).append(clean(run.key, 60))
    return found


def _timed(record: dict[str, Any]) -> bool:
    scores = record.get("scores") or {}
    return any("tokens_per_s" in metric for own in scores.values() for metric in own)


def _provenance(record: dict[str, Any]) -> dict[str, Any]:
    at = record.get("provenance") or {}
    found = {key: at[key] for key in _KEYS if key in at}
    if isinstance(found.get("hardware"), Mapping) and isinstance(found["hardware"].get("memory_bytes"), int):
        hardware = dict(found["hardware"])
        found["hardware"] = hardware | {"memory_bytes": f"{hardware['memory_bytes'] / 2**30:.0f} GiB"}
    return found


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield from _flat(one, f"{name}.{key}" if name else str(key))
    elif name == "commit":
        yield name, clean(value or "none")[:12]
    else:
        yield name, clean(", ".join(map(str, value)) if isinstance(value, list) else value, 160) or "none"
