"""Text by name: embedded, well-known, a file, or any hub data set; its calibration and evaluation parts never
overlap."""

import hashlib
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from errno import EACCES, ENOSPC, EROFS
from functools import cache
from pathlib import Path

from compress.inputs.hub import quick_to_fail, revision
from compress.inputs.text_files import READERS, STRINGS, Chat, documents_in, documents_of, text_column
from kernels.support.errors import first_line

_LOCAL = {
    "wikitext2": "wikitext2_raw/test.parquet", "c4": "calib_c4/train.parquet",
    "essays": "paul_graham_essays/train.parquet", "wikipedia": "calib_wikipedia/train.parquet",
}  # fmt: skip
_ON_HUB = {
    "wikitext2": "Salesforce/wikitext:wikitext-2-raw-v1",
    "c4": "allenai/c4:en",
    "essays": "sgoel9/paul_graham_essays",
    "wikipedia": "wikimedia/wikipedia:20231101.en",
}
SEVERAL = " + "  # between the names of corpora whose documents are taken together
PARTS = ("calibration", "evaluation")
EVALUATION_SHARE = 4  # one document in four is held out if a corpus has no split of its own
RUN = 13  # words in a row that are the same in two texts only if one was copied, as is usual in such comparisons
SHORT = 64  # characters of a document; texts share shorter ones, which are headings and the like, by chance


def load_text(corpus: str, part: str) -> list[str]:
    """Documents of one part of a corpus.

    Args:
        corpus: "pydocs" (Python's own language reference, always there), "wikitext2" (raw), "c4", "wikipedia",
            "essays", a path (.parquet, .jsonl, .json, .txt), or a hub data set as "owner/name" or
            "owner/name:configuration". A column `messages` holds chats. For calibration several can be taken
            together, one after the other, as "c4 + wikipedia".
        part: "calibration" or "evaluation".

    Raises:
        ValueError: the corpus does not exist, or holds no text; the message names alternatives.
    """
    if part not in PARTS:
        raise ValueError(f"`part` (={part!r}) must be one of {', '.join(PARTS)}")
    return apart(corpus)[0] if part == "calibration" else _part(corpus, part)


def _part(corpus: str, part: str) -> list[str]:
    """One part of a corpus, with documents that other corpora may hold, too."""
    if not isinstance(corpus, str) or not corpus.strip():
        raise ValueError(f"`corpus` (={corpus!r}) must be a name; {_what_would_do(part)}")
    if (names := names_of(corpus)) != [corpus]:
        _check_several(corpus, part)
        return [document for name in names for document in _part(name, part)]
    if corpus in CORPORA:
        documents = CORPORA[corpus](part)
    elif Path(corpus).suffix in READERS:
        path = Path(corpus).expanduser()
        if not path.is_file():
            raise ValueError(f"`corpus` (={corpus!r}): there is no such file")
        documents = _split(corpus, documents_of(path), part)
    elif _is_hub_id(corpus):
        documents = _hub(corpus, part)
    else:
        raise ValueError(f"`corpus` (={corpus!r}) is not known; {_what_would_do(part)}")
    if not any(d.strip() for d in documents):
        raise ValueError(f"`corpus` (={corpus!r}) has no text in its {part} part; {_what_would_do(part)}")
    return documents


def apart(corpus: str, scored: str = "") -> tuple[list[str], int]:
    """The calibration part of a corpus without documents that are scored, and the number of those that were left out.

    What is scored may be the same data under another name. Documents are compared by their words; those of fewer than
    SHORT characters stay. Articles of Wikipedia are left out if they have RUN words in a row with the test set of
    wikitext2 in common, whose documents are lines of such articles.

    Args:
        scored: the corpus on whose evaluation part the model will be scored; "": it is not known. The test set of
            wikitext2, if it is on this machine, counts as scored in any case, unless the corpus cannot hold it.
    """
    documents = _part(corpus, "calibration")
    test_set = shared_data() / _LOCAL["wikitext2"]
    known = _keys(_part(scored, "evaluation")) if scored else set()
    if not APART.issuperset(names_of(corpus)) and test_set.is_file():
        known = known | _keys(documents_of(test_set))
    runs = _runs("\n".join(documents_of(test_set))) if _holds_articles(corpus) and test_set.is_file() else set()
    kept = [d for d in documents if _key(d) not in known and not (runs and runs & _runs(d))]
    return kept, len(documents) - len(kept)


def _holds_articles(corpus: str) -> bool:
    return "wikipedia" in names_of(corpus)


def _runs(text: str) -> set[int]:
    """Hashes of all RUN words in a row of a text, without regard to capitals and punctuation."""
    words = re.findall(r"\w+", text.casefold())
    return {hash(run) for run in zip(*(words[i:] for i in range(RUN)), strict=False)}


