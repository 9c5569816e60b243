"""Trace a row: back to its judgments, texts, model, split and source row, and forward to the checkpoints it trained."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from storage.errors import DataError
from storage.schema import JUDGMENT_ID, Split, part
from tasks.look.contents import subject
from tasks.look.row_id import RowId, Sample
from tasks.models import Model
from tasks.pairs import BOOTSTRAP

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tasks.earlier import Place
    from tasks.look.contents import Contents, Placed

ROWS = ("sft", "dpo")


@dataclass(frozen=True)
class Trace:
    """Hold all that a run knows of a pair or, where the id is finer, of some judgments and the rows made of them.

    sources: rows of the sources, each with its address, split and why it was dropped. judgments: what each judge wrote
    of the pair, each with its verdict, status, what became of it (`outcome`) and whether the id names it. rows:
    training rows. checkpoints: those trained on the rows, and those that went on from them.
    """

    run: str
    id: str
    pair: Mapping[str, Any] | None
    sources: Sequence[Mapping[str, Any]]
    judgments: Sequence[Mapping[str, Any]]
    rows: Sequence[Mapping[str, Any]]
    checkpoints: Sequence[Mapping[str, Any]]

    def to_json(self) -> dict[str, Any]:
        """Give the JSON form."""
        return asdict(self)


def trace(contents: Contents, wanted: RowId) -> Trace:
    """Trace a pair, a judgment or a training row; DataError where the run has none of this id."""
    wanted = wanted._replace(pair=contents.pair(wanted.pair))
    pair = _of_pair(contents, contents.placed("pairs"), wanted.pair)
    sources = [_source(contents, row) for row in _of_pair(contents, contents.placed("splits"), wanted.pair)]
    sets = {row["split"] for row in sources} - {str(Split.DROPPED)}
    judgments = [one for name in sets for one in _judgments(contents, wanted.pair, name)]
    judgments = [{**one, "named": _named(wanted, one)} for one in sorted(judgments, key=_place)]
    rows = [row for row in _rows(contents, wanted.pair, sets) if _made_of(wanted, row)]
    if (wanted.order or wanted.samples) and not rows and not any(one["named"] for one in judgments):
        known = ", ".join(dict.fromkeys(str(_id(one)) for one in judgments)) or "no judgment"
        raise DataError(f"{contents.history.run_id} has nothing of {wanted}; of this pair it has {known[:400]}")
    checkpoints = list(_checkpoints(contents, {row["digest"] for row in rows}))
    rows = [{name: value for name, value in row.items() if name != "digest"} for row in rows]
    return Trace(contents.history.run_id, str(wanted), pair[0] if pair else None, sources, judgments, rows, checkpoints)


def _of_pair(contents: Contents, placed: Sequence[Placed], pair_id: str) -> list[dict[str, Any]]:
    if not placed:
        return []
    return contents.select(f"SELECT * FROM {contents.relation(placed)} WHERE pair_id = ?", [pair_id])


def _source(contents: Contents, row: Mapping[str, Any]) -> dict[str, Any]:
    """Say where a row of the split came from."""
    data = contents.history.config.data
    source = next((one for one in (*data.sources, *data.suites) if one.name == row["source"]), None)
    address = None
    if source is not None:
        address = source.path or (f"{source.hub}@{source.revision}" if source.hub else "made by the generator")
    return {**{name: row[name] for name in ("source", "row", "split", "reason", "detail")}, "address": address}


def _judgments(contents: Contents, pair_id: str, name: str) -> Iterator[dict[str, Any]]:
    """Give what was written of a pair: completion, judgment and outcome side by side, one a judge, order and sample."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for kind in ("completions", "choices", "rationales", "judgments", "selected", "dropped"):
        placed = [one for one in contents.placed(kind) if _concerns(one.place, kind, name)]
        for row in _of_pair(contents, placed, pair_id):
            if kind == "rationales":
                row |= {"checkpoint": BOOTSTRAP, "sample": 0, "hinted": False}
            merged = found.setdefault(tuple(row.get(column) for column in JUDGMENT_ID), {"outcome": None})
            merged.update({one: value for one, value in row.items() if one not in merged})
            if kind in ("selected", "dropped"):
                merged["outcome"] = kind if kind == "selected" else f"dropped: {row['reason']}"
    for row in found.values():
        yield {**row, "judge": contents.name(row["checkpoint"]), "made_by": _maker(contents, row["checkpoint"])}


def _concerns(place: Place, kind: str, name: str) -> bool:
    """Say whether the step's artifact may hold judgments of the pairs of a set."""
    if kind == "rationales":
        return name == Split.BOOTSTRAP
    asked = subject(place).split()
    return name == (asked[-1] if asked else part(place.iteration))


def _maker(contents: Contents, digest: str) -> str | None:
    """Give the key of the step that made a model."""
    for place, manifest in contents.manifests.items():
        if place.step in ("base", "train") and Model(**manifest.facts["model"]).digest == digest:
            return manifest.key
    return None


def _rows(contents: Contents, pair_id: str, sets: set[str]) -> Iterator[dict[str, Any]]:
    """Give the training rows of a pair; pairs that are only evaluated have none."""
    if not any(name.startswith("part-") or name == Split.BOOTSTRAP for name in sets):
        return
    for kind in ROWS:
        for one in contents.placed(kind):
            for row in _of_pair(contents, [one], pair_id):
                yield {
                    "artifact": kind,
                    "digest": one.artifact.digest,
                    **row,
                    "judge": contents.name(row["checkpoint"]),
                }


def _named(wanted: RowId, judgment: Mapping[str, Any]) -> bool:
    if wanted.order not in (None, judgment["order"]):
        return False
    return not wanted.samples or _sample(judgment) in wanted.samples


def _made_of(wanted: RowId, row: Mapping[str, Any]) -> bool:
    """Say whether a training row is the one that is wanted, or is made of the one judgment that is."""
    sides = [_sample(row, side) for side in ("", "chosen_", "rejected_") if f"{side}sample" in row]
    if wanted.order not in (None, row["order"]):
        return False
    return tuple(sides) == wanted.samples if len(wanted.samples) == 2 else set(wanted.samples) <= set(sides)


def _sample(row: Mapping[str, Any], side: str = "") -> Sample | None:
    return Sample(row[f"{side}sample"], row[f"{side}hinted"]) if row.get(f"{side}sample") is not None else None


def _id(judgment: Mapping[str, Any]) -> RowId:
    sample = _sample(judgment)
    return RowId(judgment["pair_id"], judgment["order"], (sample,) if sample else ())


def _place(judgment: Mapping[str, Any]) -> tuple[Any, ...]:
    sample = judgment.get("sample")
    return judgment["iteration"], judgment["judge"], judgment["order"], -1 if sample is None else sample


def _checkpoints(contents: Contents, digests: set[str]) -> Iterator[dict[str, Any]]:
    """Give the checkpoints that were trained on rows of these digests, then those that went on from such a one."""
    reached: dict[str, str] = {}
    for place, manifest in contents.manifests.items():
        if place.step != "train":
            continue
        model = Model(**manifest.facts["model"]).digest
        how = None
        if manifest.inputs["rows"] in digests:
            how = "trained on it"
        elif manifest.inputs["start"] in reached:
            how = f"goes on from {reached[manifest.inputs['start']]}"
        if how:
            name = f"checkpoint {place.iteration}"
            reached[model] = name
            yield {"checkpoint": place.iteration, "model": model, "how": how, "key": manifest.key}
