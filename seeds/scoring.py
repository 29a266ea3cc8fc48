"""Models of one comparison, made or read when they are needed, and what is measured of each, for
seeds/bytes_and_loss.py."""

import argparse
import json
import re
import shlex
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.append(str(Path(__file__).with_name("peers")))
import torch
from compare_speed import llama_bench, tensor_bytes
from torch import nn
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM

from compress import apply, held_out, load_compressed, load_model, resize, save_compressed
from compress.formats import SignStack
from compress.inputs.calibration import beginning, calibration
from compress.linear import compressed_linears, sharing_copy
from compress.method import settle
from compress.plan import check_recipe
from compress.recipe import parse_recipe
from eval.machine.size import size
from eval.record.files import write_whole
from eval.run_record import provenance
from eval.speed.speed import contestants, measure_speed, quartiles
from eval.tasks.tasks import answer_tasks
from eval.text.divergence import compare_on_text
from kernels.support.deploy import cast

BASELINE = ""  # the name of its row
AFTER_WEIGHTS = ("quantize_activations", "cache")  # stages whose methods leave weights alone, if they store none


@dataclass
class ScoredRow:
    """The measurements of one model.

    seconds: to compress. is_recipe: of this workbench, not of another tool. perplexity, kl: {text: (value, standard
    error)}. tasks: {task: what `eval.tasks.paired.compare` says of it beside the baseline}. decode, prefill: tokens
    per second, the median and the first and third quartile of the rounds; execution: how.
    """

    bytes: int
    seconds: float | None = None
    is_recipe: bool = True
    perplexity: dict[str, Sequence[float]] = field(default_factory=dict)
    kl: dict[str, Sequence[float]] = field(default_factory=dict)
    tasks: dict[str, dict] = field(default_factory=dict)
    decode: Sequence[float] = ()
    prefill: Sequence[float] = ()
    execution: str = ""


@dataclass
class ScoringRecord:
    """All rows by name: the recipe of ours, the name of another tool's model, "" of the baseline."""

    settings: dict
    provenance: dict
    rows: dict[str, ScoredRow]

    @classmethod
    def read(cls, path: Path) -> "ScoringRecord":
        kept = json.loads(path.read_text())
        return cls(kept["settings"], kept["provenance"], {name: ScoredRow(**row) for name, row in kept["rows"].items()})

    def write(self, path: Path | None) -> None:
        if path:
            path.write_text(json.dumps(asdict(self), indent=1) + "\n")


