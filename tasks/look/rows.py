"""Find rows of an artifact: filter, count and page over all of them, and read only what is shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from storage.errors import DataError
from storage.schema import JUDGMENT_ID, MESSAGES, SCHEMAS
from tasks.look.compare import flipped_pairs
from tasks.look.contents import quoted
from tasks.look.row_id import RowId, row_id

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tasks.look.contents import Contents, Placed

JUDGED = ("judgments", "completions", "selected", "dropped")  # one row a judgment: their columns belong together
_ORDER = {
    "splits": ("source", "row"),
    "train_log": ("train_step",),
    "metrics": ("suite", "subset", "section", "metric"),
}
_POSITION = ("iteration", "step", "label", "filename", "file_row_number")
_PLACE = ("iteration", "step", "label")


@dataclass(frozen=True)
class Filters:
    """Say which rows are wanted; what is left out lets all through.

    `flipped`: of pairs that the iteration's checkpoint judges right and the one before did not, or the other way round.
    `contains`: text that stands in the completion, or in the row's own texts.
    """

    step: str = ""
    id: RowId | None = None
    status: str | None = None
    subset: str | None = None
    hinted: bool = False
    flipped: bool = False
    contains: str | None = None


class Page(NamedTuple):
    """Hold how many rows there are in all, and those of the page."""

    total: int
    rows: list[dict[str, Any]]


def find_rows(
    contents: Contents, kind: str, iteration: int, filters: Filters, *, limit: int, offset: int = 0, full: bool = False
) -> Page:
    """Give a page of an iteration's rows of a kind, sorted by their ids.

    Judgments get their text, and completions their verdict; `full` adds the pair: prompt, responses, gold.
    Texts are read for the page alone; `contains` looks through all.
    """
    own = contents.asked(kind, iteration, filters.step)
    wanted, values = _conditions(contents, own, iteration, filters)
    rows = f"FROM {contents.relation(own, position=True)} AS own WHERE {wanted}"
    names = SCHEMAS[kind].names
    order = [name for name in _ORDER.get(kind, _ids(names)) if name in names]
    sorting = ", ".join([*_PLACE, *map(quoted, order), "filename", "file_row_number"])
    (counted,) = contents.select(f"SELECT count(*) AS total {rows}", values)
    page = f"SELECT {', '.join(_POSITION)} {rows} ORDER BY {sorting} LIMIT ? OFFSET ?"
    positions = [tuple(one.values()) for one in contents.select(page, [*values, limit, offset])]
    found = _at(contents, own, positions)
    _add_pairs(contents, found, full=full)
    if kind in JUDGED:
        _add_judgments(contents, found, own)
    return Page(counted["total"], [_named(contents, row) for row in found])


def _ids(names: Sequence[str]) -> list[str]:
    """Name the columns that tell rows apart."""
    parts = ("suite", "pair_id", "checkpoint", "order", "sample", "chosen_sample", "rejected_sample")
    return [name for name in parts if name in names]


def _conditions(contents: Contents, own: Sequence[Placed], iteration: int, filters: Filters) -> tuple[str, list[Any]]:
    """Write the filters as SQL with its values; DataError where the kind lacks what is asked for."""
    kind = own[0].artifact.name
    names = SCHEMAS[kind].names
    clauses, values = ["true"], list[Any]()

    def need(option: str, column: str) -> None:
        if column not in names:
            others = ", ".join(one for one, schema in SCHEMAS.items() if column in schema.names)
            raise DataError(f"{option}: {kind} has no column {column}; ask {others}")

    if filters.status:
        need("--status", "status")
        clauses.append("own.status = ?")
        values.append(filters.status)
    if filters.hinted:
        column = "chosen_hinted" if kind == "dpo" else "hinted"
        need("--hinted", column)
        clauses.append(f"own.{column}")
    if filters.subset:
        if "subset" in names:
            clauses.append("own.subset = ?")
        else:
            need("--subset", "pair_id")
            clauses.append(f"own.pair_id IN (SELECT pair_id FROM {contents.split('pairs')} WHERE subset = ?)")
        values.append(filters.subset)
    if filters.flipped:
        need("--flipped", "pair_id")
        clauses.append("own.pair_id IN (SELECT unnest(?::VARCHAR[]))")
        values.append(flipped_pairs(contents, iteration))
    if filters.id:
        need("--id", "pair_id")
        clauses += _id_conditions(kind, filters.id)
        values += [contents.pair(filters.id.pair), *([filters.id.order] if filters.id.order else [])]
        values += [part for sample in filters.id.samples for part in sample]
    if filters.contains:
        clause, times = _contains(contents, own)
        clauses.append(clause)
        values += [filters.contains] * times
    return " AND ".join(clauses), values


def _id_conditions(kind: str, wanted: RowId) -> list[str]:
    names = SCHEMAS[kind].names
    sides = [side for side in ("", "chosen_", "rejected_") if f"{side}sample" in names]
    if (wanted.order and "order" not in names) or len(wanted.samples) > len(sides):
        raise DataError(f"--id {wanted}: rows of {kind} are not told apart so finely; write --id {wanted.pair}")
    if len(wanted.samples) == 1 and len(sides) == 2:
        raise DataError(f"--id {wanted}: a dpo row has two samples; write --id {wanted}-REJECTED, or {wanted.pair}")
    clauses = ["own.pair_id = ?", *(['own."order" = ?'] if wanted.order else [])]
    for side, _ in zip(sides, wanted.samples, strict=False):
        clauses += [f"own.{side}sample = ?", f"own.{side}hinted = ?"]
    return clauses


def _contains(contents: Contents, own: Sequence[Placed]) -> tuple[str, int]:
    """Write that a row's text holds a value, and how often the value is asked for."""
    kind = own[0].artifact.name
    if kind in JUDGED and kind != "completions":
        ids = ", ".join(map(quoted, JUDGMENT_ID))
        texts = contents.relation(contents.beside("completions", own))
        return f"({ids}) IN (SELECT ({ids}) FROM {texts} WHERE contains(text, ?))", 1
    parts = []
    for field in SCHEMAS[kind]:
        column = f"own.{quoted(field.name)}"
        if field.type == MESSAGES:
            parts.append(f"len(list_filter({column}, lambda turn: contains(turn.content, ?))) > 0")
        elif field.name in _TEXTS:
            parts.append(f"contains({column}, ?)")
    if not parts:
        raise DataError(f"--contains: {kind} has no text; ask completions, judgments, pairs, sft or dpo")
    return f"({' OR '.join(parts)})", len(parts)


