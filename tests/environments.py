"""Make a Python environment in no time: one of its own, whose packages are links to those that are installed here."""

from __future__ import annotations

import re
import site
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection


def environment(folder: Path, *, without: Collection[str]) -> str:
    """Make a virtual environment with every installed distribution but some; give its Python.

    Of an editable Starwheel it has the version and not the code.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    target = next(folder.glob("lib/python*/site-packages"))
    named = {_plain(name) for name in without}
    found = {_plain(one.metadata["Name"]): one for one in metadata.distributions()}
    left_out = {top for name in named for top in _tops(found[name])}
    for installed in map(Path, site.getsitepackages()):
        for entry in installed.iterdir():
            if entry.name not in left_out and entry.suffix != ".pth" and entry.name != "__pycache__":
                (target / entry.name).symlink_to(entry)
    return str(folder / "bin" / "python")


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _tops(distribution: metadata.Distribution) -> set[str]:
    """Name the entries of site-packages that a distribution owns."""
    return {file.parts[0] for file in distribution.files or () if file.parts[0] != ".."}
