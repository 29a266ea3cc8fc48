"""The model that a run saves: written under the attempt's name, and put in its place once the run is finished.

<save_path>                       the model, with a manifest that names the run
.<save_path's name>.<attempt>.saving   what an attempt is writing
.<save_path's name>.old                the former model, for as long as the new one is being put in its place
"""

import glob
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from eval.record.files import sync
from eval.record.manifest import MANIFEST, problems, read_json, seal


@dataclass(frozen=True)
class SavedModel:
    """The folders of one run's saved model.

    Args:
        place: the run's `save_path`.
        key: of the run.
        attempt: the token of the attempt that writes; "" for a reader.
    """

    place: Path
    key: str
    attempt: str = ""

    @property
    def part(self) -> Path:
        return self.place.with_name(f".{self.place.name}.{self.attempt}.saving")

    @property
    def old(self) -> Path:
        return self.place.with_name(f".{self.place.name}.old")

    def complete(self) -> bool:
        """Whether the model is there, saved by this run, and whole."""
        return not problems(self.place, self.key)

    def check_free(self) -> None:
        """Raise ValueError if the place holds something other than a model of this run."""
        if not self.place.exists() or self.place.is_dir() and not any(self.place.iterdir()):
            return
        record = read_json(self.place / "record.json").get("run") or {}
        if self.key not in (read_json(self.place / MANIFEST).get("key"), record.get("key")):
            raise ValueError(
                f"`save_path` (={str(self.place)!r}) exists already, and was not saved by this run; give a new folder, "
                "or remove it first"
            )

    def seal(self) -> None:
        """Write the manifest of what this attempt has saved.

        Raises:
            ValueError: the attempt has saved nothing.
        """
        if not self.part.is_dir() or not any(self.part.iterdir()):
            raise ValueError(f"`save_path` (={str(self.place)!r}): the notebook ended without saving a model")
        seal(self.part, {"key": self.key, "attempt": self.attempt})

    def promote(self) -> None:
        """Put what this attempt has saved and sealed in its place."""
        if self.place.exists():
            shutil.rmtree(self.old, ignore_errors=True)
            os.rename(self.place, self.old)
        os.rename(self.part, self.place)
        sync(self.place.parent)
        shutil.rmtree(self.old, ignore_errors=True)

    def recover(self, finished: str) -> None:
        """Finish a promotion that was killed, and remove what attempts left that were. For the holder of the lease.

        Args:
            finished: the attempt that finished the run; "" for none.
        """
        if finished:
            own = SavedModel(self.place, self.key, finished)
            if own.part.is_dir() and not problems(own.part, self.key):
                own.promote()
        if self.old.is_dir() and not self.place.exists():
            os.rename(self.old, self.place)
        self.discard()

    def discard(self) -> None:
        """Remove what attempts have left; the model in its place stays."""
        name, parent = glob.escape(self.place.name), self.place.parent
        for left in [self.old, *parent.glob(f".{name}.*.saving"), *parent.glob(f"..{name}.*.saving-*")]:
            shutil.rmtree(left, ignore_errors=True)


def check_save_path(save_path: str | None, key: str) -> None:
    """Raise ValueError if `save_path` holds something other than a model of the run of this key."""
    if model := saved_model(save_path, key):
        model.check_free()


def saved_model(save_path: str | None, key: str, attempt: str = "") -> SavedModel | None:
    """The saved model of a run with this `save_path`; None where it saves none."""
    return SavedModel(Path(save_path).expanduser().absolute(), key, attempt) if save_path else None
