"""GGUF files of llama.cpp with an importance matrix, and of this workbench, from the same text.

    python seeds/peers/make_gguf.py --models smollm2-135m --make "gptq(bits=4, group_size=32, grid=iq4_nl)"

runs after `make interop`, whose environment of llama.cpp it uses. `--make` names recipes, which are applied on the
calibration windows of the importance matrix and saved as GGUF files. Files that are there are kept;
seeds/bytes_and_loss.py scores and times them (`--others`).
"""

import argparse
import re
import subprocess
from pathlib import Path

import interop_work as work
import torch
from interop_environments import environment_variables
from tqdm.auto import tqdm

from compress import apply, load_model, save_compressed
from compress.checkpoint.save import write_checkpoint
from compress.checkpoint.save_format import Checkpoint, CheckpointInfo
from compress.inputs.calibration import calibration
from compress.recipe import parse_recipe
from kernels.support.deploy import cast

TYPES = ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_0", "IQ4_NL", "IQ4_XS", "Q3_K_M", "IQ3_M", "IQ3_XXS", "Q2_K", "IQ2_M")


def source_file(folder: Path, model_name: str) -> Path:
    """The uncompressed model in 16 bits, written by our own writer."""
    target = folder / "source"
    if not target.is_dir():
        model, tokenizer = load_model(model_name)
        info = CheckpointInfo(recipe=[], model={"name": model_name}, calibration=None)
        write_checkpoint(Checkpoint(cast(model, torch.bfloat16), tokenizer, info), target, "gguf")
    return work.checkpoint_file(target)


def made(options: argparse.Namespace, folder: Path, model_name: str, recipe: str) -> Path:
    """The GGUF file of a recipe of ours."""
    target = folder / f"ours-{options.samples}-{re.sub('[^a-z0-9]+', '-', recipe.lower()).strip('-')}"
    if not target.is_dir():
        model, tokenizer = load_model(model_name)
        batches = calibration(tokenizer, **calibrated(options))
        save_compressed(apply(parse_recipe(recipe), model, batches), target, tokenizer, save_format="gguf")
    return work.checkpoint_file(target)


def calibrated(options: argparse.Namespace) -> dict[str, str | int]:
    """The tokens for our recipes and for the importance matrix."""
    return {"corpus": options.calibration, "samples": options.samples, "seqlen": options.seqlen}


def calibration_text(options: argparse.Namespace, folder: Path, model_name: str) -> Path:
    """The text of the calibration windows of our recipes."""
    _, tokenizer = load_model(model_name)
    batches = calibration(tokenizer, **calibrated(options))
    path = folder / f"calibration-{options.samples}.txt"
    path.write_text("\n\n".join(tokenizer.decode(batch[0], skip_special_tokens=True) for batch in batches))
    return path


def quantised(options: argparse.Namespace, folder: Path, model_name: str) -> list[Path]:
    """The model in 16 bits, and llama.cpp's own files."""
    source = source_file(folder, model_name)
    matrix = folder / f"importance-{options.samples}.gguf"
    if not matrix.is_file():
        text = calibration_text(options, folder, model_name)
        program(options, "llama-imatrix", "-m", source, "-f", text, "-o", matrix, "-c", str(options.seqlen))
    files = [folder / f"{kind}-{options.samples}.gguf" for kind in options.types]
    for kind, file in zip(options.types, files, strict=True):
        if not file.is_file():
            program(options, "llama-quantize", "--imatrix", matrix, source, file, kind)
    return [source, *files]


def program(options: argparse.Namespace, name: str, *command: str | Path) -> None:
    """Run one of llama.cpp's programs.

    Raises:
        RuntimeError: it fails; the message has its last lines.
    """
    place = (options.environments / "llamacpp").absolute()
    line = [str(place / "build" / "bin" / name), *(str(part) for part in command)]
    if name != "llama-quantize":
        line += ["-t", str(options.threads)]
    done = subprocess.run(line, env=environment_variables(place, options.threads), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name} fails: {done.stderr[-500:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=work.MODELS)
    parser.add_argument("--calibration", default="c4")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--environments", type=Path, default=Path(".venv-interop"))
    parser.add_argument("--work", type=Path, default=Path("runs/interop"))
    parser.add_argument("--types", nargs="+", default=TYPES, help="of llama-quantize")
    parser.add_argument("--samples", type=int, default=work.SAMPLES, help="calibration windows")
    parser.add_argument("--seqlen", type=int, default=work.SEQLEN, help="tokens in each")
    parser.add_argument("--make", nargs="*", default=[], help="recipes")
    options = parser.parse_args()
    for model in tqdm(options.models, unit="model"):
        folder = options.work / model / "gguf-peers"
        folder.mkdir(parents=True, exist_ok=True)
        files = [*quantised(options, folder, model), *(made(options, folder, model, recipe) for recipe in options.make)]
        print(*files, sep="\n")


if __name__ == "__main__":
    main()
