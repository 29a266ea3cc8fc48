"""The verdict of a run in a few plain sentences, from the numbers of its record."""

from typing import Any

from reports.parts.table import percent


def verdict(record: dict[str, Any]) -> list[str]:
    """Sentences on size, accuracy and speed. Each says what was measured, and against what."""
    base, small = record["scores"]["baseline"], record["scores"]["compressed"]
    rtn, unsmoothed = record["scores"].get("rtn", {}), record["scores"].get("unsmoothed", {})
    rtn_search = record["scores"].get("rtn_search", {})
    said = []
    if "stored_bytes" in base and "stored_bytes" in small:
        ratio = base["stored_bytes"] / small["stored_bytes"]
        said.append(
            f"The model is stored in {small['stored_bytes'] / 1e6:,.0f} MB instead of "
            f"{base['stored_bytes'] / 1e6:,.0f} MB "
            f"in 16 bits ({ratio:.2f}× smaller)."
        )
    for metric in (m for m in base if m.startswith("perplexity_") and not m.endswith("_stderr") and m in small):
        corpus = metric.removeprefix("perplexity_")
        before, after = base[metric], small[metric]
        text = f"Its perplexity on {corpus} goes from {before:.2f} to {after:.2f} ({percent(after / before - 1)}"
        if metric in rtn:
            text += f"; rounding to nearest, absmax scales, gives {rtn[metric]:.2f}"
        if metric in rtn_search:
            text += f", with searched scales {rtn_search[metric]:.2f}"
        if metric in unsmoothed:
            text += (
                f"; without smoothing it would be {unsmoothed[metric]:.2f}, {percent(unsmoothed[metric] / before - 1)}"
            )
        said.append(text + ").")
        paired = record.get("difference", {}).get("compressed", {})
        delta, stderr = paired.get(f"nll_{corpus}"), paired.get(f"nll_{corpus}_stderr")
        if stderr and abs(delta) < 2 * stderr:
            said.append(f"At {record['texts'][corpus]['tokens']:,} tokens that difference is within the noise.")
    if "decode_tokens_per_s" in base and "decode_tokens_per_s" in small:
        said.append(_speed("decodes", small["decode_tokens_per_s"] / base["decode_tokens_per_s"]))
        said.append(_speed("reads a prompt", small["prefill_tokens_per_s"] / base["prefill_tokens_per_s"]))
    return said + [note if note.endswith((".", "!", "?")) else f"{note}." for note in record.get("notes", [])]


def _speed(does: str, ratio: float) -> str:
    if 0.97 <= ratio <= 1.03:
        return f"It {does} as fast as the strongest 16-bit baseline on this machine ({ratio:.2f}×)."
    if ratio > 1:
        return f"It {does} {ratio:.2f}× as fast as the strongest 16-bit baseline on this machine."
    return f"It {does} more slowly than the strongest 16-bit baseline on this machine ({ratio:.2f}×)."
