"""Count votes: several completions judge one pair in one order; the majority decides, a tie stays a tie.

Free text: a vote is right, wrong, an explicit tie, or nothing (no verdict that counts). The majority is the sign of
right - wrong, so an explicit tie is half a vote for either side. Forced choice: every vote with a probability counts,
right above 1/2, a tie at 1/2. Soft vote: the mean probability of gold decides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from storage.schema import Status
from tasks.judge import frames

if TYPE_CHECKING:
    import pyarrow as pa

VERSION = 1

BY_ORDER = ("pair_id", "checkpoint", "order")
BY_PAIR = ("pair_id", "checkpoint")


def by_order(judgments: pa.Table) -> pa.Table:
    """Hold one vote a pair and order, over the samples, sorted by BY_ORDER.

    Columns beside BY_ORDER: votes, right, wrong, ties (counts); `majority` correct | wrong | tie, null without any
    verdict; `free_text` 1, 1/2 or 0 after it (no verdict is 0); `forced_choice` 1, 1/2 or 0 and `prob_gold` (mean of
    the votes), both null where no probability was read.
    """
    status, prob = pl.col("status"), pl.col("prob_gold")
    counted = [(status == one.value).sum().cast(pl.Int64) for one in (Status.CORRECT, Status.WRONG, Status.TIE)]
    rows = frames.frame(judgments.select([*BY_ORDER, "status", "prob_gold"]))
    rows = rows.group_by(BY_ORDER).agg(
        pl.len().cast(pl.Int64).alias("votes"),
        *(count.alias(name) for count, name in zip(counted, ("right", "wrong", "ties"), strict=True)),
        (prob - 0.5).sign().sum().alias("lead"),
        prob.mean().alias("prob_gold"),
    )
    rows = rows.with_columns(_majority().alias("majority"))
    read = pl.col("prob_gold").is_not_null()
    rows = rows.with_columns(
        _share(pl.col("right") - pl.col("wrong")).mul(pl.col("majority").is_not_null()).alias("free_text"),
        pl.when(read).then(_share(pl.col("lead"))).alias("forced_choice"),
    )
    return frames.plain(rows.drop("lead").sort(BY_ORDER))


def _majority() -> pl.Expr:
    right, wrong = pl.col("right"), pl.col("wrong")
    return (
        pl.when(right > wrong)
        .then(pl.lit(Status.CORRECT.value))
        .when(right < wrong)
        .then(pl.lit(Status.WRONG.value))
        .when(right + pl.col("ties") > 0)
        .then(pl.lit(Status.TIE.value))
    )


def _share(lead: pl.Expr) -> pl.Expr:
    """Turn a lead into 1, 1/2 or 0."""
    return (lead.sign().cast(pl.Float64) + 1) / 2


def by_pair(votes: pa.Table) -> pa.Table:
    """Average the votes of `by_order` over the orders, one row a pair, sorted by BY_PAIR.

    Columns beside BY_PAIR: orders (count); `free_text`, `forced_choice`, `prob_gold` as there, averaged;
    `free_text_parsed` over the orders with a verdict, else null; `soft_vote` 1, 1/2 or 0 after the averaged
    probability; `consistent`: the same response wins in both orders, null with one order.
    """
    won = [(pl.col("majority") == one.value).sum() for one in (Status.CORRECT, Status.WRONG)]
    rows = frames.frame(votes).sort(BY_ORDER)
    rows = rows.group_by(BY_PAIR, maintain_order=True).agg(
        pl.len().cast(pl.Int64).alias("orders"),
        pl.col("free_text", "forced_choice", "prob_gold").mean(),
        pl.col("free_text").filter(pl.col("majority").is_not_null()).mean().alias("free_text_parsed"),
        pl.when(pl.len() == 2).then((won[0] == 2) | (won[1] == 2)).alias("consistent"),
    )
    return frames.plain(rows.with_columns(_share(pl.col("prob_gold") - 0.5).alias("soft_vote")))
