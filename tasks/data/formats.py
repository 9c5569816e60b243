"""Read preference pairs from Parquet, JSONL or a table in memory: every row becomes a pair or a reason.

Layouts, told apart by the columns and named in `Reading.layout`:

- `prompt`, `chosen`, `rejected`: the first response is the better one. `prompt` may be left out where both are lists of
  messages that begin with it.
- `prompt`, `response_a`, `response_b`, `label`: A, B (also a, b) or a tie (tie, tied, draw, equal, same, both, neither).

A prompt is a text or a list of {role, content}; so is a response, whose last message is what is judged. Optional: `group`
(pairs of one group are never parted), `source`, `subset`; `id` and columns that begin with `rationale` are carried along.
Other columns are left alone. Blank lines of a JSONL file are no rows.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from storage.errors import DataError
from storage.schema import SCHEMAS, Split
from tasks.data.pairing import MAX_ROW, BadRow, Entry, Layout, Reason, clean, twin_keys

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

VERSION = 1  # part of the step keys: raise it when the same file gives other pairs, ids or reasons

HEAD = 1000  # objects the layout is told from
NEEDED = {
    Layout.CHOSEN: ("prompt", "chosen", "rejected"),
    Layout.LABELLED: ("prompt", "response_a", "response_b", "label"),
}
KNOWN = {"prompt", "chosen", "rejected", "response_a", "response_b", "label", "group", "source", "subset", "id"}
REFUSED = (  # how files begin that are neither Parquet nor JSONL, and what to do with them
    (b"version https://git-lfs", "is a Git LFS pointer, not the data: run `git lfs pull` where it comes from"),
    (b"PK\x03\x04", "is a zip archive: unzip it and name the file inside"),
    (b"\x1f\x8b", "is gzipped: gunzip it first"),
    (b"BZh", "is compressed with bzip2: unpack it first"),
    (b"\x28\xb5\x2f\xfd", "is compressed with zstd: unpack it first"),
    (b"\xfd7zXZ", "is compressed with xz: unpack it first"),
    (b"\xff\xfe", "is UTF-16: convert it to UTF-8"),
    (b"\xfe\xff", "is UTF-16: convert it to UTF-8"),
    (b"ARROW1", "is an Arrow file: write it as Parquet"),
)

Row = tuple[int, "Mapping[str, object] | BadRow"]


@dataclass(frozen=True)
class Reading:
    """Hold what became of the rows of a source (or of several): rows in = pairs + dropped, always.

    pairs: `pairs`, no id twice. ledger: `splits`, one row a source row, in their order; the rows whose split is null are
    the rows of `pairs`, in the same order. extras: pair_id and the columns carried along, row by row like `pairs`.
    """

    pairs: pa.Table
    ledger: pa.Table
    extras: pa.Table
    layout: str

    @property
    def dropped(self) -> pa.Table:
        """Give the ledger's rows that are in no split, with reason and detail."""
        return self.ledger.filter(pa.compute.equal(self.ledger["split"], Split.DROPPED.value))

    @property
    def counts(self) -> dict[str, int | dict[str, int]]:
        """Count rows in, pairs kept and rows dropped by reason."""
        reasons = Counter(self.dropped["reason"].to_pylist())
        return {"in": self.ledger.num_rows, "kept": self.pairs.num_rows, "dropped": dict(sorted(reasons.items()))}

    def drop(self, reason: pl.Series, detail: pl.Series) -> Reading:
        """Drop the pairs whose reason (one a pair) is not null."""
        nameless = [Reason.DUPLICATE, Reason.CONFLICTING_LABEL]  # a pair id stands in one row of the ledger
        gone = reason.is_not_null()
        mark = pl.when(gone)
        changed = self._open().with_columns(
            pair_id=pl.when(reason.is_in(nameless).fill_null(False)).then(None).otherwise(pl.col("pair_id")),
            split=mark.then(pl.lit(Split.DROPPED.value)),
            reason=mark.then(reason),
            detail=mark.then(detail),
        )
        kept = pa.array((~gone).to_list(), pa.bool_())
        return Reading(self.pairs.filter(kept), self._put_back(changed), self.extras.filter(kept), self.layout)

    def assign(self, split: pl.Series) -> pa.Table:
        """Give the ledger with the name of a split (one a pair) filled in: the `splits` artifact."""
        return self._put_back(self._open().with_columns(split=split.cast(pl.String)))

    def sources(self) -> pl.Series:
        """Give the name of the source each pair was read from."""
        return self._open()["source"]

    def _open(self) -> pl.DataFrame:
        return _polars(self.ledger).with_row_index("_at").filter(pl.col("split").is_null())

    def _put_back(self, changed: pl.DataFrame) -> pa.Table:
        rest = _polars(self.ledger).with_row_index("_at").filter(pl.col("split").is_not_null())
        whole = pl.concat([rest, changed.select(rest.columns)]).sort("_at").drop("_at")
        return whole.to_arrow().cast(SCHEMAS["splits"])


