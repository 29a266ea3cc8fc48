"""Versions of installed packages, in a module of its own so that reading them does not import torch."""

import importlib.metadata
import platform
from collections.abc import Iterable


def versions(packages: Iterable[str]) -> dict[str, str]:
    """The versions of Python and of the installed ones of these packages."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
