"""The model that a run saves: written under the attempt's name, and moved to its place when the run is finished.

<save_path>                       the model, with a manifest that names the run
.<save_path's name>.<attempt>.saving   files that an attempt is writing
.<save_path's name>.old                the former model, while the new one is moved to its place
"""

import contextlib
import glob
import os
import shutil
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eval.record.files import sync
from eval.record.manifest import MANIFEST, file_sha256, problems, seal
from eval.record.reading import read_json
from notebooks.study.parameters import OWN_FORMAT, SAVE_FORMAT

EDITABLE = ("README.md",)  # files of a saved model that a user may change
PAGE = "report.html"  # copied from the run, and not part of the model


@dataclass(frozen=True)
class SavedModel:
    """The folders of one run's saved model.

    Args:
        place: the run's `save_path`.
        key: of the run.
        save_format: of the model.
        attempt: the token of the attempt that writes; "" for a reader.
    """

    place: Path
    key: str
    save_format: str = OWN_FORMAT
    attempt: str = ""

    @property
    def part(self) -> Path:
        return self.place.with_name(f".{self.place.name}.{self.attempt}.saving")

    @property
    def old(self) -> Path:
        return self.place.with_name(f".{self.place.name}.old")

    def complete(self, attempts: Collection[str]) -> bool:
        """Whether the model exists, was saved by one of these attempts at this run in this format, and is complete."""
        own = read_json(self.place / MANIFEST).get("attempt", "") in attempts
        return own and self._format_there() == self.save_format and not problems(self.place, self.key, EDITABLE)

    def _format_there(self) -> str:
        return read_json(self.place / MANIFEST).get(SAVE_FORMAT, OWN_FORMAT)

    def check_free(self) -> None:
        """Raise ValueError if the place holds something other than a model of this run in this format."""
        if not self.place.exists() or self.place.is_dir() and not any(self.place.iterdir()):
            return
        record = read_json(self.place / "record.json", {"run": dict}).get("run", {})
        if self.key not in (read_json(self.place / MANIFEST).get("key"), record.get("key")):
            raise ValueError(
                f"`save_path` (={str(self.place)!r}) exists already, and was not saved by this run; give a new folder, "
                "or remove it first"
            )
        if (there := self._format_there()) != self.save_format:
            raise ValueError(
                f"`save_path` (={str(self.place)!r}) holds this run's model as {there}, and `save_format` is "
                f"{self.save_format!r}; give a new folder, or convert it to the other format with `workbench export "
                f"{self.place} --format {self.save_format}`"
            )

    def seal(self) -> None:
        """Write the manifest of the model that this attempt has saved.

        Raises:
            ValueError: the attempt has saved nothing.
        """
        if not self.part.is_dir() or not any(self.part.iterdir()):
            raise ValueError(f"`save_path` (={str(self.place)!r}): the notebook ended without saving a model")
        seal(self.part, {"key": self.key, "attempt": self.attempt, SAVE_FORMAT: self.save_format})

    def promote(self) -> None:
        """Move the model that this attempt has saved and sealed to its place, with the user's files that are there."""
        if self.place.exists():
            self._take_along()
            shutil.rmtree(self.old, ignore_errors=True)
            os.rename(self.place, self.old)
        os.rename(self.part, self.place)
        sync(self.place.parent)
        shutil.rmtree(self.old, ignore_errors=True)

    def _take_along(self) -> None:
        """Copy what the user has put or changed beside the former model: an edited card becomes `README.before.md`."""
        listed = read_json(self.place / MANIFEST).get("files", {})
        for path in sorted(self.place.rglob("*")) if listed else ():
            name = path.relative_to(self.place)
            if not path.is_file() or str(name) in (MANIFEST, PAGE):
                continue
            if str(name) in EDITABLE and file_sha256(path) != listed.get(str(name), {}).get("sha256"):
                name = name.with_suffix(f".before{name.suffix}")
            elif str(name) in listed:
                continue
            copy_whole(path, self.part / name)

    def recover(self, finished: str) -> None:
        """Finish a promotion that was killed, and remove files of killed attempts. Only for the lease's holder.

        Args:
            finished: the attempt that finished the run; "" for none.
        """
        own = replace(self, attempt=finished)
        if finished and own.part.is_dir() and not problems(own.part, self.key):
            with contextlib.suppress(ValueError):  # the user has put other files there since
                own.check_free()
                own.promote()
        if self.old.is_dir() and not self.place.exists():
            os.rename(self.old, self.place)
        self.discard()

    def discard(self) -> None:
        """Remove the files of attempts; the model in its place stays."""
        name, parent = glob.escape(self.place.name), self.place.parent
        for left in [self.old, *parent.glob(f".{name}.*.saving"), *parent.glob(f"..{name}.*.saving-*")]:
            shutil.rmtree(left, ignore_errors=True)


def copy_whole(source: Path, target: Path) -> None:
    """Copy a file, whole or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{os.urandom(6).hex()}.copy")
    try:
        shutil.copy2(source, part)
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


def check_save_path(values: dict[str, Any], key: str) -> None:
    """Raise ValueError if `save_path` holds something other than the model of the run of this key."""
    if model := saved_model(values, key):
        model.check_free()


def saved_model(values: dict[str, Any], key: str, attempt: str = "") -> SavedModel | None:
    """The saved model of a run with these parameters; None if it saves none."""
    if not values.get("save_path"):
        return None
    place = Path(values["save_path"]).expanduser().absolute()
    return SavedModel(place, key, values.get(SAVE_FORMAT, OWN_FORMAT), attempt)
