"""Read the rows of a text file: a JSON array, JSONL or CSV."""

from __future__ import annotations

import csv
import io
import json
import mmap
import re
import sys
from typing import IO, TYPE_CHECKING, Any

from storage.errors import DataError
from tasks.data.reasons import MAX_ROW, BadRow, Reason

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

Row = tuple[int, "Mapping[str, object] | BadRow"]

BOM = b"\xef\xbb\xbf"
TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[\[\]{},]', re.DOTALL)  # strings whole, and what stands between values


def line_rows(file: IO[bytes]) -> Iterator[Row]:
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


def array_rows(file: IO[bytes], where: str) -> Iterator[Row]:
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


def open_csv(file: IO[bytes], start: bytes, where: str) -> tuple[list[str], Iterator[Row]]:
    """Give the columns of a CSV file, whose beginning is `start`, and its rows; raise DataError for an open quote."""
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
    """Give a cell's text; one that holds the JSON of a list of messages is that list, and its Python is no text."""
    if not field.startswith("[{"):
        return field
    if re.match(r"\[\{'(?:role|content|from|value)': ", field):
        return BadRow(Reason.BAD_JSON, "messages as Python writes them; write JSON, or the file as Parquet")
    try:
        value = json.loads(field)
    except (ValueError, RecursionError):
        return field
    messages = isinstance(value, list) and all(isinstance(one, dict) and {"role", "from"} & set(one) for one in value)
    return value if messages else field


def one_line(error: Exception) -> str:
    """Give an error's text as one line of ASCII, shortened."""
    text = " ".join(str(error).split())[:200]
    return "".join(char if char.isascii() and char.isprintable() else ascii(char)[1:-1] for char in text)
