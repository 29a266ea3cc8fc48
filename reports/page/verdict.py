"""The verdict of a run in a few plain sentences, from the numbers of its record."""

import math
from collections.abc import Mapping

from eval.record.metrics import change, fmt, percent
from eval.record.noise import Load
from eval.record.rows import RunRecord
from reports.parts.plots import finite
from reports.parts.text import listed


def verdict(record: RunRecord) -> list[str]:
    """Sentences on size, accuracy and speed. Each names the measurement and its reference."""
    said = []
    size = record.ratio("stored_bytes")
    if finite(size):
        before, after = (fmt(record.score(name, "stored_bytes"), ",.0f", 1e-6) for name in ("baseline", "compressed"))
        said.append(f"The model is stored in {after} MB instead of {before} MB in 16 bits ({1 / size:.2f}× smaller).")
    for corpus in record.corpora:
        said += _perplexity(record, corpus)
    decodes = "decodes" if record.by_generate else "takes a decoding step"
    does = {"decode_tokens_per_s": decodes, "prefill_tokens_per_s": "reads a prompt"}
    ratios = {metric: ratio for metric in does if (ratio := record.ratio(metric)) is not None}
    if record.disturbed:
        read = " and ".join(f"{does[metric]} {ratio:.2f}× as fast" for metric, ratio in ratios.items())
        said.append(f"Speeds are noisy and not compared: {record.disturbed}{f' (it {read})' if read else ''}.")
    else:
        said += [_speed(does[metric], ratio, record.counts(metric)) for metric, ratio in ratios.items()]
    return said + [note if note.endswith((".", "!", "?")) else f"{note}." for note in record.notes]


def timing_note(spread: Mapping[str, float], load: Load | None) -> str:
    """A sentence on the noise of the speeds of a record, and one on the load of the machine if it is known."""
    if not spread:
        return (
            "No model was timed twice in this record: two speeds are told apart where the quartiles of their rounds do "
            "not overlap."
        )
    shares = listed([f"{phase} {fmt(share, '.1f', 100)} %" for phase, share in spread.items()])
    said = f"One model was timed twice in the same turns; chance alone makes differences of up to {shares}, which "
    said += "therefore do not count."
    if load is None or load.others is None:
        return said
    said += f" Other processes took {fmt(load.others, '.1f', 100)} % of the processor meanwhile"
    said += f", other virtual machines {fmt(load.stolen, '.1f', 100)} %" if load.stolen else ""
    return said + (f"; clock {fmt(load.mhz_low, ',.0f')} to {fmt(load.mhz_high, ',.0f')} MHz." if load.mhz_low else ".")


def _perplexity(record: RunRecord, corpus: str) -> list[str]:
    models = ("baseline", "compressed", "rtn", "rtn_search", "unsmoothed")
    before, after, rtn, searched, unsmoothed = (record.score(name, f"perplexity_{corpus}") for name in models)
    if before is None or after is None:
        return []
    if not math.isfinite(after):
        return [f"Its perplexity on {corpus} is not finite (the baseline's: {fmt(before, ',.2f')}): it has diverged."]
    text = f"Its perplexity on {corpus} goes from {fmt(before, ',.2f')} to {fmt(after, ',.2f')} "
    text += f"({percent(change(after, before))}"
    if rtn is not None:
        text += f"; rounding to nearest, absmax scales, gives {fmt(rtn, ',.2f')}"
    if searched is not None:
        text += f", with searched scales {fmt(searched, ',.2f')}"
    if unsmoothed is not None:
        left_out = {step.method for step in record.recipe} - {step.method for step in record.recipes["unsmoothed"]}
        what = " and ".join(sorted(left_out))
        text += f"; without {what} it would be {fmt(unsmoothed, ',.2f')}, {percent(change(unsmoothed, before))}"
    said = [f"{text})."]
    paired = record.difference.get("compressed", {})
    if paired.get(f"nll_{corpus}_stderr") and corpus in record.texts and not record.counts(f"perplexity_{corpus}"):
        tokens = fmt(record.texts[corpus].tokens, ",")
        said.append(f"At {tokens} tokens that difference is within the noise.")
    return said


def _speed(does: str, ratio: float, counts: bool) -> str:
    if not counts:
        said = f"It {does} as fast as the strongest 16-bit baseline on this machine, as far as can be told"
        return f"{said} ({ratio:.2f}×, within the noise)."
    if ratio > 1:
        return f"It {does} {fmt(ratio, unit='×')} as fast as the strongest 16-bit baseline on this machine."
    return f"It {does} more slowly than the strongest 16-bit baseline on this machine ({fmt(ratio, unit='×')})."