def read_pairs(origin: Path | str | pa.Table, *, name: str) -> Reading:
    """Read a file or table as pairs of the source `name`; raise DataError where the whole is no such thing."""
    where = f"the table of {name!r}" if isinstance(origin, pa.Table) else str(origin)
    columns, rows = _rows(origin, where)
    head = _head(rows)
    found = columns if columns is not None else _keys(head)
    if not head:
        raise DataError(f"{where} has no rows: give at least one pair.")
    layout = _detect(found, [record for _, record in head if not isinstance(record, BadRow)], where)
    carried = [column for column in found if column == "id" or column.startswith("rationale")]
    entries, places, bad = [], [], []
    try:
        for place, record in chain(head, rows):
            try:
                if isinstance(record, BadRow):
                    raise record
                entries.append(clean(record, layout, name=name, carried=carried))
                places.append(place)
            except BadRow as row:
                bad.append((place, row))
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{where} is damaged ({_line(error)}): fetch or write it again.") from error
    ledger = _ledger(name, entries, places, bad)
    twins = pl.DataFrame({"twin": [entry.twin for entry in entries], "low": [entry.low for entry in entries]})
    return _drop_twins(Reading(_pairs(entries), ledger, _extras(entries, carried), layout.value), twins)


def combine(readings: Sequence[Reading]) -> Reading:
    """Put the readings of several sources together, in order; pairs that occur in two of them are dropped like twins in one."""
    pairs = pa.concat_tables([reading.pairs for reading in readings])
    ledger = pa.concat_tables([reading.ledger for reading in readings])
    extras = pa.concat_tables([reading.extras for reading in readings], promote_options="default")
    layout = ", ".join(dict.fromkeys(reading.layout for reading in readings))
    whole = Reading(pairs, ledger, extras, layout)
    if len(readings) == 1:
        return whole
    twins, lows = twin_keys(pairs)
    return _drop_twins(whole, pl.DataFrame({"twin": twins, "low": lows}))


def _drop_twins(reading: Reading, twins: pl.DataFrame) -> Reading:
    """Keep the first of the pairs with the same content and winner, none of those with contradicting winners."""
    place = pl.concat_str(pl.col("source"), pl.lit(" row "), pl.col("row"))
    first = pl.struct("source", "row").first().over("twin")
    frame = pl.concat([reading._open().select("source", "row"), twins], how="horizontal").with_columns(
        conflict=pl.col("low").n_unique().over("twin") > 1,
        again=pl.struct("source", "row") != first,
        first=place.first().over("twin"),
        other=place.last().over("twin"),
    )
    conflict, again = pl.when("conflict"), pl.when("again")
    other = pl.when("again").then("first").otherwise("other")
    frame = frame.select(
        reason=conflict.then(pl.lit(Reason.CONFLICTING_LABEL.value)).otherwise(
            again.then(pl.lit(Reason.DUPLICATE.value)).otherwise(None)
        ),
        detail=conflict.then(pl.lit("also ") + other).otherwise(again.then(pl.lit("of ") + pl.col("first"))),
    )
    return reading.drop(frame["reason"], frame["detail"])


