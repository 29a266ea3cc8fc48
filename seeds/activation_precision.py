"""What activations in 8 and 4 bits cost, and what mends it: precisions against treatments, from one record.

    python seeds/activation_precision.py --model smollm2-135m --samples 32 --out activations.json \\
        --speed-rounds 3 --write reports/published/activations.md

Every cell of the table is a recipe: weights in 8 or 4 bits, activations in 8 or 4, the cache in 16 or 4, and a
treatment: none, smoothing, a rotation, a trained rotation, a map of each input, the largest channels gathered in groups
of 8 bits, a branch of low rank, FireQ's scalings. Recipes are calibrated on C4 and scored by seeds/scoring.py, whose
options these are, as of seeds/bytes_and_loss.py: what `--keep` holds is not made again, and recipes that store the same
weights share them.
"""

import time
from pathlib import Path

import scoring

WEIGHTS = "gptq(bits=4, group_size=16, scale_dtype=int6)"
A8, A4 = "activations(bits=8)", "activations(bits=4, group_size=32)"
GATHERED = "activations(bits=4, group_size=32, outliers=0.1)"
KV4 = "kv_int(bits=4)"
TURNED4 = "kv_int(bits=4, rotate_keys=True)"
TRAINED = "rotate(steps=24)"
TABLE = WEIGHTS.replace("group_size=16", "group_size=16, grid=iq4_nl")
# Channels scaled, integers with scales in fp8, inputs in fp8, keys scaled before and after RoPE.
FIREQ = "smooth_keys(leave=2), smoothquant, gptq(bits=4, group_size=16, symmetric=True, scale_dtype=e4m3)"
FIREQ_A8 = "activations(format=fp8)"
RECIPES = {
    "W8A8": {
        "plain": "int8",
        "smoothed": "smoothquant, int8",
        "rotated": "rotate, gptq(bits=8, group_size=-1), activations(bits=8)",
    },
    "W4A8": {
        "plain": f"{WEIGHTS}, {A8}",
        "smoothed": f"smoothquant, {WEIGHTS}, {A8}",
        "rotated": f"rotate, {WEIGHTS}, {A8}",
        "rotated, trained": f"{TRAINED}, {WEIGHTS}, {A8}",
        "flatquant, untrained": f"flatquant, {WEIGHTS}, {A8}",
        "FireQ": f"{FIREQ}, {FIREQ_A8}",
        "IQ4_NL's table": f"{TABLE}, {A8}",
        "rotated, IQ4_NL's table": f"rotate, {TABLE}, {A8}",
    },
    "W4A8KV4": {
        "plain": f"{WEIGHTS}, {A8}, {KV4}",
        "rotated": f"rotate, {WEIGHTS}, {A8}, {TURNED4}",
        "flatquant, untrained": f"flatquant, {WEIGHTS}, {A8}, {TURNED4}",
        "FireQ": f"{FIREQ}, {FIREQ_A8}, kv_int(bits=4, keys=token, symmetric=True, outlier_channels=4)",
    },
    "W4A4": {
        "plain": f"{WEIGHTS}, {A4}",
        "smoothed": f"smoothquant, {WEIGHTS}, {A4}",
        "rotated": f"rotate, {WEIGHTS}, {A4}",
        "rotated, trained": f"{TRAINED}, {WEIGHTS}, {A4}",
        "flatquant, untrained": f"flatquant, {WEIGHTS}, {A4}",
        "flatquant, untrained, gathered": f"flatquant, gather, {WEIGHTS}, {GATHERED}",
        "low-rank branch": f"smoothquant, svdquant(rank=16), {WEIGHTS}, {A4}",
        "gathered": f"{WEIGHTS}, {GATHERED}",
        "gathered before the weights": f"gather, {WEIGHTS}, {GATHERED}",
    },
    "W4A4KV4": {
        "plain": f"{WEIGHTS}, {A4}, {KV4}",
        "smoothed": f"smoothquant, {WEIGHTS}, {A4}, {KV4}",
        "rotated": f"rotate, {WEIGHTS}, {A4}, {TURNED4}",
        "flatquant, untrained": f"flatquant, {WEIGHTS}, {A4}, {TURNED4}",
        "flatquant, untrained, gathered": f"flatquant, gather, {WEIGHTS}, {GATHERED}, {TURNED4}",
        "gathered": f"{WEIGHTS}, {GATHERED}, {KV4}",
        "gathered before the weights": f"gather, {WEIGHTS}, {GATHERED}, {KV4}",
    },
}
TREATMENTS = list(dict.fromkeys(name for cells in RECIPES.values() for name in cells))


def cell(record: scoring.ScoringRecord, recipe: str | None, text: str) -> str:
    """Change of the perplexity, and KL."""
    row = record.rows.get(recipe or "-")
    if row is None or text not in row.kl:
        return "–"
    base = record.rows[scoring.BASELINE].perplexity[text][0]
    return f"{row.perplexity[text][0] / base - 1:+,.1%}, KL {row.kl[text][0]:,.3f}"


