"""Open what a source names and give its rows: Parquet, a JSON array, JSONL or CSV, the text ones gzipped or not."""

from __future__ import annotations

import csv
import gzip
import io
import json
import mmap
import re
import shutil
import sys
import tempfile
import zlib
from dataclasses import dataclass
from enum import StrEnum
from typing import IO, TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from storage.errors import DataError
from tasks.data.reasons import MAX_ROW, BadRow, Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

Row = tuple[int, "Mapping[str, object] | BadRow"]

REFUSED = (  # how files begin that hold no rows, and what to do with them
    (b"version https://git-lfs", "is a Git LFS pointer, not the data: run `git lfs pull` where it comes from"),
    (b"PK\x03\x04", "is a zip archive: unzip it and name the file inside"),
    (b"BZh", "is compressed with bzip2: unpack it first"),
    (b"\x28\xb5\x2f\xfd", "is compressed with zstd: unpack it first"),
    (b"\xfd7zXZ", "is compressed with xz: unpack it first"),
    (b"\xff\xfe", "is UTF-16: convert it to UTF-8"),
    (b"\xfe\xff", "is UTF-16: convert it to UTF-8"),
    (b"ARROW1", "is an Arrow file: write it as Parquet"),
    (b"\x80\x04\x95", "is a Python pickle, which is never read: write it as Parquet or JSONL"),
)
GZIP = b"\x1f\x8b"
BOM = b"\xef\xbb\xbf"
TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[\[\]{},]', re.DOTALL)  # strings whole, and what stands between values


class FileKind(StrEnum):
    """Name how rows are written: the values of `data.sources.N.file`."""

    PARQUET = "parquet"
    JSON = "json"  # one array
    JSONL = "jsonl"
    CSV = "csv"  # with a header; commas, tabs, semicolons


@dataclass(frozen=True)
class Opened:
    """Hold the rows of a source, the columns where they are declared (else None), and how it is written."""

    columns: Sequence[str] | None
    rows: Iterator[Row]
    written: str


def open_table(table: pa.Table, *, where: str, wanted: Callable[[Sequence[str]], list[str]]) -> Opened:
    """Give the rows of a table in memory."""
    names = wanted(table.column_names)
    batches = table.select(names).to_batches(max_chunksize=4096)
    return Opened(table.column_names, _batch_rows(batches, names, where), "table")


def open_file(path: Path, *, where: str, kind: FileKind | None, wanted: Callable[[Sequence[str]], list[str]]) -> Opened:
    """Give the rows of a file; `where` is its address, whose ending helps to tell how it is written.

    Raises DataError for what holds no rows: a pointer, an archive, a web page, a damaged file.
    """
    try:
        file: IO[bytes] = path.open("rb")
        packed = file.read(2) == GZIP
        file.seek(0)
        file = _unpack(file, where) if packed else file
        start = file.read(512)
        file.seek(0)
    except OSError as error:
        raise DataError(f"{where} can't be read ({one_line(error)}): check it, fetch or write it again.") from error
    _refuse(start, where)
    kind = kind or _guess(start, where)
    written = f"{kind}, gzipped" if packed else str(kind)
    if kind is FileKind.PARQUET:
        if packed:
            raise DataError(f"{where} is a gzipped Parquet file: gunzip it, Parquet is compressed inside.")
        return _open_parquet(path, where, wanted)
    if not start:
        return Opened(None, iter(()), written)
    if kind is FileKind.CSV:
        columns, rows = _open_csv(file, start, where)
        wanted(columns)
        return Opened(columns, rows, written)
    return Opened(None, _array_rows(file, where) if kind is FileKind.JSON else _line_rows(file), written)


def _unpack(file: IO[bytes], where: str) -> IO[bytes]:
    """Unpack into a file without a name, so that what is read can be mapped and rewound."""
    unpacked: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed by its reader)
    try:
        with file, gzip.open(file) as content:
            shutil.copyfileobj(content, unpacked, 2**20)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{where} is a damaged gzip file ({one_line(error)}): fetch or write it again.") from error
    unpacked.flush()
    unpacked.seek(0)
    return unpacked


