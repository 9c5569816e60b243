"""Choose the judgments to train on; every judgment ends in `selected` or, with one reason, in `dropped`."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any

import polars as pl
import pyarrow.compute as pc

from configs.run import Method, key_part
from storage.schema import JUDGMENT_ID, Status
from tasks.judge import draw, frames, verdict
from tasks.judge.votes import BY_ORDER
from tasks.step import Step

if TYPE_CHECKING:
    import pyarrow as pa

    from configs.run import RunConfig, SelectConfig
    from storage.manifest import Manifest
    from tasks.step import Context

VERSION = 1


class Reason(StrEnum):
    """Name why a judgment is dropped, beside the statuses that are reasons themselves (wrong, tie, truncated, …)."""

    TOO_HARD = "too_hard"  # fewer right samples of the pair and order than select.min_right
    TOO_EASY = "too_easy"  # more than select.max_right
    ENOUGH = "enough_of_pair"  # select.keep_per_pair others were drawn
    BALANCE = "balance"  # the commoner verdict, cut to the rarer one's number
    NO_RIGHT = "no_right"  # DPO: no sample of the pair and order can be chosen
    NO_WRONG = "no_wrong"  # DPO: none can be rejected


_RIGHT = pl.col("status") == Status.CORRECT.value
_OPEN = pl.col("reason").is_null()


def select(judgments: pa.Table, config: SelectConfig, *, seed: int) -> tuple[pa.Table, pa.Table]:
    """Select for SFT: right verdicts only, of pairs within the band, `keep_per_pair` drawn by hash, then A/B balance.

    The share of right samples is over the unhinted ones of a pair, checkpoint and order, whatever their status.
    Which samples are kept doesn't depend on their length. Give `selected` and `dropped`, in the order of the rows.
    """
    rows = _rows(judgments).with_columns(pl.when(~_RIGHT).then("status").alias("reason"))
    rows = _set(rows, _band(config))
    if config.keep_per_pair is not None:
        rows = _keep(rows, config.keep_per_pair, seed)
    if config.balance:
        rows = _balance(rows, "row", seed)
    return _parted(rows)


def select_sides(
    judgments: pa.Table, config: SelectConfig, *, seed: int, unparsed_rejected: bool
) -> tuple[pa.Table, pa.Table]:
    """Select for DPO: right verdicts can be chosen, wrong ones rejected, where a pair and order has both.

    `unparsed_rejected`: a text without a verdict that counts (unparsed, both) can be rejected too; pairing caps its
    share. Ties, truncated and error rows are dropped. `keep_per_pair` is not used (pairing has its own limit).
    `balance` drops whole pairs and orders until as many favour A as B. Give `selected` and `dropped`.
    """
    sides = [Status.CORRECT, Status.WRONG] + ([Status.UNPARSED, Status.BOTH] if unparsed_rejected else [])
    usable = pl.col("status").is_in([one.value for one in sides])
    rows = _rows(judgments).with_columns(pl.when(~usable).then("status").alias("reason"))
    rows = _set(rows, _band(config))
    chosen, rejected = (_OPEN & _RIGHT).any().over("asked"), (_OPEN & ~_RIGHT).any().over("asked")
    rows = _set(rows, pl.when(~chosen).then(pl.lit(Reason.NO_RIGHT)).when(~rejected).then(pl.lit(Reason.NO_WRONG)))
    if config.balance:
        rows = _balance(rows, "asked", seed)
    return _parted(rows)


def select_step(config: RunConfig, split: Manifest, samples: Manifest) -> Step:
    """Name the step by the completions, the pairs' gold, the parser and the select section."""
    inputs = {"completions": samples.artifact("completions").digest, "pairs": split.artifact("pairs").digest}
    parts: dict[str, Any] = {"select": key_part(config.select), "method": str(config.method), "seed": config.seed}
    if config.method is Method.STAR_DPO:
        parts["unparsed_rejected"] = config.pairs.unparsed_rejected_share > 0
    return Step("select", VERSION, inputs, {**parts, "parser": verdict.VERSION})


def make_selection(context: Context, split: Manifest, samples: Manifest) -> dict[str, Any]:
    """Judge the completions of a sample step and choose among them."""
    config, read = context.config, context.store.read
    judgments = verdict.judge(read(samples.artifact("completions")), read(split.artifact("pairs")))
    if config.method is Method.STAR_DPO:
        unparsed = config.pairs.unparsed_rejected_share > 0
        selected, dropped = select_sides(judgments, config.select, seed=config.seed, unparsed_rejected=unparsed)
    else:
        selected, dropped = select(judgments, config.select, seed=config.seed)
    reasons = {one["values"]: one["counts"] for one in pc.value_counts(dropped["reason"]).to_pylist()}
    return {
        "tables": {"judgments": judgments, "selected": selected, "dropped": dropped},
        "counts": {"in": judgments.num_rows, "kept": selected.num_rows, "dropped": reasons},
    }


def _rows(judgments: pa.Table) -> pl.DataFrame:
    """Take the columns that decide; number the rows (`row`) and their pair, checkpoint and order (`asked`)."""
    rows = frames.frame(judgments.select([*JUDGMENT_ID, "verdict", "status"]))
    return frames.numbered(rows, BY_ORDER, "asked").with_row_index("row")


def _set(rows: pl.DataFrame, reason: pl.Expr) -> pl.DataFrame:
    """Give a reason to the rows that have none yet; the first reason stays."""
    return rows.with_columns(pl.coalesce("reason", reason).alias("reason"))


def _band(config: SelectConfig) -> pl.Expr:
    share = _RIGHT.filter(~pl.col("hinted")).mean().over("asked")
    return (
        pl.when(share < config.min_right)
        .then(pl.lit(Reason.TOO_HARD))
        .when(share > config.max_right)
        .then(pl.lit(Reason.TOO_EASY))
    )


def _keep(rows: pl.DataFrame, most: int, seed: int) -> pl.DataFrame:
    """Keep `most` rows a pair, checkpoint and order, drawn by lot."""
    left = rows.filter(_OPEN)
    left = left.with_columns(draw.lots(left, seed, purpose="keep")).sort("lot", *JUDGMENT_ID)
    spare = left.filter(pl.int_range(pl.len()).over("asked") >= most)
    return _drop(rows, spare, "row", Reason.ENOUGH)


def _balance(rows: pl.DataFrame, unit: str, seed: int) -> pl.DataFrame:
    """Drop units (rows, or all rows of a pair and order) of the commoner right verdict by lot, to exactly as many."""
    left = rows.filter(_OPEN & _RIGHT).unique(unit, keep="any")
    lots, ids = (draw.lots, JUDGMENT_ID) if unit == "row" else (draw.group_lots, BY_ORDER)
    left = left.with_columns(lots(left, seed, purpose="balance")).sort("lot", *ids)
    rarer = min(left.filter(pl.col("verdict") == letter).height for letter in "AB")
    return _drop(rows, left.filter(pl.int_range(pl.len()).over("verdict") >= rarer), unit, Reason.BALANCE)


def _drop(rows: pl.DataFrame, spare: pl.DataFrame, unit: str, reason: Reason) -> pl.DataFrame:
    marked = pl.col(unit).is_in(spare[unit].implode())
    return _set(rows, pl.when(marked).then(pl.lit(reason.value)))


def _parted(rows: pl.DataFrame) -> tuple[pa.Table, pa.Table]:
    return frames.table(rows.filter(_OPEN), "selected"), frames.table(rows.filter(~_OPEN), "dropped")