class ScoringBench:
    """The models of one run: made or read when they are needed."""

    def __init__(self, given: argparse.Namespace, record: ScoringRecord) -> None:
        self.given, self.record = given, record
        self.baseline, self.tokenizer = load_model(given.model)
        for recipe in given.recipes:
            check_recipe(parse_recipe(recipe), self.baseline)
        record.rows.setdefault(BASELINE, ScoredRow(stored_bytes(self.baseline)))
        self.others = {name_of(path): path for path in given.others}
        if len(self.others) < len(given.others):
            raise ValueError(f"`--others` (={[*map(str, given.others)]}) must have different names: {[*self.others]}")
        self.seconds: dict[str, float | None] = {}  # that each recipe of this run took
        self.sized: dict[str, tuple[str, float]] = {}  # recipe and megabytes of the rows that are a model made smaller

    @property
    def names(self) -> list[str]:
        """The names of all rows except the baseline's."""
        return [*self.given.recipes, *self.sized, *self.others]

    def make(self) -> None:
        """Compress what is not kept yet, and note bytes and seconds of every model."""
        rows = self.record.rows
        for recipe in tqdm(self.given.recipes, desc="recipes", unit="recipe"):
            if recipe not in rows or not self.folder(recipe).is_dir():
                model, seconds = self.compress(recipe)
                rows.setdefault(recipe, ScoredRow(stored_bytes(model), seconds))
                self.record.write(self.given.out)
            if self.given.sizes and stores_blocks(recipe):
                model = load_compressed(self.folder(recipe))
                for megabytes in self.given.sizes:
                    name = f"{recipe}, {megabytes:g} MB"
                    self.sized[name] = recipe, megabytes
                    rows.setdefault(name, ScoredRow(stored_bytes(resize(model, megabytes)), rows[recipe].seconds))
        for name, path in self.others.items():
            about = json.loads((path / "peer.json").read_text()) if path.is_dir() else {"bytes": tensor_bytes(path)}
            rows.setdefault(name, ScoredRow(about["bytes"], about.get("seconds"), is_recipe=False))

    def compress(self, recipe: str) -> tuple[nn.Module, float | None]:
        """The model of a recipe, kept in its folder, and how many seconds it took (None: a part was kept from before).

        What a recipe does to inputs and caches after its weights are stored follows a model that is kept by itself, so
        that recipes with the same weights share them.
        """
        methods = settle(parse_recipe(recipe))  # a method may look at those behind it
        weights = [method for method in methods if method.stage not in AFTER_WEIGHTS or method.stores((64, 64))]
        first, then = ", ".join(map(str, weights)), methods[len(weights) :]
        if not then or not any(method.stores((64, 64)) for method in weights):
            model, taken = load_model(self.given.model)[0], 0.0
            then = methods
        elif self.folder(first).is_dir():
            model, taken = load_compressed(self.folder(first)), self.seconds.get(first)
        else:
            model, taken = self.compress(first)
        result = apply(then, model, self.batches() if any(method.needs_calibration for method in then) else None)
        seconds = None if taken is None else round(taken + result.seconds, 1)
        self.seconds[recipe] = seconds
        if not self.folder(recipe).is_dir():
            save_compressed(result, self.folder(recipe), self.tokenizer)
        return result.model, seconds

    def batches(self) -> list[torch.Tensor]:
        given = self.given
        return calibration(self.tokenizer, corpus=given.corpus, samples=given.samples, seqlen=given.seqlen, seed=0)

    def folder(self, recipe: str) -> Path:
        """The folder in which the model of a recipe is stored."""
        given = self.given
        parts = f"{Path(given.model).name} {given.corpus} {given.samples}x{given.seqlen}", recipe
        return given.keep.joinpath(*(re.sub("[^a-z0-9]+", "-", part.lower()).strip("-") for part in parts))

    @contextmanager
    def loaded(self, name: str, dtype: torch.dtype) -> Iterator[nn.Module]:
        """A model by its row's name, whose linears multiply dequantised weights."""
        path = self.others.get(name)
        recipe, megabytes = self.sized.get(name, (name, None))
        if path is None:
            model = load_compressed(self.folder(recipe), dtype=dtype)
            if megabytes is not None:
                resize(model, megabytes)
        elif path.is_dir():
            model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        else:
            model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype)
        with ExitStack() as stack:
            for linear in compressed_linears(model).values():
                stack.enter_context(linear.dense())
            yield model.eval()

    def score_texts(self, names: Sequence[str]) -> None:
        """Perplexity and KL of some models in one pass over each text."""
        given, rows = self.given, self.record.rows
        with ExitStack() as stack:
            models = {name: stack.enter_context(self.loaded(name, torch.float32)) for name in names}
            for text, limit in zip(given.texts, given.windows, strict=True):
                ids = held_out(self.tokenizer, corpus=text)
                how = {"window": given.window, "limit": limit, "beginning": beginning(self.tokenizer)}
                perplexities, divergences = compare_on_text(self.baseline, models, ids, **how)
                for name, p in perplexities.items():
                    rows[BASELINE if name == "baseline" else name].perplexity[text] = p.value, p.stderr
                for name, d in divergences.items():
                    rows[name].kl[text] = d.kl, d.kl_stderr

    def score_tasks(self, name: str) -> None:
        """Answers of a model and of the baseline to the tasks."""
        given = self.given
        how = {"limit": given.limit, "batch_size": given.batch_size, "cache_path": given.keep / "answers"}
        with self.loaded(name, torch.bfloat16) as model:
            baseline = cast(self.baseline, torch.bfloat16)
            scores = answer_tasks({"baseline": baseline, "model": model}, self.tokenizer, given.tasks, **how)
        for task, compared in scores.compared["model"].items():
            self.record.rows[name].tasks[task] = asdict(compared)

    def time_recipes(self) -> None:
        """Decoding of the uncompressed model and of the recipes, in turns."""
        given, rows = self.given, self.record.rows
        models = {BASELINE: self.baseline}
        models |= {name: load_compressed(self.folder(name), dtype=torch.bfloat16) for name in given.recipes}
        how = {"prompt_tokens": given.prompt_tokens, "new_tokens": given.new_tokens, "rounds": given.speed_rounds}
        for name, speed in measure_speed(contestants(models), **how).items():
            rows[name].decode = speed.decode_tokens_per_s, *speed.decode_quartiles
            rows[name].prefill = speed.prefill_tokens_per_s, *speed.prefill_quartiles
            rows[name].execution = speed.execution

    def time_files(self) -> None:
        """Decoding of the GGUF files by llama-bench, one after another."""
        given = self.given
        lengths = {"prompt_tokens": 0, "new_tokens": given.new_tokens, "depth": given.prompt_tokens}
        how = {**lengths, "repeats": given.speed_rounds, "threads": torch.get_num_threads()}
        for name, path in self.others.items():
            if path.suffix == ".gguf":
                speeds = llama_bench(given.environments, path, **how)
                self.record.rows[name].decode = statistics.median(speeds), *quartiles(speeds)
                self.record.rows[name].execution = "llama-bench"


def stored_bytes(model: nn.Module) -> int:
    """Bytes of the whole model, with its floats in 16 bits."""
    return size(cast(sharing_copy(model), torch.bfloat16)).stored_bytes