def _refuse(start: bytes, where: str) -> None:
    for magic, sentence in REFUSED:
        if start.startswith(magic):
            raise DataError(f"{where} {sentence}.")
    if start[257:262] == b"ustar":
        raise DataError(f"{where} is a tar archive: unpack it and name the file inside.")
    text = start.removeprefix(BOM).lstrip().lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        raise DataError(f"{where} is a web page, not data: download the raw file.")


def _guess(start: bytes, where: str) -> FileKind:
    """Tell how a file is written: by its beginning, then by the ending of its name."""
    if start.startswith(b"PAR1"):
        return FileKind.PARQUET
    name = where.lower().removesuffix(".gz").rpartition(".")[2]
    text = start.removeprefix(BOM).lstrip()
    first = text.partition(b"\n")[0].strip()
    if name in {"csv", "tsv"}:
        return FileKind.CSV
    if name in {"jsonl", "ndjson"}:
        return FileKind.JSON if first == b"[" else FileKind.JSONL
    if text.startswith(b"[") and (name == "json" or re.match(rb"\[\s*[{\]]", text)):
        return FileKind.JSON
    if name != "json" and not text.startswith((b"{", b"[")) and any(sign in first for sign in b",\t;"):
        return FileKind.CSV
    return FileKind.JSONL


# ---- JSON ------------------------------------------------------------------------------------------------------------


def _line_rows(file: IO[bytes]) -> Iterator[Row]:
    """Read line by line; a line over the limit is skipped without holding it. Blank lines are no rows."""
    with file:
        number = -1
        while line := file.readline(MAX_ROW + 1):
            number += 1
            if len(line) > MAX_ROW:
                size = len(line)
                while not line.endswith(b"\n") and (line := file.readline(MAX_ROW)):
                    size += len(line)
                yield number, BadRow(Reason.TOO_LARGE, f"{size} bytes, at most {MAX_ROW}")
                continue
            line = line.removeprefix(BOM) if number == 0 else line
            if line.strip():
                yield number, _parse_line(line)


def _parse_line(line: bytes) -> Mapping[str, object] | BadRow:
    try:
        return _parse(line.decode())
    except UnicodeDecodeError as error:
        return BadRow(Reason.BAD_ENCODING, f"byte {error.start} is no UTF-8")
    except json.JSONDecodeError as error:
        return BadRow(Reason.BAD_JSON, one_line(error))


def _parse(text: str) -> Mapping[str, object] | BadRow:
    """Parse one object; raise JSONDecodeError where it is no JSON."""
    try:
        value = json.loads(text)
    except RecursionError:
        return BadRow(Reason.BAD_JSON, "nested too deeply")
    except json.JSONDecodeError:
        raise
    except ValueError as error:  # a number with too many digits
        return BadRow(Reason.BAD_JSON, one_line(error))
    return value if isinstance(value, dict) else BadRow(Reason.BAD_TYPE, "the row is no object")


def _array_rows(file: IO[bytes], where: str) -> Iterator[Row]:
    """Read the elements of one array without holding it.

    The file is cut at the commas of the array itself. Broken JSON refuses the file: nothing after it can be trusted.
    """
    text = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if not re.compile(rb"(?:\xef\xbb\xbf)?\s*\[").match(text):
        raise DataError(
            f"{where} is no JSON array: it doesn't begin with `[`; if it has a JSON object a line, say jsonl."
        )
    depth = place = start = 0
    for token in TOKEN.finditer(text):
        at, sign = token.start(), text[token.start()]
        if sign in b"[{":
            depth += 1
            start = at + 1 if depth == 1 else start
        elif sign in b"]}":
            depth -= 1
        if depth > 1 or (depth == 1 and sign != 44) or sign == 34:  # inside an element; 44 is the comma, 34 the quote
            continue
        if depth == 1 or place or text[start:at].strip():
            yield place, _element(text, start, at, f"{where} is no JSON after {place} elements")
            place, start = place + 1, at + 1
        if depth < 1:
            if not re.compile(rb"\s*\Z").match(text, at + 1):
                raise DataError(f"{where} goes on after the end of its array: name one array, or JSONL.")
            return
    raise DataError(f"{where} ends inside its array, after {place} elements: fetch or write it again.")


