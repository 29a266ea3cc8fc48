"""A saved checkpoint: its files with their sizes, and the result of its verification."""

from dataclasses import dataclass
from html import escape
from pathlib import Path

from compress.checkpoint.save_format import Verification
from eval.record.html import html_table


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was written, loaded again and compared; shows itself as text and in Jupyter.

    Attributes:
        files: bytes of each of its files, the largest first.
        seconds: the time for writing and verifying.
        source_bytes: of the checkpoint from which it was made, if there was one.
    """

    folder: Path
    save_format: str
    files: dict[str, int]
    verification: Verification
    seconds: float
    source_bytes: int | None = None

    @classmethod
    def of(cls, folder: Path, save_format: str, seconds: float, source_bytes: int | None = None) -> "Saved":
        return cls(folder, save_format, file_sizes(folder), Verification.read(folder), seconds, source_bytes)

    def lines(self) -> list[str]:
        """Lines about the checkpoint, without its files."""
        total = f"{sum(self.files.values()) / 1e6:,.1f} MB in all"
        if self.source_bytes is not None:
            total += f"; {self.source_bytes / 1e6:,.1f} MB in the workbench's own format"
        return [
            total,
            f"loaded again by {self.verification.reader}: {self.verification}",
            *(f"- {remark}" for remark in self.verification.remarks),
            f"written and verified in {self.seconds:.0f} s",
        ]

    def __str__(self) -> str:
        widest = max(map(len, self.files))
        listed = [f"  {name:<{widest}}  {size:>14,} bytes" for name, size in self.files.items()]
        return "\n".join([f"saved as {self.save_format}: {self.folder}", *listed, *self.lines()])

    def _repr_html_(self) -> str:
        rows = html_table((), ((name, f"{size:,} bytes") for name, size in self.files.items()))
        said = "".join(f"<p>{escape(line)}</p>" for line in self.lines())
        place = f"<p>Saved as <b>{self.save_format}</b> in <code>{escape(str(self.folder))}</code></p>"
        return f"{place}<details><summary>{len(self.files)} files</summary>{rows}</details>{said}"


def file_sizes(folder: Path) -> dict[str, int]:
    """Bytes of each file of a folder, the largest first."""
    found = {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    return dict(sorted(found.items(), key=lambda item: -item[1]))
