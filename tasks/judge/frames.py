"""Cross between Arrow tables, which the steps speak, and Polars frames, which the pure core computes with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl
import pyarrow as pa

from storage.schema import SCHEMAS

if TYPE_CHECKING:
    from collections.abc import Sequence


def frame(table: pa.Table) -> pl.DataFrame:
    """View an Arrow table as a frame."""
    made = pl.from_arrow(table)
    assert isinstance(made, pl.DataFrame)
    return made


def series(column: pa.ChunkedArray) -> pl.Series:
    """View an Arrow column as a series."""
    made = pl.from_arrow(column)
    assert isinstance(made, pl.Series)
    return made


def table(rows: pl.DataFrame, artifact: str) -> pa.Table:
    """Give a frame's columns as a table of an artifact's schema."""
    schema = SCHEMAS[artifact]
    return plain(rows.select(schema.names)).cast(schema)


def plain(rows: pl.DataFrame) -> pa.Table:
    """Give a frame as an Arrow table of large strings."""
    made = rows.to_arrow(compat_level=pl.CompatLevel.oldest())
    assert isinstance(made, pa.Table)
    return made


def numbered(rows: pl.DataFrame, keys: Sequence[str], name: str) -> pl.DataFrame:
    """Give each distinct key a number, so that what follows groups by whole numbers instead of long names."""
    distinct = rows.select(keys).unique().with_row_index(name)
    return rows.join(distinct, on=list(keys), how="left", maintain_order="left")