def _element(text: Any, start: int, end: int, broken: str) -> Mapping[str, object] | BadRow:
    if end - start > MAX_ROW:
        return BadRow(Reason.TOO_LARGE, f"{end - start} bytes, at most {MAX_ROW}")
    try:
        return _parse(text[start:end].decode(errors="surrogateescape"))  # found again where the text is used
    except json.JSONDecodeError as error:
        raise DataError(f"{broken} (byte {start}: {one_line(error)}): write it again, or as JSONL.") from error


# ---- CSV -------------------------------------------------------------------------------------------------------------


def _open_csv(file: IO[bytes], start: bytes, where: str) -> tuple[list[str], Iterator[Row]]:
    first = start.removeprefix(BOM).partition(b"\n")[0]
    delimiter = max(",\t;", key=lambda sign: first.count(sign.encode()))
    csv.field_size_limit(sys.maxsize)  # of the whole process; a row over MAX_ROW is dropped after it was read
    text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
    lines = csv.reader(text, delimiter=delimiter, strict=True)
    try:
        header = next(lines, [])
    except csv.Error as error:
        raise DataError(
            f"{where} has no CSV header ({one_line(error)}): name the columns in the first line."
        ) from error
    return [name.strip() for name in header], _csv_rows(lines, [name.strip() for name in header], where)


def _csv_rows(lines: Any, header: Sequence[str], where: str) -> Iterator[Row]:
    place = 0
    while True:
        line = lines.line_num + 1
        try:
            fields = next(lines)
        except StopIteration:
            return
        except csv.Error as error:
            if "end of data" in str(error):
                raise DataError(
                    f"{where} has a quote that is opened in the row of line {line} and never closed: mend that row."
                ) from error
            yield place, BadRow(Reason.BAD_CSV, f"line {line}: {one_line(error)}")
        else:
            if not fields:
                continue
            yield place, _csv_row(fields, header)
        place += 1


def _csv_row(fields: Sequence[str], header: Sequence[str]) -> Mapping[str, object] | BadRow:
    size = sum(len(field) for field in fields)
    if size > MAX_ROW:
        return BadRow(Reason.TOO_LARGE, f"{size} characters, at most {MAX_ROW}")
    if len(fields) != len(header):
        return BadRow(Reason.BAD_CSV, f"{len(fields)} fields, the header has {len(header)}")
    return {name: _cell(field) for name, field in zip(header, fields, strict=True)}


def _cell(field: str) -> object:
    """Give a cell's text; one that holds the JSON of a list of objects is that list."""
    if field.startswith("[{"):
        try:
            value = json.loads(field)
        except (ValueError, RecursionError):
            return field
        return value if isinstance(value, list) else field
    return field


# ---- Arrow -----------------------------------------------------------------------------------------------------------


def _open_parquet(path: Path, where: str, wanted: Callable[[Sequence[str]], list[str]]) -> Opened:
    try:
        file = pq.ParquetFile(path, page_checksum_verification=True)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{where} can't be read ({one_line(error)}): check it, fetch or write it again.") from error
    columns = file.schema_arrow.names
    names = wanted(columns)
    batches = file.iter_batches(batch_size=4096, columns=names)
    return Opened(columns, _batch_rows(batches, names, where), str(FileKind.PARQUET))


def _batch_rows(batches: Iterable[pa.RecordBatch], names: Sequence[str], where: str) -> Iterator[Row]:
    start = 0
    try:
        for batch in batches:
            columns = [_values(batch.column(name)) for name in names]
            for offset, values in enumerate(zip(*columns, strict=True)):
                yield start + offset, dict(zip(names, values, strict=True))
            start += batch.num_rows
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{where} is damaged after row {start} ({one_line(error)}): fetch or write it again."
        ) from error


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


def one_line(error: Exception) -> str:
    """Give an error's text as one line of ASCII, shortened."""
    text = " ".join(str(error).split())[:200]
    return "".join(char if char.isascii() and char.isprintable() else ascii(char)[1:-1] for char in text)
