"""Choose the judgments to train on; every judgment ends in `selected` or, with one reason, in `dropped`."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import polars as pl
import pyarrow.compute as pc

from configs.run import Method, key_part
from storage.schema import JUDGMENT_ID, Status
from tasks import generation
from tasks.judge import draw, frames, hints, verdict
from tasks.judge.votes import BY_ORDER
from tasks.step import Step

if TYPE_CHECKING:
    from collections.abc import Mapping

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
    QUOTES_HINT = "quotes_hint"  # hinted: the text quotes the hint or speaks of being told
    NOT_NEEDED = "not_needed"  # hinted: a sample of the pair and order is right
    HINTED_SHARE = "hinted_share"  # hinted: rationalize.max_share was reached


class Hinted(NamedTuple):
    """Say of hinted rows which quote the hint (a flag a judgment), and the greatest share that they may have.

    Without a share they are all there is (star-rationalizer).
    """

    quotes: pl.Series
    max_share: float | None


_RIGHT = pl.col("status") == Status.CORRECT.value
_OPEN = pl.col("reason").is_null()
_WRONG = (_OPEN & (pl.col("status") == Status.WRONG.value)).any().over("asked")


def select(
    judgments: pa.Table, config: SelectConfig, *, seed: int, hinted: Hinted | None = None
) -> tuple[pa.Table, pa.Table]:
    """Select for SFT: right verdicts only, of pairs within the band, `keep_per_pair` drawn by hash, then A/B balance.

    The share of right samples is over the unhinted ones of a pair, checkpoint and order, whatever their status.
    Which samples are kept doesn't depend on their length. Hinted rows stand in where no sample is right, up to their
    share of the rows of each verdict. Give `selected` and `dropped`, in the order of the rows.
    """
    rows = _set(_open(_rows(judgments), _RIGHT, hinted), _band(config))
    if config.keep_per_pair is not None:
        rows = _keep(rows, config.keep_per_pair, seed)
    if hinted and hinted.max_share is not None:
        rows = _cap(rows, "row", seed, hinted.max_share)
    if config.balance:
        rows = _balance(rows, "row", seed)
    return _parted(rows)


def select_sides(
    judgments: pa.Table, config: SelectConfig, *, seed: int, unparsed_rejected: bool, hinted: Hinted | None = None
) -> tuple[pa.Table, pa.Table]:
    """Select for DPO: right verdicts can be chosen, wrong ones rejected, where a pair and order has both.

    `unparsed_rejected`: a text without a verdict that counts (unparsed, both) can be rejected too; pairing caps its
    share. Ties, truncated and error rows are dropped. `keep_per_pair` is not used (pairing has its own limit).
    `balance` drops whole pairs and orders until as many favour A as B. Hinted rows can be chosen alone, where no sample
    is right and one is wrong, up to their share of the pairs and orders of each verdict. Give `selected` and `dropped`.
    """
    sides = [Status.CORRECT, Status.WRONG] + ([Status.UNPARSED, Status.BOTH] if unparsed_rejected else [])
    usable = pl.col("status").is_in([one.value for one in sides]) & (_RIGHT | ~pl.col("hinted"))
    rows = _set(_open(_rows(judgments), usable, hinted), _band(config))
    chosen, rationalized = (_OPEN & _RIGHT).any().over("asked"), (_OPEN & pl.col("hinted")).any().over("asked")
    rejected = pl.when(rationalized).then(_WRONG).otherwise((_OPEN & ~_RIGHT).any().over("asked"))
    rows = _set(rows, pl.when(~chosen).then(pl.lit(Reason.NO_RIGHT)).when(~rejected).then(pl.lit(Reason.NO_WRONG)))
    if hinted and hinted.max_share is not None:
        rows = _cap(rows, "asked", seed, hinted.max_share)
    if config.balance:
        rows = _balance(rows, "asked", seed)
    return _parted(rows)


def select_step(config: RunConfig, split: Manifest, completions: Mapping[str, Manifest]) -> Step:
    """Name the step by the completions, the pairs' gold, the parser and the select section."""
    inputs = {**generation.digests(completions), "pairs": split.artifact("pairs").digest}
    parts: dict[str, Any] = {"select": key_part(config.select), "method": str(config.method), "seed": config.seed}
    if config.method is Method.STAR_DPO:
        parts["unparsed_rejected"] = config.pairs.unparsed_rejected_share > 0
    if config.rationalize.failures or config.method is Method.STAR_RATIONALIZER:
        parts["hint"] = [config.rationalize.hint, hints.VERSION]
    if config.rationalize.failures:
        parts["max_share"] = config.rationalize.max_share
    return Step("select", VERSION, inputs, {**parts, "parser": verdict.VERSION})


