"""Bytes of the whole model against perplexity, KL, tasks and speed: recipes of the workbench, models of other tools.

    python seeds/bytes_and_loss.py --out bytes.json "gptq(bits=4, group_size=32)" \\
        "gptq(bits=4, group_size=32, grid=iq4_nl, scale_dtype=int6), rtn(bits=6, group_size=32, where=embedding)" \\
        --others runs/interop/smollm2-135m/gguf-peers/Q4_K_M-128.gguf --tasks piqa_local --limit 1000 \\
        --write reports/published/bytes-and-loss.md

Recipes are calibrated on C4, and their models are kept in `--keep` for later runs. `--others` are GGUF files or folders
with a dense float32 checkpoint and a `peer.json` (name, bytes, seconds), as seeds/peers makes them. Texts are scored in
float32 and tasks in bfloat16, with dequantised weights and by the same code for all; activations and caches are rounded
where a recipe says so. Bytes of a recipe are those of its
model cast to bfloat16. With `--speed-rounds`, recipes are timed in turns with the uncompressed model, and GGUF files by
llama-bench after them; other tools' folders are dense, and are not timed. The record is written after every few models
and continued where it is there already.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from scoring import BASELINE, ScoredRow, ScoringRecord, command, options, run, titled


def table(record: ScoringRecord) -> str:
    """Markdown, a row for each model: the baseline, then the others by their bytes."""
    texts = record.settings["texts"]
    tasks = list(dict.fromkeys(task for row in record.rows.values() for task in row.tasks))
    shown = [task.removesuffix("_local") for task in tasks]
    columns = ["model", "MB", *(x for text in map(titled, texts) for x in (text, f"KL, {text}")), *shown]
    is_timed = any(row.decode for row in record.rows.values())
    lines = [columns + ["recovery"] * bool(tasks) + ["decode, tokens/s"] * is_timed + ["seconds"]]
    lines.append(["---"] + ["---:"] * (len(lines[0]) - 1))
    accuracies = {task: one["baseline"] for row in record.rows.values() for task, one in row.tasks.items()}
    for name, row in sorted(record.rows.items(), key=lambda item: (item[0] != BASELINE, item[1].bytes)):
        cells = ["uncompressed, 16 bits" if name == BASELINE else f"`{name}`" if row.is_recipe else name]
        cells.append(f"{row.bytes / 1e6:.1f}")
        for text in texts:
            base = record.rows[BASELINE].perplexity.get(text)
            cells += [
                with_change(row.perplexity.get(text), None if name == BASELINE else base),
                with_error(row.kl.get(text), 4),
            ]
        if name == BASELINE:
            cells += [f"{accuracies[task]:.1%}" for task in tasks] + ["100 %"] * bool(tasks)
        else:
            cells += [f"{row.tasks[task]['value']:.1%}" if task in row.tasks else "–" for task in tasks]
            cells += [recovery_of(row.tasks) if tasks and set(row.tasks) == set(tasks) else "–"] * bool(tasks)
        cells += ["{:.0f} ({:.0f} to {:.0f})".format(*row.decode) if row.decode else "–"] * is_timed
        lines.append([*cells, "–" if row.seconds is None else f"{row.seconds:.0f}"])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def with_change(value: Sequence[float] | None, base: Sequence[float] | None) -> str:
    """A perplexity with its standard error and its change relative to the baseline."""
    if value is None:
        return "–"
    return with_error(value, 2) + (f" ({value[0] / base[0] - 1:+,.1%})" if base else "")


def with_error(value: Sequence[float] | None, decimals: int) -> str:
    """A value and its standard error, which does not exist for one window."""
    if value is None:
        return "–"
    return " ± ".join(f"{part:,.{decimals}f}" for part in value if part is not None)


def recovery_of(tasks: dict[str, dict]) -> str:
    """The mean over tasks of the share of the baseline's accuracy."""
    return f"{sum(one['recovery'] for one in tasks.values()) / len(tasks):.1%}"