def stores_blocks(recipe: str) -> bool:
    """Do the weights that a recipe stores come in blocks, so that `resize` takes the model?"""
    parts = [part for method in parse_recipe(recipe) for part in method.stores((64, 64)) or []]
    return any(part["format"] == SignStack.name for part in parts)


def name_of(path: Path) -> str:
    """The name of another tool's model in the table."""
    if path.is_dir():
        return json.loads((path / "peer.json").read_text())["name"]
    kind = re.fullmatch(r"(I?Q\d\w*|F16)(-\d+)?", path.stem)
    return f"llama.cpp {kind[1]}, importance matrix" if kind else path.stem


def titled(text: str) -> str:
    """The name of a text: the folder of a file, else the text's name."""
    return Path(text).parent.name if Path(text).suffix else text


def measure(given: argparse.Namespace, record: ScoringRecord) -> None:
    """Measure everything that the record does not have yet."""
    bench = ScoringBench(given, record)
    bench.make()
    unscored = [name for name in bench.names if set(given.texts) - set(record.rows[name].kl)]
    for at in range(0, len(unscored), given.at_once):
        bench.score_texts(unscored[at : at + given.at_once])
        record.write(given.out)
    for name in bench.names:
        if set(given.tasks) - set(record.rows[name].tasks):
            bench.score_tasks(name)
            record.write(given.out)
    if given.speed_rounds:
        bench.time_recipes()
        bench.time_files()
        record.write(given.out)


def options(description: str | None) -> argparse.ArgumentParser:
    """The command-line options of a run."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--corpus", default="c4", help="to calibrate on")
    parser.add_argument("--samples", type=int, default=128, help="calibration windows")
    parser.add_argument("--seqlen", type=int, default=512, help="tokens in each")
    parser.add_argument("--texts", nargs="+", default=["wikitext2", "essays"], help="to score on")
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--windows", type=int, nargs="+", default=[20, 8], help="of each text")
    sizes = "megabytes at which recipes that store weights in blocks are scored, too, without compressing again"
    parser.add_argument("--sizes", type=float, nargs="*", default=[], help=sizes)
    parser.add_argument("--others", type=Path, nargs="*", default=[], help="models of other tools")
    parser.add_argument("--tasks", nargs="*", default=[], help="of lm-eval, by which models are scored, too")
    parser.add_argument("--limit", type=int, default=1000, help="questions of each task")
    parser.add_argument("--batch-size", type=int, default=1, help="texts of a task at a time")
    parser.add_argument("--speed-rounds", type=int, default=0, help="of decoding; 0: nothing is timed")
    parser.add_argument("--prompt-tokens", type=int, default=512, help="read before tokens are decoded")
    parser.add_argument("--new-tokens", type=int, default=64, help="decoded in a round")
    environments = "folder of `make interop`, for llama-bench"
    parser.add_argument("--environments", type=Path, default=Path(".venv-interop"), help=environments)
    parser.add_argument("--at-once", type=int, default=4, help="models in memory, which share the baseline's pass")
    parser.add_argument("--keep", type=Path, default=Path("runs/bytes"), help="folder of compressed models and answers")
    parser.add_argument("--out", type=Path, help="file for the JSON record")
    parser.add_argument("--write", type=Path, help="file for the note, with a figure beside it")
    return parser


def run(given: argparse.Namespace) -> ScoringRecord:
    """Measure everything that was requested; continues the record of `out`.

    Raises:
        ValueError: an invalid recipe, or a record of other settings.
    """
    for recipe in given.recipes:
        parse_recipe(recipe)
    fixed = (
        "model",
        "corpus",
        "samples",
        "seqlen",
        "texts",
        "window",
        "windows",
        "tasks",
        "limit",
        "prompt_tokens",
        "new_tokens",
    )
    settings = {key: getattr(given, key) for key in fixed}
    record = ScoringRecord(settings, provenance(command(), "cpu", "float32", "float32"), {})
    if given.out and given.out.exists():
        record = ScoringRecord.read(given.out)
        if record.settings | {"tasks": given.tasks} != settings:
            raise ValueError(f"`--out` (={given.out}) holds a record of other settings: {record.settings}")
        record.settings = settings
        record.provenance["command"] = command()  # an earlier one may have named other recipes
    with torch.no_grad():
        measure(given, record)
    record.write(given.out)
    return record


def write_rows(path: Path | str | None, settings: argparse.Namespace, rows: dict) -> None:
    """Write a script's rows with its options and its environment as JSON, if there is a file to write."""
    if path:
        shown = {key: str(value) if isinstance(value, Path) else value for key, value in vars(settings).items()}
        made = {"settings": shown, "provenance": provenance(command(), "cpu", "float32", "float32"), "rows": rows}
        write_whole(json.dumps(made, indent=1) + "\n", Path(path))


def command() -> str:
    """The command that started this process."""
    return shlex.join(["python", *sys.argv])
