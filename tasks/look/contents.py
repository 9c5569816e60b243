"""Know what a run committed, artifact by artifact, and give DuckDB the verified files."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import duckdb

from storage.errors import DataError
from storage.schema import JUDGMENT_ID
from tasks.earlier import Earlier, Place, read_earlier
from tasks.history import read_history

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from storage.manifest import Artifact, Manifest
    from storage.store import Store
    from tasks.history import History

_FETCHERS = 8
# Nothing is loaded from elsewhere: no extension, no Python variable that is called like a table.
_SETTINGS = {
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "python_enable_replacements": "false",
}


@dataclass(frozen=True)
class Placed:
    """Name an artifact and the step that made it."""

    place: Place
    artifact: Artifact


@dataclass(frozen=True)
class Contents:
    """Hold what a run committed, in the order of its log; `lost` are steps that were voided or lost since."""

    store: Store
    history: History
    earlier: Earlier

    @property
    def manifests(self) -> Mapping[Place, Manifest]:
        """Give the manifests by their place."""
        return self.earlier.manifests

    @cached_property
    def lost(self) -> Sequence[Place]:
        """Name the steps that the run used and that can't be read any more."""
        used = (Place(one.iteration, one.step, one.label) for one in self.history.used)
        return [place for place in used if place not in self.manifests]

    def name(self, digest: str) -> str:
        """Say what a model's digest stands for in this run: `checkpoint 2`, `the base model`; else its beginning."""
        return self.earlier.known.names.get(digest, digest[:12])

    def placed(self, kind: str, iteration: int | None = None, step: str = "") -> list[Placed]:
        """Give the artifacts of a kind; `step` is a step's name, or name and the beginning of its label, in words."""
        return [
            Placed(place, manifest.artifacts[kind])
            for place, manifest in self.manifests.items()
            if kind in manifest.artifacts and iteration in (None, place.iteration) and _called(place, step)
        ]

    def asked(self, kind: str, iteration: int, step: str = "") -> list[Placed]:
        """Give the artifacts that a user names; DataError, saying what there is, where there are none."""
        found = self.placed(kind, iteration, step)
        if found:
            return found
        here = {place: one for place, one in self.manifests.items() if place.iteration == iteration}
        where = f"{self.store.url}: {self.history.run_id}"
        if not here:
            known = ", ".join(str(one) for one in sorted({place.iteration for place in self.manifests}))
            raise DataError(f"{where} has no iteration {iteration}; it has {known or 'none yet'}")
        if step and self.placed(kind, iteration):
            steps = [_words(one.place) for one in self.placed(kind, iteration)]
            raise DataError(f"{where}, iteration {iteration}: no step {step!r} made {kind}; made by {_list(steps)}")
        kinds = dict.fromkeys(name for one in here.values() for name in one.artifacts)
        raise DataError(f"{where}, iteration {iteration}: there is no artifact {kind!r}; there are {_list(kinds)}")

    def beside(self, kind: str, placed: Sequence[Placed]) -> list[Placed]:
        """Give the artifacts of another kind that hold the same judgments: texts of verdicts, verdicts of texts."""
        subjects = {(one.place.iteration, subject(one.place)) for one in placed}
        return [one for one in self.placed(kind) if (one.place.iteration, subject(one.place)) in subjects]

    def split(self, kind: str) -> str:
        """Write the SQL of an artifact of the split; DataError where it is lost or not made yet."""
        placed = self.placed(kind)
        if placed:
            return self.relation(placed)
        raise DataError(
            f"{self.store.url}: the {kind} of {self.history.run_id} are lost or not made yet; "
            f"`starwheel resume {self.history.run_id}` makes them"
        )

    def pair(self, beginning: str) -> str:
        """Give the id of the one pair that begins so, kept or dropped; DataError where none or several do."""
        sql = f"SELECT DISTINCT pair_id FROM {self.split('splits')} WHERE starts_with(pair_id, ?) ORDER BY ALL LIMIT 6"
        found = [str(row["pair_id"]) for row in self.select(sql, [beginning])]
        if len(found) == 1:
            return found[0]
        which = f"it may be {_list(found[:5])}" if found else "`starwheel rows RUN 0 pairs` lists the pairs"
        raise DataError(f"{self.store.url}: {self.history.run_id} has no one pair {beginning}; {which}")

    def fetch(self, placed: Sequence[Placed]) -> dict[Place, list[Path]]:
        """Give verified local copies of the artifacts' files."""
        with ThreadPoolExecutor(_FETCHERS) as pool:
            files = pool.map(lambda one: self.store.fetch(one.artifact), placed)
        return dict(zip((one.place for one in placed), files, strict=True))

    def relation(self, placed: Sequence[Placed], *, position: bool = False) -> str:
        """Write the SQL of all rows of some artifacts of one kind, with iteration, step and label before the columns.

        `position` adds `filename` and `file_row_number`, which name a row. A completion that was mended stands in for
        what was sampled, where both are asked for.
        """
        options = ", filename = true, file_row_number = true" if position else ""
        parts, files = [], self.fetch(placed)
        for place, paths in files.items():
            part = (
                f"SELECT {place.iteration}::INTEGER AS iteration, {literal(place.step)} AS step, "
                f"{literal(place.label)} AS label, * FROM {_parquet(paths, options)}"
            )
            mended = files.get(place._replace(step="repair"))
            if place.step == "sample" and mended:
                ids = ", ".join(map(quoted, JUDGMENT_ID))
                part += f" WHERE ({ids}) NOT IN (SELECT ({ids}) FROM {_parquet(mended)})"
            parts.append(part)
        return f"({' UNION ALL '.join(parts)})"

    def select(self, sql: str, values: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """Run a query of ours and give its rows, which are few."""
        found = self._database.cursor().execute(sql, list(values))
        names = [column[0] for column in found.description or ()]
        return [dict(zip(names, row, strict=True)) for row in found.fetchall()]

    @cached_property
    def _database(self) -> duckdb.DuckDBPyConnection:
        return connect()


def read_contents(store: Store, run_id: str) -> Contents:
    """Read what a run committed, from its log."""
    history = read_history(store, run_id)
    return Contents(store, history, read_earlier(store, [history]))


def connect(**settings: str) -> duckdb.DuckDBPyConnection:
    """Open a DuckDB in memory that reads the files it is told and loads nothing from elsewhere."""
    return duckdb.connect(":memory:", config={**_SETTINGS, **settings})


def _parquet(files: Iterable[Path], options: str = "") -> str:
    return f"read_parquet([{', '.join(map(literal, files))}]{options})"


def literal(value: object) -> str:
    """Write a string literal of SQL."""
    return "'" + str(value).replace("'", "''") + "'"


def quoted(name: str) -> str:
    """Write a column's name in SQL; `order` and `group` are words of SQL too."""
    return f'"{name}"'


def subject(place: Place) -> str:
    """Say whose judgments a step makes or takes: `test` or `base test`, nothing of an iteration's training part."""
    return re.split(r" (?:ab|ba) ", place.label)[0] if place.step in ("evaluate", "score") else ""


def _called(place: Place, step: str) -> bool:
    """Say whether a step is meant by its name, or by its name and the first words of its label."""
    words = step.split()
    return _words(place).split()[: len(words)] == words


def _words(place: Place) -> str:
    return f"{place.step} {place.label}".strip()


def _list(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
