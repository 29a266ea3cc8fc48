"""The picture of README.md, reports/published/report.png: the top of the page of the record whose table README shows.

$ python tests/reports/picture.py       # or: make picture
"""

import hashlib
import re
import shutil
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from eval.record.schema import read_record
from reports.page.render import page

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "reports" / "published" / "report.png"
RECORD = "record sha256"  # the text of the picture that names its record


def record_of_readme() -> Path:
    """The record of README's first table."""
    return ROOT / re.search(r"<!-- workbench table (\S+) -->", (ROOT / "README.md").read_text(encoding="utf-8"))[1]


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def take() -> None:
    """Draw the page in Chromium, and write its top with the hash of the record."""
    from playwright.sync_api import sync_playwright

    record = record_of_readme()
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        tab = browser.new_page(viewport={"width": 1100, "height": 900})
        tab.set_content(page(read_record(record)))
        tab.screenshot(path=PICTURE)
        browser.close()
    said = PngInfo()
    said.add_text(RECORD, digest(record))
    Image.open(PICTURE).convert("P", palette=Image.Palette.ADAPTIVE).save(PICTURE, optimize=True, pnginfo=said)


if __name__ == "__main__":
    take()