def check_corpus(corpus: str, part: str) -> None:
    """Raise ValueError if a part of a corpus does not exist; texts are not read.

    Args: as in `load_text`.
    """
    if (names := names_of(corpus)) != [corpus]:
        _check_several(corpus, part)
        for name in names:
            check_corpus(name, part)
        return
    file = _LOCAL.get(corpus)
    if corpus == "pydocs" or (
        file and (corpus, part) != ("wikitext2", "calibration") and (shared_data() / file).is_file()
    ):
        return
    if name := _ON_HUB.get(corpus, corpus if _is_hub_id(corpus) else ""):
        _splits(corpus, *name.partition(":")[::2])
    elif not (Path(corpus).suffix in READERS and Path(corpus).expanduser().is_file()):
        load_text(corpus, part)  # says what is wrong with it


def shared_data() -> Path:
    """Folder of local data sets: $WORKBENCH_DATA, or `shared/data` beside the checkout; it need not exist."""
    beside = Path(__file__).resolve().parents[3] / "shared" / "data"
    return Path(os.environ.get("WORKBENCH_DATA", beside))


def local_file(corpus: str) -> Path | None:
    """The local file of a corpus, if it is one file; None for corpora from the hub."""
    files = sources(corpus).files
    return files[0] if len(files) == 1 and names_of(corpus) == [corpus] else None


@dataclass(frozen=True)
class Sources:
    """The sources of a corpus on this machine: local files, and data sets of the hub as "owner/name"."""

    files: tuple[Path, ...] = ()
    repositories: tuple[str, ...] = ()


def sources(corpus: str) -> Sources:
    """The sources from which `load_text` reads a corpus; empty for a name that is no corpus."""
    if (names := names_of(corpus)) != [corpus]:
        every = [sources(name) for name in names]
        return Sources(sum((one.files for one in every), ()), sum((one.repositories for one in every), ()))
    if corpus == "pydocs":
        from pydoc_data import topics

        return Sources((Path(topics.__file__),))
    if corpus in _LOCAL:
        local = shared_data() / _LOCAL[corpus]
        files = (local,) if local.is_file() else ()
        whole = files and corpus != "wikitext2"  # the local file of wikitext2 is only the evaluation part
        return Sources(files, () if whole else (_ON_HUB[corpus].partition(":")[0],))
    path = Path(corpus).expanduser()
    if path.suffix in READERS:
        return Sources((path,) if path.is_file() else ())
    return Sources((), (corpus.partition(":")[0],) if _is_hub_id(corpus) else ())


def names_of(corpus: str) -> list[str]:
    """The corpora that a text names, each once; a file is one, whatever its name."""
    if SEVERAL not in corpus or Path(corpus).expanduser().is_file():
        return [corpus]
    return list(dict.fromkeys(name.strip() for name in corpus.split(SEVERAL)))


def _check_several(corpus: str, part: str) -> None:
    if part == "evaluation":
        raise ValueError(
            f"`corpus` (={corpus!r}) names several corpora, which are taken together for calibration alone; score on "
            "one of them"
        )


def _is_hub_id(corpus: str) -> bool:
    return corpus.count("/") == 1 and not corpus.startswith((".", "/", "~")) and Path(corpus).suffix not in READERS


def _pydocs(part: str) -> list[str]:
    from pydoc_data.topics import topics

    documents = [topics[name] for name in sorted(topics)]
    held_out = documents[EVALUATION_SHARE - 1 :: EVALUATION_SHARE]
    if part == "evaluation":
        return held_out
    # Topics quote one another: paragraphs that are held out are left out here.
    known = {p.strip() for d in held_out for p in d.split("\n\n")}
    rest = [d for i, d in enumerate(documents) if i % EVALUATION_SHARE != EVALUATION_SHARE - 1]
    return ["\n\n".join(p for p in d.split("\n\n") if p.strip() not in known) for d in rest]


def _wikitext2(part: str) -> list[str]:
    local = shared_data() / _LOCAL["wikitext2"]
    if part == "evaluation" and local.is_file():
        return documents_of(local)
    return _hub(_ON_HUB["wikitext2"], part)


def _c4(part: str) -> list[str]:
    local = shared_data() / _LOCAL["c4"]
    if local.is_file():
        return _split("c4", documents_of(local), part)
    shard = "en/c4-train.00000-of-01024.json.gz" if part == "calibration" else "en/c4-validation.00000-of-00008.json.gz"
    name = _ON_HUB["c4"].partition(":")[0]
    return _load("c4", name, data_files=shard, split="train[:20000]", revision=revision("datasets", name))


def _essays(part: str) -> list[str]:
    """Paul Graham's essays, the usual haystack of needle tests."""
    local = shared_data() / _LOCAL["essays"]
    return _split("essays", documents_of(local), part) if local.is_file() else _hub(_ON_HUB["essays"], part)