def page(record: ScoringRecord, command: str, picture: str) -> str:
    """The published note."""
    s, about = record.settings, record.provenance
    scored = ", ".join(f"{n} of {titled(text)}" for text, n in zip(s["texts"], s["windows"], strict=True))
    lines = [
        f"# Bytes and loss of {Path(s['model']).name}: recipes of this workbench, and models of other tools",
        "",
        f"Measured on {time.strftime('%Y-%m-%d')} on {about['hardware']['cpu']}, threads: {about['threads']}.",
        "",
        *("```", command, "```", ""),
        f"All are calibrated on {s['samples']} × {s['seqlen']} tokens of {titled(s['corpus'])}. One scorer takes the"
        f" dequantised weights of every model, in float32, on windows of {s['window']} tokens: {scored}. Activations"
        " and caches are rounded where a recipe says so, and only there. KL is from the uncompressed model, in nats per"
        " token. Bytes are those of the whole model without its tokenizer. Rows in code type are recipes of this"
        " workbench; their seconds are what it took to compress the model."
        + (
            f" Tasks: zero-shot accuracy on the first {s['limit']} questions of each, in bfloat16; recovery is the mean"
            " share of the uncompressed model's accuracy."
            if s["tasks"]
            else ""
        )
        + (
            f" Decode: {s['new_tokens']} tokens after {s['prompt_tokens']} in bfloat16, one sequence, the median and"
            " quartiles of the rounds of recipes, which ran in turns, and of the repetitions of llama-bench after them."
            if any(row.decode for row in record.rows.values())
            else ""
        ),
        "",
        f"![Bytes of the whole model against perplexity and KL on {titled(s['texts'][0])}]({picture})",
        "",
        table(record),
    ]
    return "\n".join(lines) + "\n"


def draw(record: ScoringRecord, path: Path) -> None:
    """Bytes against perplexity and KL on the first text, and against decode speed where that was measured."""
    import matplotlib.pyplot as plt

    text = record.settings["texts"][0]
    shown: dict[str, Callable[[ScoredRow], float | None]] = {
        f"perplexity on {titled(text)}": lambda row: row.perplexity.get(text, (None,))[0],
        f"KL, nats per token, on {titled(text)}": lambda row: row.kl.get(text, (None,))[0],
    }
    if any(row.decode for row in record.rows.values()):
        shown["decode, tokens per second"] = lambda row: row.decode[0] if row.decode else None
    figure, panels = plt.subplots(1, len(shown), figsize=(5.5 * len(shown), 4.2), constrained_layout=True)
    for axes, (what, value_of) in zip(panels, shown.items(), strict=True):
        for ours, label, mark in ((True, "workbench", "o"), (False, "other tools", "s")):
            rows = {n: r for n, r in record.rows.items() if n != BASELINE and r.is_recipe == ours}
            found = {name: value_of(row) for name, row in rows.items()}
            points = sorted((rows[name].bytes / 1e6, y, name) for name, y in found.items() if y is not None)
            axes.plot([p[0] for p in points], [p[1] for p in points], mark, label=label)
            for x, y, name in points:
                short = name.removeprefix("llama.cpp ").partition(",")[0].replace("(bits=", " ").strip(")")
                up = -13 if ours else 7
                axes.annotate(short, (x, y), fontsize=7, ha="center", xytext=(0, up), textcoords="offset points")
        if "decode" not in what:
            ticks_in_steps(axes, [value for line in axes.lines for value in line.get_ydata()])
        baseline = value_of(record.rows[BASELINE])
        if baseline is not None:
            axes.axhline(baseline, color="gray", linewidth=0.8, label="16 bits")
        axes.set_xlabel("MB of the whole model")
        axes.set_ylabel(what)
        axes.margins(x=0.1, y=0.12)
    panels[0].legend()
    figure.savefig(path, metadata={"Date": None})


def ticks_in_steps(axes: Any, values: list[float]) -> None:
    """A logarithmic axis whose six ticks lie evenly between the lowest and the highest value."""
    low, high = min(values), max(values)
    axes.set_yscale("log")
    ticks = [float(f"{low * (high / low) ** (i / 5):.3g}") for i in range(6)]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()


def main() -> None:
    given = options(__doc__).parse_args()
    record = run(given)
    print(table(record))
    if given.write:
        draw(record, given.write.with_suffix(".svg"))
        given.write.write_text(page(record, command(), given.write.with_suffix(".svg").name))


if __name__ == "__main__":
    main()
