"""`workbench eval DIR`: scores a saved model, ours or of others, against the model from which it was made."""

import argparse
from pathlib import Path
from typing import Any

NAME = "eval"  # where a record names its notebook


def declare(command) -> None:
    """The options of `workbench eval`."""
    from notebooks.batch.verbs.loading import baseline_option, model_argument

    about = "score a saved model, against its original where that is known"
    parser = command(NAME, score, about, model_argument())
    baseline_option(parser)
    parser.add_argument(
        "--text", metavar="CORPUS", default="pydocs", help="pydocs (embedded, default), wikitext2, c4, a file, a hub id"
    )
    parser.add_argument("--window", metavar="N", type=int, default=512, help="tokens per window (default: 512)")
    parser.add_argument("--max-windows", metavar="N", type=int, default=8, help="most windows (default: 8)")
    parser.add_argument("--speed-rounds", metavar="N", type=int, default=3, help="0: nothing is timed (default: 3)")
    parser.add_argument("--device", default="cpu", help="cpu (default), cuda")
    parser.add_argument("--dtype", default="float32", help="in which texts are scored (default: float32)")
    parser.add_argument("--out", metavar="FOLDER", type=Path, default=None, help="new folder for record and page")


def score(options: argparse.Namespace) -> int:
    """Score the model, print a table, and write record and page if they are asked for."""
    original = _checked(options)
    from transformers.utils.logging import disable_progress_bar

    from compress import held_out, load_model
    from compress.inputs.calibration import beginning
    from eval.evaluate import check_evaluation, evaluate

    disable_progress_bar()
    model, tokenizer = load_model(options.model, dtype=options.dtype, device=options.device)
    baseline = _baseline(options, original, tokenizer) if original else None
    texts = {options.text: held_out(tokenizer, corpus=options.text)}
    amounts = {"window": options.window, "max_windows": options.max_windows}
    how = {**amounts, "speed_rounds": options.speed_rounds, "write_tokens": 0}
    for one in filter(None, (model, baseline)):
        check_evaluation(one, texts, **how)
    scores = evaluate(model, tokenizer, baseline=baseline, texts=texts, beginning=beginning(tokenizer), **how)
    print(_table(scores))
    for note in scores.notes:
        print(f"note: {note}")
    if options.out:
        print(_written(options, model, scores))
    return 0


def _checked(options: argparse.Namespace) -> str:
    """Everything that can be refused before a model is loaded; returns the name of the original, or ""."""
    from compress.inputs.corpus import check_corpus
    from compress.inputs.model import DTYPES
    from notebooks.batch.verbs.loading import baseline_of, check_device, check_model

    for option, least in (("window", 2), ("max_windows", 1), ("speed_rounds", 0)):
        if getattr(options, option) < least:
            name = f"--{option.replace('_', '-')}"
            raise ValueError(f"`{name}` (={getattr(options, option)}) must be {least} or more")
    if options.dtype not in DTYPES:
        raise ValueError(f"`--dtype` (={options.dtype!r}) must be one of {', '.join(DTYPES)}")
    if options.out and options.out.exists() and (not options.out.is_dir() or any(options.out.iterdir())):
        raise ValueError(f"`--out` (={str(options.out)!r}) exists already; name a new folder, or remove it first")
    check_device(options.device)
    try:
        check_corpus(options.text, "evaluation")
    except ValueError as error:
        raise ValueError(str(error).replace("`corpus`", "`--text`")) from error
    check_model(options.model)
    return baseline_of(options.model, options.baseline)


def _baseline(options: argparse.Namespace, original: str, tokenizer: Any) -> Any:
    """The original model.

    Raises:
        ValueError: it reads texts as other tokens.
    """
    from compress import load_model

    baseline, own = load_model(original, dtype=options.dtype, device=options.device)
    if own.get_vocab() != tokenizer.get_vocab():
        said = f"its tokens are not those of {options.model}, so that their scores cannot be compared"
        raise ValueError(f"`--baseline` (={original!r}): {said}; name the model from which it was made")
    return baseline


def _table(scores: Any) -> str:
    """The scores as text: a row per metric, with the change from the baseline."""
    from eval.record.metrics import metric_table
    from eval.record.rows import typed
    from notebooks.batch.status import aligned

    models = [name for name, found in scores.metrics.items() if found]
    run = typed({"scores": scores.metrics, "difference": scores.difference, "speed": scores.speed})
    table = metric_table(models, scores.metrics, run.counts)
    alone = len(table.models) == 1
    rows = [["", "value"] if alone else ["", *table.models, "change"]]
    for row in table.rows:
        label = " on ".join(filter(None, (row.label, row.detail)))
        cells = [" ".join(filter(None, cell)) for cell in row.cells]
        changes = [change.text for change in row.changes[1:]]
        rows.append([" ".join(filter(None, (label, row.unit and f"({row.unit})"))), *cells, *changes])
    return aligned(rows)


def _written(options: argparse.Namespace, model: Any, scores: Any) -> str:
    """Write record.json and report.html; returns a line that names them."""
    import sys
    from datetime import UTC, datetime, timedelta

    from compress.checkpoint.save_format import CheckpointInfo
    from compress.walk.identity import model_identity
    from eval.record.schema import write_record
    from eval.run_record import RunInfo, record
    from reports.page.render import render

    folder = Path(options.model).expanduser()
    try:
        origin = CheckpointInfo.read(folder)
    except ValueError:  # a model of others
        origin = CheckpointInfo([], model_identity(model), None)
    began = datetime.now(UTC) - timedelta(seconds=scores.seconds)
    shown = {"model_name": options.model, "eval_corpus": options.text, "window": options.window}
    command = f"workbench {' '.join(sys.argv[1:])}"
    info = RunInfo(f"{NAME}-{folder.name}-{began:%Y%m%d%H%M%S}", NAME, shown, began, command)
    made = record(origin.result(model), scores, info)
    options.out.mkdir(parents=True, exist_ok=True)
    write_record(made, options.out / "record.json")
    return f"page: {render(made, options.out / 'report.html').path}"
