"""A saved model of a command line, and the model from which it was made, found before anything is loaded."""

import re
import sys
from pathlib import Path

_CARD = re.compile(r"\A---\n(.*?)\n---", re.S)


def model_argument() -> tuple[str, dict[str, str]]:
    """The positional argument that names the model."""
    about = "folder of a saved model, ours or of others; or whatever else load_model reads: a .gguf file, a hub id"
    return "model", {"metavar": "DIR", "help": about}


def baseline_option(parser) -> None:
    """The option that names the model from which it was made."""
    parser.add_argument(
        "--baseline",
        metavar="MODEL",
        default="",
        help="the original model (default: the one that the folder names, in compression.json or as base_model)",
    )


def check_model(name: str, argument: str = "DIR") -> None:
    """Raise ValueError, before anything is loaded, if this is no model that can be read."""
    from compress.inputs.skeleton import skeleton

    try:
        skeleton(name)
    except ValueError as error:
        raise ValueError(str(error).replace("`model_name` (=", f"`{argument}` (=")) from error


def check_device(device: str) -> None:
    """Raise ValueError if this machine has no such device."""
    from compress.inputs import model

    try:
        model.check_device(device)
    except ValueError as error:
        raise ValueError(str(error).replace("`device`", "`--device`")) from error


def baseline_of(name: str, given: str, *, needed: bool = False) -> str:
    """The original of a saved model; "" if it is not known, or not there, with a line that says so.

    Args:
        given: the value of `--baseline`, which must be a model if it is not "".
        needed: raise an error instead of giving "".

    Raises:
        ValueError: the model that was named cannot be read, or one is needed and not known.
    """
    if given:
        check_model(given, "--baseline")
        return given
    found, why = _named_by(Path(name).expanduser()), "its folder names no original model"
    if found:
        try:
            check_model(found, "--baseline")
            return found
        except ValueError as error:
            why = f"its original cannot be read: {error}"
    if needed:
        raise ValueError(f"`DIR` (={name!r}): {why}; name one with --baseline")
    print(f"workbench: {why}; --baseline names one to compare with", file=sys.stderr)
    return ""


def _named_by(folder: Path) -> str:
    """The original model that a folder names: as our checkpoints do, or in the model card's `base_model`."""
    import yaml

    from compress.checkpoint.save_format import CheckpointInfo

    try:
        return str(CheckpointInfo.read(folder).model["name"])
    except (ValueError, KeyError, TypeError):  # not ours, or damaged
        pass
    try:
        card = _CARD.match((folder / "README.md").read_text(encoding="utf-8"))
        named = (yaml.safe_load(card[1]) if card else {}).get("base_model", "")
    except (OSError, ValueError, AttributeError, yaml.YAMLError):
        return ""
    return str(named[0] if isinstance(named, list) and named else named or "")
