"""`workbench table`: the models of records as Markdown tables."""

import argparse
from pathlib import Path


def declare(command) -> None:
    """The options of `workbench table`."""
    records = {"nargs": "*", "metavar": "RECORD.json", "help": "record of a run: runs/KEY/record.json"}
    parser = command("table", table, "print the models of records as a Markdown table", ("records", records))
    parser.add_argument(
        "--update", metavar="FILE", help="write the tables of a Markdown file again from the records that it names"
    )
    parser.add_argument(
        "--write",
        metavar="FOLDER",
        help="write the index and the notes of a folder of records; of reports/published also the ledger of papers",
    )


def table(options: argparse.Namespace) -> int:
    """Print or write the tables."""
    from eval.record.files import write_whole
    from eval.record.schema import read_record
    from notebooks.batch.pages import published_papers
    from reports.parts.published import published_files
    from reports.parts.table import markdown, strengths_markdown, updated

    if sum(map(bool, (options.records, options.update, options.write))) != 1:
        raise ValueError("`table` takes records, or --update with a file that names them, or --write with a folder")
    if options.write:
        for files in (published_papers, published_files):  # the index links to the papers
            for path, text in files(Path(options.write)).items():
                print(write_whole(text, path))
        return 0
    if options.records:
        read = [read_record(path) for path in options.records]
        print(markdown(read), end="")
        for record in read:
            if record.get("strengths", {}).get("lines"):
                print("\n" + strengths_markdown([record]), end="")
        return 0
    path = Path(options.update)
    if not path.is_file():
        raise ValueError(f"`--update` (={options.update!r}): there is no such file")
    before = path.read_text(encoding="utf-8")
    after = updated(before, lambda name: read_record(path.parent / name))
    if after != before:
        path.write_text(after, encoding="utf-8")
    print(f"{path}: {'tables written again' if after != before else 'up to date'}")
    return 0
