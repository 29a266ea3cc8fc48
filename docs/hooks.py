"""The guides as a site: MkDocs reads the Markdown files where they lie, so that their links work on the site as well as
in the repository. `make docs` builds it, and `tests/test_guides.py` checks the links without a generator.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("compress", "eval", "kernels", "notebooks", "reports", "seeds")
FENCED = re.compile(r"^```.*?^```$", re.S | re.M)
# A link or an image with its target, or code, in which nothing is a link.
_LINK = re.compile(r"^```.*?^```$|(\[(?:[^\[\]]|\[[^\]]*\](?:\([^()]*\))?)*\])\(([^()\s]+)\)|`[^`]+`", re.S | re.M)
_ELSEWHERE = re.compile(r"https?:|mailto:")


def guides() -> list[Path]:
    """All Markdown pages of the repository."""
    return sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))])


def links(page: Path) -> Iterator[tuple[str, Path, str]]:
    """(link, file, anchor or "") of each link of a page that leads into the repository."""
    for match in _LINK.finditer(page.read_text(encoding="utf-8")):
        if match[2] and not _ELSEWHERE.match(match[2]):
            yield match[2], *_target(page, match[2])


def slug(heading: str, separator: str = "-") -> str:
    """The anchor of a heading, as GitHub makes it: `On a GPU` has on-a-gpu."""
    text = re.sub(r"\]\([^()]*\)", "", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", separator)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings."""
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    return {slug(heading) for heading in re.findall(r"^#{1,6} (.*)$", text, re.M)}


def _target(page: Path, link: str) -> tuple[Path, str]:
    path, _, anchor = link.partition("#")
    return (page.parent / path).resolve() if path else page, anchor


def on_config(config: Any) -> Any:
    """Called by MkDocs: headings get the anchors that they have on GitHub."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = slug
    return config


def on_files(files: Any, config: Any) -> Any:
    """Called by MkDocs: the site has all guides, and every file to which one of them links."""
    from mkdocs.structure.files import File

    pages = guides()
    linked = {file for page in pages for _, file, _ in links(page)}
    for path in (*pages, *sorted(path for path in linked.difference(pages) if path.is_file())):
        name = path.relative_to(ROOT).as_posix()
        files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by MkDocs: a link to a folder becomes text, because the site shows no folders."""
    here = Path(page.file.abs_src_path)

    def shown(match: re.Match[str]) -> str:
        inside = match[2] and not _ELSEWHERE.match(match[2])
        return match[1][1:-1] if inside and _target(here, match[2])[0].is_dir() else match[0]

    return _LINK.sub(shown, markdown)
