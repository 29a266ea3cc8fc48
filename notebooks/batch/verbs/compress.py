"""`workbench compress MODEL RECIPE --out DIR` and `workbench fit MODEL --max-bytes 80MB --out DIR`: the notebooks
`recipe` and `search`, as `workbench run` executes them, with brief scores; model, record and page are in DIR when it is
finished.

The key is that of the run, so that the same command, or the same run into another folder, executes nothing twice.
"""

import argparse
import difflib
import shutil
from pathlib import Path

from notebooks.study.parameters import OWN_FORMAT, SAVE_FORMAT

NOTEBOOKS = {"compress": "recipe", "fit": "search"}  # by verb
OWN = "own"  # on this command line, another name of the workbench's own format
BRIEF = {"window": "512", "max_windows": "8", "speed_rounds": "3", "write_tokens": "24"}  # less than the notebook's
WISHES = {  # limits of `fit`: parameters of its notebook
    "max_bytes": "largest size of the whole stored model: 80MB, 1.5GB",
    "min_decode": "least speed of decoding: tokens per second, such as 250, or a multiple of the original's: 2x",
    "min_prefill": "least speed of reading a prompt, likewise",
    "max_ttft": "longest time until the first token after a prompt, with the full cache: 200ms, 0.5s",
    "max_kl": "largest divergence from the original, nats per token",
}
CACHES = {  # choices of `fit` for the cache: parameters of its notebook
    "context": (
        "TOKENS",
        "0",
        "tokens of each sequence whose cache counts among the bytes and is chosen; 0: none",
    ),
    "batch": ("N", "1", "number of these sequences, whose caches count; the speed is that of one"),
    "caches": ("RECIPES", "standard", "recipes of the cache, with semicolons between; a standard set"),
}
_ARGUMENTS = {"model_name": "MODEL", "recipe": "RECIPE", "save_path": "--out", SAVE_FORMAT: "--format"}
_ARGUMENTS |= {name: f"--{name.replace('_', '-')}" for name in (*WISHES, *CACHES, "prompt", "minutes", "drops")}


def declare(command, verb: str) -> argparse.ArgumentParser:
    """The options of `workbench compress` or `workbench fit`, but for those that they share with `run`."""
    model = ("model", {"metavar": "MODEL", "help": "a folder, a .gguf file, a hub id, or smollm2-135m (embedded)"})
    recipe = ("recipe", {"metavar": "RECIPE", "help": 'methods in order, with their knobs: "awq, gptq(bits=4)"'})
    what = {
        "compress": ("compress a model, save it, load it again and compare, score it briefly", model, recipe),
        "fit": ("find the best way to store every layer of a model within limits, and compress it so", model),
    }
    parser = command(verb, None, *what[verb])  # `cli` executes it
    parser.set_defaults(verb=verb)
    if verb == "fit":
        for name, help in WISHES.items():
            parser.add_argument(_ARGUMENTS[name], metavar="LIMIT", default="", help=help)
        parser.add_argument(
            "--prompt", metavar="TOKENS", default="256", help="tokens of the prompts that are timed, if speeds matter"
        )
        trained = "minutes of training of each of the best models, at most three, which are then ranked again"
        parser.add_argument("--minutes", metavar="MINUTES", default="0", help=trained)
        left_out = "parts of blocks that may be left out, too: attention, mlp, or both with a comma between"
        parser.add_argument("--drops", metavar="PARTS", default="", help=left_out)
        for name, (metavar, default, help) in CACHES.items():
            parser.add_argument(_ARGUMENTS[name], metavar=metavar, default=default, help=help)
    parser.add_argument("--out", metavar="DIR", required=True, help="new folder for the model, its record and its page")
    parser.add_argument(
        "--format",
        metavar="FORMAT",
        default=OWN,
        help="own (default; holds every recipe, read by load_model), compressed-tensors, gptq, bitsandbytes or gguf",
    )
    return parser


def given(options: argparse.Namespace) -> list[list[str]]:
    """The parameters of the notebook, as `-p` gives them: brief scores, then those of the user, then the arguments.

    Raises:
        ValueError: an argument is given by `-p` too, or `--format` is no format.
    """
    for name, _ in options.parameter:
        if name in _ARGUMENTS:
            raise ValueError(f"`-p {name}` is what {_ARGUMENTS[name]} says; leave it out")
    asked = {"model_name": options.model, "save_path": options.out, SAVE_FORMAT: _format(options.format)}
    if options.verb == "fit":
        asked |= {name: getattr(options, name) or ("0" if name == "max_kl" else "") for name in WISHES}
        asked |= {name: getattr(options, name) for name in ("prompt", "minutes", "drops", *CACHES)}
        asked = {"choices": _standard(options.format), **dict(options.parameter), **asked}
    else:
        asked["recipe"] = options.recipe
    if not options.out.strip():
        raise ValueError("`--out` (='') must name a folder")
    return [[name, value] for name, value in (BRIEF | dict(options.parameter) | asked).items()]


