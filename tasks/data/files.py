"""Open what a source names and give its rows: Parquet, a JSON array, JSONL or CSV, the text ones gzipped or not."""

from __future__ import annotations

import gzip
import re
import shutil
import tempfile
import zlib
from dataclasses import dataclass
from enum import StrEnum
from typing import IO, TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from storage.errors import DataError
from tasks.data.reasons import BadRow, Reason
from tasks.data.text_rows import BOM, array_rows, line_rows, one_line, open_csv

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from tasks.data.text_rows import Row

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
        columns, rows = open_csv(file, start, where)
        wanted(columns)
        return Opened(columns, rows, written)
    return Opened(None, array_rows(file, where) if kind is FileKind.JSON else line_rows(file), written)


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
