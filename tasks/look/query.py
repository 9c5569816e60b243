"""Ask SQL of a run: one view an artifact, with iteration, step and label before its columns; reading only."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

import duckdb

from storage.errors import DataError
from storage.schema import SCHEMAS
from tasks.look.contents import connect, literal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tasks.look.contents import Contents


class View(NamedTuple):
    """Describe a view: its rows over all iterations, and its columns."""

    name: str
    rows: int
    columns: tuple[str, ...]


class Answer(NamedTuple):
    """Hold the first rows of a result; `more` tells that there are others."""

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    more: bool


def views(contents: Contents) -> list[View]:
    """List the views that a run has."""
    found = [(kind, contents.placed(kind)) for kind in SCHEMAS]
    return [
        View(kind, sum(one.artifact.rows for one in placed), ("iteration", "step", "label", *SCHEMAS[kind].names))
        for kind, placed in found
        if placed
    ]


def query(contents: Contents, sql: str, *, limit: int) -> Answer:
    """Run one SELECT over a run's views and give its first rows; only artifacts that it names are fetched.

    Behind the views every file but theirs is shut: a query can neither read the machine nor write to it. Raises
    DataError for what is no query, and with DuckDB's words for a wrong one.
    """
    with contents.store.cache.scratch() as folder, connect(temp_directory=str(folder)) as connection:
        _make_views(connection, contents, sql)
        try:
            asked = connection.extract_statements(sql)
            if len(asked) != 1 or asked[0].type != duckdb.StatementType.SELECT:
                raise DataError(f"{sql[:80]!r}: give one SELECT; a run is read, never changed")
            found = connection.execute(asked[0])
            columns = _unlike([column[0] for column in found.description or ()])
            rows = found.fetchmany(limit + 1)
        except RuntimeError as error:  # DuckDB's word for Ctrl-C
            if "interrupted" in str(error):
                raise KeyboardInterrupt from None
            raise
        except duckdb.Error as error:
            what = str(error).strip().splitlines()[0].rstrip("!.")
            known = ", ".join(view.name for view in views(contents)) or "none yet"
            raise DataError(f"{contents.history.run_id}: {what}; the views are {known}") from None
    return Answer(columns, rows[:limit], len(rows) > limit)


def _unlike(names: Sequence[str]) -> tuple[str, ...]:
    """Give columns of one name a number, so that none is lost where rows are keyed by them."""
    return tuple(
        f"{name}_{names[:at].count(name) + 1}" if name in names[:at] else name for at, name in enumerate(names)
    )


def _make_views(connection: duckdb.DuckDBPyConnection, contents: Contents, sql: str) -> None:
    """Make the views that a query names and shut all else."""
    wanted = [view.name for view in views(contents) if re.search(rf"\b{view.name}\b", sql, re.IGNORECASE)]
    placed = {kind: contents.placed(kind) for kind in wanted}
    for kind, artifacts in placed.items():
        connection.execute(f"CREATE VIEW {kind} AS SELECT * FROM {contents.relation(artifacts)}")
    files = sorted({str(path) for one in placed.values() for paths in contents.fetch(one).values() for path in paths})
    connection.execute(f"SET allowed_paths = [{', '.join(map(literal, files))}]")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")