def _standard(name: str) -> str:
    """The value of `choices` for a format: the standard set that it can hold, or "" if there is none."""
    from compress.search.choices import STANDARD

    return _format(name) if _format(name) in STANDARD else ""


def _format(name: str) -> str:
    """The value of `save_format`."""
    from compress.checkpoint.save import SAVE_FORMATS

    known = [OWN, *SAVE_FORMATS]
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}? It" if near else "it"
        raise ValueError(f"`--format` (={name!r}) is not known; {hint} can be {', '.join(known)}")
    return OWN_FORMAT if name == OWN else name


def in_own_words(error: ValueError) -> ValueError:
    """The error with the names of arguments instead of those of the notebook's parameters."""
    said = str(error)
    for name, argument in _ARGUMENTS.items():
        said = said.replace(f"`{name}` (=", f"`{argument}` (=").replace(f"`{name}`", f"`{argument}`")
    return ValueError(said)


def take_over(planned, runs: Path) -> bool:
    """Copy the model of a finished run, which was saved elsewhere, to the place that is asked for now; in another
    format if it was saved in the workbench's own. False if the run has to be executed to save it.

    Args:
        planned: the run, as it is planned now.
    """
    from notebooks.batch.export import export
    from notebooks.batch.run_folder import RunFolder
    from notebooks.batch.saved_model import saved_model
    from notebooks.batch.status import folder_of

    folder = RunFolder(folder_of(planned, runs), planned.key)
    if not folder.complete():
        return False
    attempts, asked = folder.attempts(), saved_model(planned.values, planned.key, folder.manifest()["attempt"])
    kept = saved_model(folder.manifest()["values"], planned.key)
    if asked.complete(attempts) or kept is None or not kept.complete(attempts):
        return False
    if kept.save_format not in (asked.save_format, OWN_FORMAT):
        return False
    asked.check_free()
    asked.place.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(asked.part, ignore_errors=True)
    try:
        if kept.save_format == asked.save_format:
            shutil.copytree(kept.place, asked.part)
        else:
            export(kept.place, asked.save_format, asked.part)
        asked.promote()
    finally:
        shutil.rmtree(asked.part, ignore_errors=True)
    print(f"finished before; its model was copied from {kept.place}")
    return True


def complete(planned, runs: Path) -> int:
    """Put the page beside the model, unless there is one, and print what was made. The exit status: 1 if the model does
    not keep a limit of `fit`."""
    from eval.record.rows import typed
    from eval.record.schema import read_record
    from notebooks.batch.saved_model import PAGE, copy_whole, saved_model
    from notebooks.batch.status import folder_of

    run, place = folder_of(planned, runs), saved_model(planned.values, planned.key).place
    if not (place / PAGE).exists() and (run / PAGE).is_file():
        copy_whole(run / PAGE, place / PAGE)
    record = typed(read_record(run / "record.json"))
    for sentence in record.search.sentences() if record.search else ():
        print(sentence)
    print(f"\n{record.recipe_of('compressed')} of {planned.values['model_name']}: {scores_in_words(record)}")
    print(f"model: {place} (as {planned.values[SAVE_FORMAT]}; loaded again, and compared with the one in memory)")
    print(f"page:  {place / PAGE}\nnext:  workbench chat {place} --beside\n       workbench eval {place}")
    return int(bool(record.search and record.search.broken()))


def scores_in_words(record) -> str:
    """Divergence, perplexity, bytes and speed of the compressed model of a record, with the baseline's."""
    from eval.record.metrics import change, percent

    said = []
    for corpus in record.corpora:
        before, after = (record.score(name, f"perplexity_{corpus}") for name in ("baseline", "compressed"))
        kl = record.score("compressed", f"kl_{corpus}")
        said += [] if kl is None else [f"KL {kl:.4f} nats per token"]
        said += [] if not before or not after else [
            f"perplexity {before:.3f} → {after:.3f} ({percent(change(after, before))}) on {corpus}"
        ]  # fmt: skip
    ratio = record.ratio("stored_bytes")
    if ratio:
        sizes = [record.score(name, "stored_bytes") / 1e6 for name in ("baseline", "compressed")]
        said.append(f"{sizes[1]:,.1f} MB instead of {sizes[0]:,.1f}")
    speeds = [record.score(name, "decode_tokens_per_s") for name in ("baseline", "compressed")]
    if all(speeds):
        said.append(f"decodes {speeds[1]:,.0f} tokens/s instead of {speeds[0]:,.0f}")
    return "; ".join(said) or "nothing was scored"
