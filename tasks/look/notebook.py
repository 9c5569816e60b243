"""Hand an artifact to a notebook: verified local files, or the one line that reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_LINES = {
    "datasets": 'import datasets; rows = datasets.load_dataset("parquet", data_files={files}, split="train")',
    "pandas": "import pandas; rows = pandas.concat(map(pandas.read_parquet, {files}), ignore_index=True)",
    "polars": "import polars; rows = polars.read_parquet({files})",
}
LIBRARIES = tuple(_LINES)


def reading_line(files: Sequence[Path], library: str) -> str:
    """Write the line of Python that reads the files with a library."""
    return _LINES[library].format(files=[str(file) for file in files])
