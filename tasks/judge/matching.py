"""Match judgments for DPO: a right with a wrong one of the same pair, checkpoint and order.

The version of what comes out is that of `tasks.pairs`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

import polars as pl

from storage.schema import JUDGMENT_ID, SCHEMAS
from tasks.judge import draw, frames
from tasks.judge.votes import BY_ORDER

if TYPE_CHECKING:
    import pyarrow as pa

    from configs.run import PairsConfig

DPO_ID = tuple(name for name in SCHEMAS["dpo"].names if name not in ("prompt", "chosen", "rejected"))

_SIDES = {"correct": "chosen", "wrong": "rejected", "unparsed": "unparsed", "both": "unparsed"}


class Unused(StrEnum):
    """Name why a selected judgment is in no DPO row, beside statuses that can be neither side."""

    NO_RIGHT = "no_right"
    NO_WRONG = "no_wrong"
    UNPARSED_CAP = "unparsed_cap"  # pairs.unparsed_rejected_share was reached
    ENOUGH = "enough_of_pair"  # pairs.max_per_pair rows do without it


class Matched(NamedTuple):
    """Hold the ids of the rows (DPO_ID) and the judgments in no row, counted by reason."""

    rows: pl.DataFrame
    unused: dict[str, int]


def match(selected: pa.Table, config: PairsConfig, *, seed: int) -> Matched:
    """Match up to `max_per_pair` rows a pair, checkpoint and order; see `tasks.pairs.dpo_rows`.

    A hinted one is chosen in one row, so that the share that selection left them holds for rows too.
    """
    sides = _sides(selected, seed)
    limit = pl.when("rationalized").then(1).otherwise(config.max_per_pair).cast(pl.Int64)
    rows = _combined(sides, "rejected", limit)
    made = rows.group_by("asked").agg(pl.len().cast(pl.Int64).alias("made"))
    spare = _combined(sides.join(made, on="asked", how="left"), "unparsed", limit - pl.col("made").fill_null(0))
    most = _unparsed_limit(rows.height, spare.height, config.unparsed_rejected_share)
    spare = spare.sort("lot", *DPO_ID)
    rows = pl.concat([rows, spare.head(most)])
    return Matched(rows.select(DPO_ID).sort(DPO_ID), _unused(sides, rows, spare[most:]))


def _sides(selected: pa.Table, seed: int) -> pl.DataFrame:
    """Give every judgment its side, its place by lot among those of its pair and order, and how many these are."""
    rows = frames.numbered(frames.frame(selected), BY_ORDER, "asked").with_row_index("row")
    rows = rows.with_columns(
        pl.col("status").replace_strict(_SIDES, default=None, return_dtype=pl.String).alias("side"),
        draw.lots(rows, seed, purpose="pairs"),
    )
    return (
        rows.sort("lot", *JUDGMENT_ID)
        .with_columns(pl.int_range(pl.len(), dtype=pl.Int64).over("asked", "side").alias("place"))
        .with_columns(((pl.col("side") == "chosen") & pl.col("hinted")).any().over("asked").alias("rationalized"))
        .with_columns(*((pl.col("side") == side).sum().over("asked").cast(pl.Int64).alias(side) for side in _COUNTED))
    )


_COUNTED = ("chosen", "rejected", "unparsed")


def _combined(sides: pl.DataFrame, other: str, limit: pl.Expr) -> pl.DataFrame:
    """Combine chosen with `other` up to `limit` a pair and order; the k-th row takes place k of both, then shifted."""
    k, right, wrong = pl.col("k"), pl.col("chosen"), pl.col(other)
    wanted = pl.min_horizontal(limit, right * wrong)
    asked = sides.unique("asked", keep="any").filter(wanted > 0)
    rows = asked.select("asked", *BY_ORDER, right, wrong, pl.int_ranges(0, wanted).alias("k")).explode("k")
    places = {"chosen": k % right, "rejected": (k % right + k // right) % wrong}
    for name, place in places.items():
        found = sides.filter(pl.col("side") == (other if name == "rejected" else name)).select(
            "asked",
            pl.col("place").alias(f"{name}_place"),
            *(pl.col(column).alias(f"{name}_{column}") for column in ("row", "sample", "hinted", "lot")),
        )
        rows = rows.with_columns(place.alias(f"{name}_place")).join(found, on=["asked", f"{name}_place"], how="left")
    return rows.select("asked", *DPO_ID, "chosen_row", "rejected_row", pl.col("rejected_lot").alias("lot"))


def _unparsed_limit(sure: int, spare: int, share: float) -> int:
    """Give the greatest u with u <= share * (sure + u)."""
    return spare if share >= 1 else min(spare, int(share * sure / (1 - share) + 1e-9))


def _unused(sides: pl.DataFrame, rows: pl.DataFrame, cut: pl.DataFrame) -> dict[str, int]:
    """Count the judgments that are in no row, by reason."""
    used, capped = (pl.concat([made["chosen_row"], made["rejected_row"]]).unique() for made in (rows, cut))
    left = sides.filter(~pl.col("row").is_in(used.implode()))
    reasons = left.select(
        pl.when(pl.col("side").is_null())
        .then("status")
        .when(pl.col("chosen") == 0)
        .then(pl.lit(Unused.NO_RIGHT.value))
        .when(pl.col("rejected") + pl.col("unparsed") == 0)
        .then(pl.lit(Unused.NO_WRONG.value))
        .when(pl.col("row").is_in(capped.implode()))
        .then(pl.lit(Unused.UNPARSED_CAP.value))
        .otherwise(pl.lit(Unused.ENOUGH.value))
        .alias("reason")
    )
    return count_reasons(reasons["reason"])


def count_reasons(reasons: pl.Series) -> dict[str, int]:
    """Count each reason, in the order of the words."""
    counts = reasons.alias("reason").value_counts().sort("reason")
    return {str(reason): int(count) for reason, count in counts.iter_rows()}
