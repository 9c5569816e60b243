"""Read preference pairs from Parquet, JSONL or a table in memory: every row becomes a pair or a reason.

Layouts, told apart by the columns and named in `Reading.layout`:

- `prompt`, `chosen`, `rejected`: the first response is the better one. `prompt` may be left out where both are lists of
  messages that begin with it.
- `prompt`, `response_a`, `response_b`, `label`: A or B in either case, or a tie (tie, tied, draw, equal, same, both,
  neither).

A prompt is a text or a list of {role, content}; so is a response, whose last message is what is judged. Optional:
`group` (pairs of one group are never parted), `source`, `subset`; `id` and, beside a label, columns that begin with
`rationale` are carried along. Other columns are left alone. Blank lines of a JSONL file are no rows.
"""

from __future__ import annotations

import json
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from storage.errors import DataError
from tasks.data.pairing import MAX_ROW, BadRow, Entry, Layout, Reason, clean
from tasks.data.reading import Reading, combine, make_reading

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

__all__ = ["VERSION", "Layout", "Reading", "Reason", "combine", "read_pairs"]

VERSION = 1  # part of the step keys: raise it when the same file gives other pairs, ids or reasons

HEAD = 1000  # objects the layout is told from
PATIENCE = 100_000  # rows without a single object
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


def read_pairs(origin: Path | str | pa.Table, *, name: str) -> Reading:
    """Read a file or table as pairs of the source `name`; raise DataError where the whole is no such thing."""
    where = f"the table of {name!r}" if isinstance(origin, pa.Table) else str(origin)
    columns, rows = _rows(origin, where)
    head = _head(rows)
    if not head:
        raise DataError(f"{where} has no rows: give at least one pair.")
    found = columns if columns is not None else _keys(head)
    layout = _detect(found, [record for _, record in head if not isinstance(record, BadRow)], where)
    carried = [column for column in found if column == "id" or _argues(column, layout)]
    entries: list[tuple[int, Entry]] = []
    bad: list[tuple[int, BadRow]] = []
    for place, record in chain(head, rows):
        try:
            if isinstance(record, BadRow):
                raise record
            entries.append((place, clean(record, layout, name=name, carried=carried)))
        except BadRow as row:
            bad.append((place, row))
    return make_reading(name, entries, bad, carried=carried, layout=layout)


def _rows(origin: Path | str | pa.Table, where: str) -> tuple[list[str] | None, Iterator[Row]]:
    """Give the columns, where they are declared, and the rows."""
    if isinstance(origin, pa.Table):
        names = _wanted(origin.column_names, where)
        return origin.column_names, _batch_rows(origin.select(names).to_batches(max_chunksize=4096), names, where)
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
    return file.schema_arrow.names, _batch_rows(file.iter_batches(batch_size=4096, columns=names), names, where)


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


def _batch_rows(batches: Iterable[pa.RecordBatch], names: Sequence[str], where: str) -> Iterator[Row]:
    start = 0
    try:
        for batch in batches:
            columns = [_values(batch.column(name)) for name in names]
            for offset, values in enumerate(zip(*columns, strict=True)):
                yield start + offset, dict(zip(names, values, strict=True))
            start += batch.num_rows
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{where} is damaged after row {start} ({_line(error)}): fetch or write it again.") from error


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
    """Take rows until HEAD objects are among them; give up on what has none for long: it is no JSONL."""
    head: list[Row] = []
    objects = 0
    for row in rows:
        head.append(row)
        objects += not isinstance(row[1], BadRow)
        if objects == HEAD or (not objects and len(head) == PATIENCE):
            break
    return head


def _argues(column: str, layout: Layout) -> bool:
    """Find rationales, but not beside chosen and rejected: their letters can't mean the order that we choose."""
    return layout is Layout.LABELLED and column.startswith("rationale") and column.isidentifier()


def _keys(head: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(key for _, record in head if not isinstance(record, BadRow) for key in record))


def _detect(columns: Sequence[str], records: Sequence[Mapping[str, object]], where: str) -> Layout:
    """Choose the layout that more rows fill; columns that fit neither, or both equally, are refused."""
    fits = {layout: _fit(layout, columns, records) for layout in Layout}
    if all(fit is None for fit in fits.values()):
        raise _no_layout(columns, where)
    best = max(Layout, key=lambda layout: -1 if fits[layout] is None else fits[layout] or 0)
    if fits[Layout.CHOSEN] == fits[Layout.LABELLED]:
        raise DataError(
            f"{where} has both chosen, rejected and response_a, response_b, label: remove the columns of one of them."
        )
    return best


def _fit(layout: Layout, columns: Sequence[str], records: Sequence[Mapping[str, object]]) -> int | None:
    """Count the rows that fill a layout; None where the columns don't allow it."""
    needed = NEEDED[layout]
    if layout is Layout.CHOSEN and any(isinstance(record.get("chosen"), list) for record in records):
        needed = needed[1:]
    if not set(needed) <= set(columns):
        return None
    return sum(all(record.get(column) is not None for column in needed) for record in records)


def _no_layout(columns: Sequence[str], where: str) -> DataError:
    if not columns:
        return DataError(
            f"{where} has no line with a JSON object: give Parquet or JSONL, one {{…}} a line, in UTF-8 "
            "(`jq -c .[]` splits an array)."
        )
    found = ", ".join(ascii(column)[1:-1][:40] for column in columns[:20]) + (", …" if len(columns) > 20 else "")
    wanted = " or ".join(", ".join(needed) for needed in NEEDED.values())
    return DataError(f"{where} has the columns {found}; pairs need {wanted}: rename or add columns.")


def _line(error: Exception) -> str:
    return " ".join(ascii(str(error))[1:-1].split())[:200]
