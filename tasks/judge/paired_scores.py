"""Hold the pair scores of two checkpoints against each other, pair by pair."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from tasks.judge import frames

if TYPE_CHECKING:
    import pyarrow as pa

METRICS = ("forced_choice", "free_text")  # the reading of record first


def shared(now: pa.Table, before: pa.Table, metric: str) -> pl.DataFrame:
    """Give the pairs of both `pair_scores` that have the metric: pair_id, group, subset, now, before; sorted by id."""
    later, earlier = (frames.frame(one.select(["pair_id", "group", "subset", metric])) for one in (now, before))
    both = later.rename({metric: "now"}).join(
        earlier.select("pair_id", pl.col(metric).cast(pl.Float64).alias("before")),
        on="pair_id",
        how="inner",
        validate="1:1",
    )
    return both.with_columns(pl.col("now").cast(pl.Float64)).drop_nulls(["now", "before"]).sort("pair_id")


def metric_of_record(now: pa.Table, before: pa.Table) -> str | None:
    """Name what both can be compared by: the forced choice, or free text where it was not read; None without pairs."""
    return next((metric for metric in METRICS if shared(now, before, metric).height), None)


def flips(now: pa.Table, before: pa.Table) -> pl.DataFrame:
    """Give the shared pairs that changed sides by the metric of record; right is a score above 1/2.

    Columns: pair_id, group, subset, now, before, change (gained | lost); the greatest change first.
    """
    metric = metric_of_record(now, before)
    rows = shared(now, before, metric or METRICS[0])
    right, was_right = pl.col("now") > 0.5, pl.col("before") > 0.5
    change = pl.when(right).then(pl.lit("gained")).otherwise(pl.lit("lost"))
    changed = rows.filter(right != was_right).with_columns(change.alias("change"))
    return changed.sort((pl.col("now") - pl.col("before")).abs(), "pair_id", descending=[True, False])
