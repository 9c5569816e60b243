"""Read preference pairs from files and tables: every row becomes a pair or a reason.

Files: Parquet, a JSON array, JSONL, CSV with a header; the text ones may be gzipped. Layouts, told apart by the columns
and named in `Reading.layout`:

- `prompt`, `chosen`, `rejected`: the first response is the better one. `prompt` may be left out where both are lists of
  messages that begin with it. Equal `score_chosen` and `score_rejected` are a tie.
- `chosen`, `rejected` that are whole transcripts, `Human: …` and `Assistant: …` after blank lines (hh-rlhf).
- `conversations` (ShareGPT) or `trajectory` (UltraInteract; grouped by `parent_id`) in place of `prompt`.
- `prompt`, two responses and who won. Responses: response, answer, output, completion or conversation with the endings
  _a and _b, _1 and _2, 1 and 2, or _0 and _1. Winner: `label`, `winner`, `preference` or `better_response_id` with A or
  B, the name of a response's column, model_a or model_b; a number that counts as those endings do; or a tie (tie, draw,
  both, neither …, and 0 beside 1 and 2).
- the same with `winner_model_a`, `winner_model_b`, `winner_tie`, of which one is 1; prompt and responses may be JSON
  lists, a text a turn.
- the same with `annotator1`, `annotator2` …: more than half of them decide, else it is a tie.

The prompt may also be called question, instruction (an `input` beside it is put after it), query or input. A prompt is
a text or a list of {role, content} or {from, value}; so is a response, whose last message is what is judged. A content
is a text or a list of parts {type: text, text}. Optional: `group` (pairs of one group are never parted), `source`,
`subset`; `id` and, where the responses have letters or numbers, columns that begin with `rationale` are carried along.
Other columns are left alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from storage.errors import DataError
from tasks.data.files import FileKind, open_file, open_table
from tasks.data.layouts import LABELS, OWN, Layout, detect, wanted_columns
from tasks.data.pairing import Entry, clean
from tasks.data.reading import Reading, combine, make_reading
from tasks.data.reasons import BadRow, Reason

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from tasks.data.files import Opened
    from tasks.data.layouts import Shape
    from tasks.data.text_rows import Row

__all__ = ["VERSION", "FileKind", "Form", "Layout", "Reading", "Reason", "combine", "make_form", "read_pairs"]

VERSION = 2  # part of the step keys: raise it when the same file gives other pairs, ids or reasons

COLUMNS = ("prompt", "chosen", "rejected", "response_a", "response_b", "label", *OWN)
HEAD = 1000  # objects the layout is told from
PATIENCE = 100_000  # rows without a single object


@dataclass(frozen=True)
class Form:
    """Say what is known of a source's form; what is left out is detected.

    address: where the file comes from, for its ending and for errors. columns: our word (prompt, chosen, rejected,
    response_a, response_b, label, group, source, subset, id) -> the column of the source.
    """

    address: str | None = None
    file: FileKind | None = None
    layout: Layout | None = None
    columns: Mapping[str, str] = field(default_factory=dict)


def make_form(*, file: str | None, layout: str | None, columns: Mapping[str, str]) -> Form:
    """Make a form of a person's words; raise DataError for one that isn't known."""
    for word, known in ((file, FileKind), (layout, Layout)):
        if word is not None and word not in list(known):
            raise DataError(f"{word!r} is no format that is read: {', '.join(known)} are.")
    for ours in columns:
        if ours not in COLUMNS:
            raise DataError(f"{ours!r} is no column that a pair has: {', '.join(COLUMNS)} are.")
    return Form(None, FileKind(file) if file else None, Layout(layout) if layout else None, columns)


def read_pairs(origin: Path | str | pa.Table, *, name: str, form: Form | None = None) -> Reading:
    """Read a file or table as pairs of the source `name`; raise DataError where the whole is no such thing."""
    form = form or Form()
    where = form.address or (f"the table of {name!r}" if isinstance(origin, pa.Table) else str(origin))
    opened = _open(origin, form, where)
    head = _head(opened.rows)
    if not head:
        raise DataError(f"{where} has no rows: give at least one pair.")
    found = opened.columns if opened.columns is not None else _keys(head)
    columns = _renamed(found, form, where)
    records = [_rename(record, form) for _, record in head if not isinstance(record, BadRow)]
    shape = detect(columns, records, where=where, wanted=form.layout)
    first, second = shape.responses
    shape = replace(shape, called=(form.columns.get(first, first), form.columns.get(second, second)))
    carried = [column for column in columns if column == "id" or _argues(column, shape)]
    entries: list[tuple[int, Entry]] = []
    bad: list[tuple[int, BadRow]] = []
    for place, record in chain(head, opened.rows):
        try:
            if isinstance(record, BadRow):
                raise record
            entries.append((place, clean(_rename(record, form), shape, name=name, carried=carried)))
        except BadRow as row:
            bad.append((place, row))
    return make_reading(name, entries, bad, carried=carried, layout=f"{shape} ({opened.written})")


def _open(origin: Path | str | pa.Table, form: Form, where: str) -> Opened:
    def wanted(columns: Sequence[str]) -> list[str]:
        return wanted_columns(columns, where=where, also=form.columns.values())

    if isinstance(origin, pa.Table):
        return open_table(origin, where=where, wanted=wanted)
    return open_file(Path(origin), where=where, kind=form.file, wanted=wanted)


def _renamed(columns: Sequence[str], form: Form, where: str) -> list[str]:
    """Give the columns under our words; a column that takes the place of another hides it."""
    for ours, theirs in form.columns.items():
        if theirs not in columns:
            found = ", ".join(ascii(column)[1:-1][:40] for column in columns[:20])
            raise DataError(f"{where} has no column {theirs!r} to take as `{ours}`; it has {found}.")
    hidden = {*form.columns.values(), *form.columns, *(LABELS if "label" in form.columns else ())}
    return [*form.columns, *(column for column in columns if column not in hidden)]


def _rename(record: Mapping[str, object], form: Form) -> Mapping[str, object]:
    if not form.columns:
        return record
    hidden = {*form.columns.values(), *form.columns}
    rest = {name: value for name, value in record.items() if name not in hidden}
    return rest | {ours: record.get(theirs) for ours, theirs in form.columns.items()}


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


def _argues(column: str, shape: Shape) -> bool:
    """Find rationales, but not beside chosen and rejected: their letters can't mean the order that we choose."""
    return bool(shape.labels) and column.startswith("rationale") and column.isidentifier()


def _keys(head: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(key for _, record in head if not isinstance(record, BadRow) for key in record))