def matrix(record: scoring.ScoringRecord, text: str) -> str:
    """Markdown: a row for each treatment, a column for each precision."""
    shown = [t for t in TREATMENTS if any(cell(record, cells.get(t), text) != "–" for cells in RECIPES.values())]
    lines = [["", *RECIPES], ["---"] + ["---:"] * len(RECIPES)]
    lines += [[t, *(cell(record, cells.get(t), text) for cells in RECIPES.values())] for t in shown]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def speeds(record: scoring.ScoringRecord) -> str:
    """Markdown of the rows that were timed; "" where none was."""
    named = {recipe: f"{precision}, {t}" for precision, cells in RECIPES.items() for t, recipe in cells.items()}
    rows = [(named.get(recipe, "16 bits"), row) for recipe, row in record.rows.items() if row.decode]
    lines = ["| | MB | decode, tokens/s | prefill, tokens/s |", "| --- | ---: | ---: | ---: |"] if rows else []
    for name, row in rows:
        decode, prefill = ("{:,.0f} ({:,.0f} to {:,.0f})".format(*found) for found in (row.decode, row.prefill))
        lines.append(f"| {name} | {row.bytes / 1e6:.1f} | {decode} | {prefill} |")
    return "\n".join(lines)


def draw(record: scoring.ScoringRecord, text: str, path: Path) -> None:
    """KL of every treatment, a group of bars for each precision."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 4), constrained_layout=True)
    width, colours = 0.8 / len(TREATMENTS), plt.get_cmap("tab20").colors
    axes.set_prop_cycle(color=[*colours[::2], *colours[1::2]])
    for i, treatment in enumerate(TREATMENTS):
        rows = [record.rows.get(cells.get(treatment, "-")) for cells in RECIPES.values()]
        found = [
            (x + (i - len(TREATMENTS) / 2) * width, row.kl[text][0]) for x, row in enumerate(rows) if row and row.kl
        ]
        if found:
            axes.bar([x for x, _ in found], [kl for _, kl in found], width, label=treatment)
    axes.set_yscale("log")
    axes.set_xticks(range(len(RECIPES)), list(RECIPES))
    axes.set_ylabel(f"KL from 16 bits on {scoring.titled(text)}, nats per token")
    axes.legend(fontsize=7, ncols=2)
    figure.savefig(path, metadata={"Date": None})


def note(record: scoring.ScoringRecord, path: Path) -> str:
    """The published page."""
    s, about = record.settings, record.provenance
    counts = ", ".join(f"{n} of {scoring.titled(t)}" for t, n in zip(s["texts"], s["windows"], strict=True))
    tables = [part for text in s["texts"] for part in (f"On {scoring.titled(text)}:", "", matrix(record, text), "")]
    fast = speeds(record)
    timed = (
        f"Speed in bfloat16: a prompt of {s['prompt_tokens']} tokens and {s['new_tokens']} tokens after it, one"
        " sequence, medians and quartiles of rounds in turns:"
    )
    recipes = [
        f"- {p}, {t}, {record.rows[recipe].bytes / 1e6:.1f} MB: `{recipe}`"
        for p, cells in RECIPES.items()
        for t, recipe in cells.items()
        if recipe in record.rows
    ]
    lines = [
        f"# Activations and caches in 8 and 4 bits: {Path(s['model']).name}",
        "",
        f"Measured on {time.strftime('%Y-%m-%d')} on {about['hardware']['cpu']}, threads: {about['threads']}.",
        "",
        *("```", scoring.command(), "```", ""),
        f"All are calibrated on {s['samples']} × {s['seqlen']} tokens of C4 and scored in float32 on windows of"
        f" {s['window']} tokens ({counts}): the change of the perplexity, and KL from the uncompressed model in nats"
        " per token. Caches are rounded as they are while text is read in pieces of 64 tokens.",
        "",
        *tables,
        f"![KL by precision and treatment]({path.with_suffix('.svg').name})",
        "",
        *([timed, "", fast, ""] if fast else []),
        f"The recipes, and the bytes of the whole model (16 bits: {record.rows[scoring.BASELINE].bytes / 1e6:.1f} MB):",
        "",
        *recipes,
    ]
    draw(record, s["texts"][0], path.with_suffix(".svg"))
    return "\n".join(lines) + "\n"


def main() -> None:
    """Options of seeds/scoring.py; without recipes, those of the table."""
    parser = scoring.options(__doc__)
    parser.set_defaults(samples=32, texts=["wikitext2", "essays"], window=1024, windows=[6, 3])
    what = "treatments to time, with --speed-rounds"
    parser.add_argument("--timed", nargs="*", default=["plain", "rotated", "gathered before the weights"], help=what)
    parser.add_argument("--kept", action="store_true", help="leave out recipes that `--out` does not hold")
    given = parser.parse_args()
    timed = {cells[t] for cells in RECIPES.values() for t in given.timed if t in cells}
    given.recipes = given.recipes or [recipe for cells in RECIPES.values() for recipe in cells.values()]
    if given.kept:
        rows = scoring.ScoringRecord.read(given.out).rows
        given.recipes = [recipe for recipe in given.recipes if recipe in rows]
    given.timed = [recipe for recipe in given.recipes if recipe in timed and "kv_int" not in recipe]
    record = scoring.run(given)
    for text in given.texts:
        print(matrix(record, text))
    if given.write:
        given.write.write_text(note(record, given.write))


if __name__ == "__main__":
    main()