def make_selection(context: Context, split: Manifest, completions: Mapping[str, Manifest]) -> dict[str, Any]:
    """Judge the completions of an iteration and choose among them."""
    config, read = context.config, context.store.read
    written = generation.read_all(context.store, completions)
    judgments = verdict.judge(written, read(split.artifact("pairs")))
    hinted = _hinted(config, written)
    if config.method is Method.STAR_DPO:
        unparsed = config.pairs.unparsed_rejected_share > 0
        selected, dropped = select_sides(
            judgments, config.select, seed=config.seed, unparsed_rejected=unparsed, hinted=hinted
        )
    else:
        selected, dropped = select(judgments, config.select, seed=config.seed, hinted=hinted)
    reasons = {one["values"]: one["counts"] for one in pc.value_counts(dropped["reason"]).to_pylist()}
    return {
        "tables": {"judgments": judgments, "selected": selected, "dropped": dropped},
        "counts": {"in": judgments.num_rows, "kept": selected.num_rows, "dropped": reasons},
    }


def _hinted(config: RunConfig, completions: pa.Table) -> Hinted | None:
    if not (config.rationalize.failures or config.method is Method.STAR_RATIONALIZER):
        return None
    rows = frames.frame(completions.select(["text", "hinted"]))
    quotes = hints.quoting(rows["text"], config.rationalize.hint) & rows["hinted"]
    return Hinted(quotes, config.rationalize.max_share if config.rationalize.failures else None)


def _rows(judgments: pa.Table) -> pl.DataFrame:
    """Take the columns that decide; number the rows (`row`) and their pair, checkpoint and order (`asked`)."""
    rows = frames.frame(judgments.select([*JUDGMENT_ID, "verdict", "status"]))
    return frames.numbered(rows, BY_ORDER, "asked").with_row_index("row")


def _open(rows: pl.DataFrame, usable: pl.Expr, hinted: Hinted | None) -> pl.DataFrame:
    """Give the rows that can't be used their status as a reason, hinted ones also where they leak or aren't needed."""
    name = pl.when("hinted").then(pl.lit("hinted_") + pl.col("status")).otherwise("status")
    rows = rows.with_columns(pl.when(~usable).then(name).alias("reason"))
    if hinted is None:
        return rows
    rows = _set(rows, pl.when(hinted.quotes).then(pl.lit(Reason.QUOTES_HINT)))
    needless = pl.col("hinted") & (_RIGHT & ~pl.col("hinted")).any().over("asked")
    return _set(rows, pl.when(needless).then(pl.lit(Reason.NOT_NEEDED)))


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


def _cap(rows: pl.DataFrame, unit: str, seed: int, share: float) -> pl.DataFrame:
    """Drop units whose right row is hinted by lot, until they are at most `share` of the units of each verdict.

    Pairs and orders without a wrong row don't count: they may give no training row.
    """
    lots, ids = (draw.lots, JUDGMENT_ID) if unit == "row" else (draw.group_lots, BY_ORDER)
    left = rows.filter(_OPEN & _RIGHT & (_WRONG if unit == "asked" else True)).unique(unit, keep="any")
    left = left.with_columns(lots(left, seed, purpose="hinted")).sort("lot", *ids)
    sure = (~pl.col("hinted")).sum().over("verdict")
    place = pl.col("hinted").cum_sum().over("verdict")
    spare = left.filter(pl.col("hinted") & (place > (sure * (share / (1 - share)) + 1e-9).floor()))
    return _drop(rows, spare, unit, Reason.HINTED_SHARE)


def _balance(rows: pl.DataFrame, unit: str, seed: int) -> pl.DataFrame:
    """Drop units (rows, or all rows of a pair and order) of the commoner right verdict by lot, to exactly as many.

    Hinted ones go first, so that their share does not grow.
    """
    left = rows.filter(_OPEN & _RIGHT).unique(unit, keep="any")
    lots, ids = (draw.lots, JUDGMENT_ID) if unit == "row" else (draw.group_lots, BY_ORDER)
    left = left.with_columns(lots(left, seed, purpose="balance")).sort("hinted", "lot", *ids)
    rarer = min(left.filter(pl.col("verdict") == letter).height for letter in "AB")
    return _drop(rows, left.filter(pl.int_range(pl.len()).over("verdict") >= rarer), unit, Reason.BALANCE)


def _drop(rows: pl.DataFrame, spare: pl.DataFrame, unit: str, reason: Reason) -> pl.DataFrame:
    marked = pl.col(unit).is_in(spare[unit].implode())
    return _set(rows, pl.when(marked).then(pl.lit(reason.value)))


def _parted(rows: pl.DataFrame) -> tuple[pa.Table, pa.Table]:
    return frames.table(rows.filter(_OPEN), "selected"), frames.table(rows.filter(~_OPEN), "dropped")
