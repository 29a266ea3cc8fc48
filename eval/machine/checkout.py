"""The commit of the code that runs."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
# What runs. Other files of a checkout, such as the notebooks that papermill writes, do not change a result.
CODE = ("compress", "eval", "kernels", "notebooks", "reports", ":(exclude)reports/published")


def checkout() -> tuple[str | None, bool | None]:
    """The commit, and whether the packages differ from it or have files beside it; (None, None) without git."""

    def ask(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True, timeout=10)
        return done.stdout.strip()

    try:
        return ask("rev-parse", "HEAD"), bool(ask("status", "--porcelain", "--", *CODE))
    except (OSError, subprocess.SubprocessError):
        return None, None