def _wikipedia(part: str) -> list[str]:
    """Articles of the English Wikipedia; from the hub, the first of one file."""
    local = shared_data() / _LOCAL["wikipedia"]
    if local.is_file():
        return _split("wikipedia", documents_of(local), part)
    name, _, folder = _ON_HUB["wikipedia"].partition(":")
    first, pinned = f"{folder}/train-00000-of-00041.parquet", revision("datasets", name)
    documents = _load("wikipedia", name, data_files=first, split="train[:20000]", revision=pinned)
    return _split("wikipedia", documents, part)


CORPORA: dict[str, Callable[[str], list[str]]] = {
    "pydocs": _pydocs,
    "wikitext2": _wikitext2,
    "c4": _c4,
    "essays": _essays,
    "wikipedia": _wikipedia,
}
APART = CORPORA.keys() - {"wikipedia"}  # cannot hold documents of the test set of wikitext2, which are of Wikipedia


def _hub(corpus: str, part: str) -> list[str]:
    name, _, configuration = corpus.partition(":")
    splits, pinned = _splits(corpus, name, configuration), {"revision": revision("datasets", name)}
    held_out = next((split for split in ("test", "validation") if split in splits), None)
    if "train" in splits and held_out:
        split = "train" if part == "calibration" else held_out
        return _load(corpus, name, configuration or None, split=split, **pinned)
    return _split(corpus, _load(corpus, name, configuration or None, split=splits[0], **pinned), part)


@cache
def _splits(corpus: str, name: str, configuration: str) -> list[str]:
    from datasets import get_dataset_split_names

    try:
        with quick_to_fail():
            return get_dataset_split_names(name, configuration or None, revision=revision("datasets", name))
    except Exception as error:  # the hub's client raises many kinds, which mean the same for the user
        raise ValueError(
            f"`corpus` (={corpus!r}) cannot be loaded: {first_line(error)}; without a network it can be pydocs, a "
            f"file, or one of the data sets in the folder that WORKBENCH_DATA names (now {shared_data()}"
            f"{f', where {_LOCAL[corpus]} would be it' if corpus in _LOCAL else ''})"
        ) from error


def _load(corpus: str, *where, **how) -> list[str]:
    from datasets import load_dataset
    from datasets.utils.logging import CRITICAL, disable_progress_bar, get_verbosity, set_verbosity

    disable_progress_bar()
    verbosity = get_verbosity()
    set_verbosity(CRITICAL)  # the error has all information that datasets would log
    try:
        with quick_to_fail():
            rows = load_dataset(*where, **how)
    except Exception as error:
        cause = error.__cause__ or error  # datasets wraps the error of a file's reader
        if isinstance(cause, OSError) and cause.errno in (EACCES, EROFS, ENOSPC):  # of the cache, not of the corpus
            raise ValueError(
                f"the cache of data sets cannot be written: {first_line(cause)}; HF_HOME names a folder for it"
            ) from error
        raise ValueError(f"`corpus` (={corpus!r}) cannot be read: {first_line(cause)}") from error
    finally:
        set_verbosity(verbosity)
    kinds = {name: getattr(feature, "dtype", "") for name, feature in rows.features.items()}
    column = text_column(corpus, [name for name, kind in kinds.items() if kind in STRINGS], rows.column_names)
    return documents_in(corpus, column, rows[column])


def _split(corpus: str, documents: list[str], part: str) -> list[str]:
    """One part of documents that have no parts of their own.

    The hash of a document's words decides, so that copies of a document, in this or in another file, are in the same
    part. A corpus of fewer than four different documents is cut at three quarters of its length.
    """
    different = {_key(d): d for d in documents}
    if len(different) < EVALUATION_SHARE:
        if any(isinstance(d, Chat) for d in documents):
            raise ValueError(
                f"`corpus` (={corpus!r}) has {len(different)} chats; it needs at least {EVALUATION_SHARE}, so that "
                "some can be held out"
            )
        text = "\n\n".join(different.values())
        cut = len(text) * (EVALUATION_SHARE - 1) // EVALUATION_SHARE
        return [text[:cut] if part == "calibration" else text[cut:]]
    held_out = {key for key in different if key[0] % EVALUATION_SHARE == EVALUATION_SHARE - 1}
    if not 0 < len(held_out) < len(different):  # by chance, as there are few
        held_out = set(sorted(different)[: len(different) // EVALUATION_SHARE])
    return [d for d in documents if (_key(d) in held_out) == (part == "evaluation")]


def _keys(documents: Iterable[str]) -> set[bytes]:
    """The hashes of documents that are long enough to be known by their words."""
    return {_key(d) for d in documents if len(d) >= SHORT}


def _key(document: str) -> bytes:
    """The hash of a document's words, without regard to spaces and capitals."""
    return hashlib.sha256(" ".join(document.split()).casefold().encode("utf-8", "surrogatepass")).digest()


def _what_would_do(part: str) -> str:
    files = ".parquet, .jsonl, .json or .txt file"
    several = ", or several with ' + ' between" if part == "calibration" else ""
    return (
        f"it can be {', '.join(CORPORA)}, a {files}, {'' if several else 'or '}a hub data set like owner/name{several}"
    )