def _rows(origin: Path | str | pa.Table, where: str) -> tuple[list[str] | None, Iterator[Row]]:
    """Give the columns, where they are declared, and the rows."""
    if isinstance(origin, pa.Table):
        names = _wanted(origin.column_names, where)
        return origin.column_names, _batch_rows(origin.select(names).to_batches(max_chunksize=4096), names)
    path = Path(origin)
    try:
        with path.open("rb") as file:
            start = file.read(512)
        if not start.startswith(b"PAR1"):
            _refuse(start, where)
            return None, _json_rows(path)
        file = pq.ParquetFile(path, page_checksum_verification=True)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{where} can't be read ({_line(error)}): check it, fetch or write it again.") from error
    names = _wanted(file.schema_arrow.names, where)
    return file.schema_arrow.names, _batch_rows(file.iter_batches(batch_size=4096, columns=names), names)


def _wanted(columns: Sequence[str], where: str) -> list[str]:
    names = [column for column in columns if column in KNOWN or column.startswith("rationale")]
    twice = sorted(column for column, count in Counter(names).items() if count > 1)
    if twice:
        raise DataError(f"{where} has the column {twice[0]!r} twice: rename one.")
    if not names:
        raise _no_layout(columns, where)
    return names


def _refuse(start: bytes, where: str) -> None:
    for magic, sentence in REFUSED:
        if start.startswith(magic):
            raise DataError(f"{where} {sentence}.")
    text = start.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        raise DataError(f"{where} is a web page, not data: download the raw file.")


def _json_rows(path: Path) -> Iterator[Row]:
    """Read line by line; a line over the limit is skipped without holding it."""
    with path.open("rb") as file:
        number = -1
        while line := file.readline(MAX_ROW + 1):
            number += 1
            if len(line) > MAX_ROW:
                size = len(line)
                while not line.endswith(b"\n") and (line := file.readline(MAX_ROW)):
                    size += len(line)
                yield number, BadRow(Reason.TOO_LARGE, f"{size} bytes, at most {MAX_ROW}")
                continue
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 0 else line
            if line.strip():
                yield number, _parse(line)


def _parse(line: bytes) -> Mapping[str, object] | BadRow:
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return BadRow(Reason.BAD_ENCODING, f"byte {error.start} is no UTF-8")
    except RecursionError:
        return BadRow(Reason.BAD_JSON, "nested too deeply")
    except ValueError as error:
        return BadRow(Reason.BAD_JSON, _line(error))
    if not isinstance(value, dict):
        return BadRow(Reason.BAD_TYPE, "the row is no object")
    return value


def _batch_rows(batches: Iterable[pa.RecordBatch], names: Sequence[str]) -> Iterator[Row]:
    start = 0
    for batch in batches:
        columns = [_values(batch.column(name)) for name in names]
        for offset, values in enumerate(zip(*columns, strict=True)):
            yield start + offset, dict(zip(names, values, strict=True))
        start += batch.num_rows


def _values(column: pa.Array) -> list[object]:
    """Make Python values of a column; a value that can't be made one becomes a BadRow of its own."""
    try:
        values: list[object] = column.to_pylist()
        return values
    except (ValueError, OverflowError, pa.ArrowException):
        return [_value(scalar) for scalar in column]


def _value(scalar: pa.Scalar) -> object:
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        return BadRow(Reason.BAD_ENCODING, "")
    except (ValueError, OverflowError, pa.ArrowException):
        return BadRow(Reason.BAD_TYPE, "")


def _head(rows: Iterator[Row]) -> list[Row]:
    """Take rows until HEAD of them can tell the layout."""
    head: list[Row] = []
    objects = 0
    try:
        for row in rows:
            head.append(row)
            objects += not isinstance(row[1], BadRow)
            if objects == HEAD:
                break
    except (pa.ArrowException, OSError):
        pass  # TODO
    return head


class _Fit(NamedTuple):
    layout: Layout
    rows: int


def _keys(head: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(key for _, record in head if not isinstance(record, BadRow) for key in record))


def _detect(columns: Sequence[str], records: Sequence[Mapping[str, object]], where: str) -> Layout:
    raise NotImplementedError


def _no_layout(columns: Sequence[str], where: str) -> DataError:
    raise NotImplementedError


def _line(error: Exception) -> str:
    return " ".join(ascii(str(error))[1:-1].split())[:200]