_TEXTS = ("text", "response_a", "response_b", "detail", "error", "extra")


def _at(contents: Contents, own: Sequence[Placed], positions: Sequence[tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Read whole rows by their positions, in this order."""
    if not positions:
        return []
    sql = f"""
        SELECT own.* FROM {contents.relation(own, position=True)} AS own
        SEMI JOIN (SELECT unnest(?::VARCHAR[]) AS filename, unnest(?::BIGINT[]) AS file_row_number) AS page
        USING (filename, file_row_number)
    """
    found = {
        tuple(row[name] for name in _POSITION): row
        for row in contents.select(sql, [[one[3] for one in positions], [one[4] for one in positions]])
    }
    rows = [found[one] for one in positions]
    return [{name: value for name, value in row.items() if name not in _POSITION[3:]} for row in rows]


def _add_pairs(contents: Contents, rows: Sequence[dict[str, Any]], *, full: bool) -> None:
    """Add each row's pair: subset and gold, or all of it; columns that the row has stay."""
    ids = sorted({row["pair_id"] for row in rows if row.get("pair_id")})
    if not ids or not contents.placed("pairs"):
        return
    own = "prompt" in rows[0]  # a training row's prompt is the judge's own, with the responses in it
    columns = SCHEMAS["pairs"].names if full and not own else ["pair_id", "subset", "gold"]
    sql = f"SELECT {', '.join(map(quoted, columns))} FROM {contents.split('pairs')} "
    sql += "WHERE pair_id IN (SELECT unnest(?::VARCHAR[]))"
    pairs = {one["pair_id"]: one for one in contents.select(sql, [ids])}
    for row in rows:
        pair = pairs.get(row.get("pair_id"), {})
        _fill(row, pair)


def _add_judgments(contents: Contents, rows: Sequence[dict[str, Any]], own: Sequence[Placed]) -> None:
    """Put the columns of completions and judgments beside each other.

    What was sampled and then mended (as `--step sample` shows it) was never judged.
    """
    ids = sorted({row["pair_id"] for row in rows})
    if {one.place.step for one in own} == {"sample"} and own[0].artifact.name == "completions":
        mended = contents.placed("completions", own[0].place.iteration, "repair")
        asked = _of_pairs(contents, mended, ids) if ids and mended else []
        unjudged = {_judgment(one) for one in asked}
        rows = [row for row in rows if _judgment(row) not in unjudged]
    for kind in ("judgments", "completions"):
        placed = contents.beside(kind, own)
        if not ids or not placed:
            continue
        others = {_judgment(one): one for one in _of_pairs(contents, placed, ids)}
        for row in rows:
            _fill(row, others.get(_judgment(row), {}))


def _of_pairs(contents: Contents, placed: Sequence[Placed], ids: Sequence[str]) -> list[dict[str, Any]]:
    sql = f"SELECT * EXCLUDE (iteration, step, label) FROM {contents.relation(placed)} "
    return contents.select(sql + "WHERE pair_id IN (SELECT unnest(?::VARCHAR[]))", [ids])


def _judgment(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in JUDGMENT_ID)


def _fill(row: dict[str, Any], more: Mapping[str, Any]) -> None:
    row.update({name: value for name, value in more.items() if name not in row})


def _named(contents: Contents, row: dict[str, Any]) -> dict[str, Any]:
    """Put the row's id first, and the judge's name beside its digest."""
    name = row_id(row)
    judge = {"judge": contents.name(row["checkpoint"])} if row.get("checkpoint") else {}
    return {**({"id": str(name)} if name else {}), **row, **judge}
