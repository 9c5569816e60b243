"""Hold what became of the rows of a source: pairs, and a ledger with a reason for each row that is none."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from storage.errors import DataError
from storage.schema import SCHEMAS, Split
from tasks.data.pairing import Entry, prompt_key, twin_key
from tasks.data.reasons import BadRow, Reason

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tasks.data.messages import Messages


@dataclass(frozen=True)
class Reading:
    """Hold what became of the rows of a source (or of several): rows in = pairs + dropped, always.

    pairs: `pairs`, no id twice. ledger: `splits`, one row a source row, in their order; those whose split is null are
    the rows of `pairs`, in the same order. extras: pair_id and the columns carried along, row by row like `pairs`.
    """

    pairs: pa.Table
    ledger: pa.Table
    extras: pa.Table
    layout: str

    @property
    def dropped(self) -> pa.Table:
        """Give the ledger's rows that are in no split, with reason and detail."""
        return self.ledger.filter(pc.equal(self.ledger["split"], Split.DROPPED.value))

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
        changed = self.open_rows().with_columns(
            pair_id=pl.when(reason.is_in(nameless).fill_null(False)).then(None).otherwise(pl.col("pair_id")),
            split=mark.then(pl.lit(Split.DROPPED.value)),
            reason=mark.then(reason),
            detail=mark.then(detail),
        )
        kept = pa.array((~gone).to_list(), pa.bool_())
        return Reading(self.pairs.filter(kept), self._put_back(changed), self.extras.filter(kept), self.layout)

    def assign(self, split: pl.Series) -> pa.Table:
        """Give the ledger with the name of a split (one a pair) filled in: the `splits` artifact."""
        return self._put_back(self.open_rows().with_columns(split=split.cast(pl.String)))

    def open_rows(self) -> pl.DataFrame:
        """Give the ledger's rows that are pairs and in no split yet, with their place `_at`."""
        return pl.DataFrame(self.ledger).with_row_index("_at").filter(pl.col("split").is_null())

    def _put_back(self, changed: pl.DataFrame) -> pa.Table:
        rest = pl.DataFrame(self.ledger).with_row_index("_at").filter(pl.col("split").is_not_null())
        whole = pl.concat([rest, changed.select(rest.columns)]).sort("_at").drop("_at")
        return whole.to_arrow().cast(SCHEMAS["splits"])


def make_reading(
    name: str,
    entries: Sequence[tuple[int, Entry]],
    bad: Sequence[tuple[int, BadRow]],
    *,
    carried: Sequence[str],
    layout: str,
) -> Reading:
    """Make the tables of (row, pair) and (row, why it is none); drop duplicates and contradictions."""
    pairs = [entry for _, entry in entries]
    ledger = pl.DataFrame(
        [(place, entry.pair_id, None, None, None) for place, entry in entries]
        + [(place, None, Split.DROPPED.value, row.reason.value, row.detail) for place, row in bad],
        schema={"row": pl.Int64, "pair_id": pl.String, "split": pl.String, "reason": pl.String, "detail": pl.String},
        orient="row",
    )
    ledger = ledger.sort("row").select(pl.lit(name).alias("source"), pl.all())
    twins = pl.DataFrame(
        {"twin": [entry.twin for entry in pairs], "low": [entry.low for entry in pairs]},
        schema={"twin": pl.String, "low": pl.Boolean},
    )
    reading = Reading(_pairs(pairs), ledger.to_arrow().cast(SCHEMAS["splits"]), _extras(pairs, carried), layout)
    return _drop_twins(reading, twins)


def _pairs(entries: Sequence[Entry]) -> pa.Table:
    messages = [[{"role": role, "content": content} for role, content in entry.prompt] for entry in entries]
    schema = SCHEMAS["pairs"]
    columns = {name: [getattr(entry, name) for entry in entries] for name in schema.names if name != "prompt"}
    return pa.table({"prompt": messages, **columns}, schema=schema) if entries else schema.empty_table()


def _extras(entries: Sequence[Entry], carried: Sequence[str]) -> pa.Table:
    names = ("pair_id", *carried)
    columns = [[(entry.pair_id, *entry.carried)[index] for entry in entries] for index in range(len(names))]
    return pa.table([pa.array(column, pa.large_string()) for column in columns], names=names)


def combine(readings: Sequence[Reading]) -> Reading:
    """Put the readings of several sources together, in order; pairs that occur in two are dropped like twins in one."""
    names = Counter(name for reading in readings for name in reading.ledger["source"].unique().to_pylist())
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        raise DataError(f"two sources are named {twice[0]!r}: give each its own name in data.sources.")
    pairs = pa.concat_tables([reading.pairs for reading in readings])
    ledger = pa.concat_tables([reading.ledger for reading in readings])
    extras = pa.concat_tables([reading.extras for reading in readings], promote_options="default")
    layout = ", ".join(dict.fromkeys(reading.layout for reading in readings))
    whole = Reading(pairs, ledger, extras, layout)
    if len(readings) == 1:
        return whole
    twins, lows = twin_keys(pairs)
    return _drop_twins(whole, pl.DataFrame({"twin": twins, "low": lows}))


def prompt_keys(pairs: pa.Table) -> pa.Array:
    """Give the `prompt_key` of each row of a `pairs` table."""
    return pa.array([prompt_key(prompt) for prompt in _prompts(pairs)], pa.large_string())


def twin_keys(pairs: pa.Table) -> tuple[list[str], list[bool]]:
    """Give `twin` and `low` (see Entry) of each row of a `pairs` table."""
    twins: list[str] = []
    lows: list[bool] = []
    columns: Iterable[list[str]] = (pairs[name].to_pylist() for name in ("response_a", "response_b", "gold"))
    for prompt, one, two, gold in zip(_prompts(pairs), *columns, strict=True):
        twins.append(twin_key(prompt, one, two))
        lows.append((gold == "A") == (one < two))
    return twins, lows


def _prompts(pairs: pa.Table) -> Iterable[Messages]:
    for prompt in pairs["prompt"].to_pylist():
        yield tuple((message["role"], message["content"]) for message in prompt)


def _drop_twins(reading: Reading, twins: pl.DataFrame) -> Reading:
    """Keep the first of the pairs with the same content and winner, none of those with contradicting winners."""
    place = pl.concat_str(pl.col("source"), pl.lit(" row "), pl.col("row"))
    first = pl.struct("source", "row").first().over("twin")
    frame = pl.concat([reading.open_rows().select("source", "row"), twins], how="horizontal").with_columns(
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
