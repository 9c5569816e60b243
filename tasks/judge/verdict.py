"""Read verdicts: one parser, versioned, for the training filter and for evaluation alike.

A verdict is `[[A]]` or `[[B]]`; `[[C]]` and `[[tie]]` are ties. Blanks inside the brackets are tolerated. The letters
are capitals, because `[[a]]` is a list in a rationale about code; `tie` may be written tie, Tie or TIE. Anything else
(`[A]`, `[[Response A]]`, `[[A/B]]`, `[[**A**]]`, `\\[\\[A\\]\\]`) is no verdict: the format is part of what is learnt.
The last verdict counts. Where the last line that holds a verdict holds different ones (`[[A]] or [[B]]`), none counts
and the judgment is `both`. Lines end at a line feed or a carriage return.
A completion that ran into the token limit is `truncated`, whatever it says; one without a proper end is an `error`.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import polars as pl
import pyarrow as pa

from storage.errors import StepFailedError
from storage.schema import JUDGMENT_ID, SCHEMAS, Order, Status

VERSION = 1

# The two engines (Python's `re`, Polars' Rust regex) read these patterns alike; a test holds them together.
_A, _B, _TIE = (rf"\[\[[ \t]*(?:{word})[ \t]*\]\]" for word in ("A", "B", "C|tie|Tie|TIE"))
_VERDICT = rf"(?:{_A}|{_B}|{_TIE})"
_SPAN = rf"{_VERDICT}(?:[^\r\n]*{_VERDICT})?"  # from the first to the last verdict of a line

_SPAN_RE, _VERDICT_RE = re.compile(_SPAN), re.compile(_VERDICT)

PARSED = (Status.CORRECT, Status.WRONG, Status.TIE)  # the statuses of a verdict that counts


class Reading(NamedTuple):
    """Hold what a text says: `outcome` A, B, tie, both or None (no verdict).

    `rationale_end` and `verdict_end` bound the counted verdict in characters (all of the line's verdicts for `both`);
    None without a verdict.
    """

    outcome: str | None
    rationale_end: int | None
    verdict_end: int | None


def read(text: str) -> Reading:
    """Read one text."""
    span = None
    for span in _SPAN_RE.finditer(text):
        pass
    if span is None:
        return Reading(None, None, None)
    *_, last = _VERDICT_RE.finditer(text, *span.span())
    outcomes = {_letter(found[0]) for found in _VERDICT_RE.finditer(text, *span.span())}
    if len(outcomes) > 1:
        return Reading("both", span.start(), span.end())
    return Reading(outcomes.pop(), last.start(), last.end())


def _letter(verdict: str) -> str:
    word = verdict.strip("[ \t]")
    return word if word in ("A", "B") else "tie"


def rationale_end(text: str) -> int | None:
    """Count the characters before the verdict that counts; None without one."""
    return read(text).rationale_end


def readings(texts: pl.Series) -> pl.DataFrame:
    """Read a column of texts as `read` does; give outcome, rationale_end, verdict_end."""
    frame = texts.fill_null("").to_frame("text").select("text", pl.col("text").str.extract_all(_SPAN).list.last().alias("span"))
    kinds = [pl.col("span").str.contains(pattern) for pattern in (_A, _B, _TIE)]
    frame = frame.with_columns(
        pl.when(pl.sum_horizontal(kinds) > 1)
        .then(pl.lit("both"))
        .otherwise(pl.when(kinds[0]).then(pl.lit("A")).when(kinds[1]).then(pl.lit("B")).when(kinds[2]).then(pl.lit("tie")))
        .alias("outcome"),
        pl.col("span").str.extract_all(_VERDICT).list.last().alias("last"),
        (pl.col("text").str.len_chars().cast(pl.Int64) - _tails(frame)).alias("verdict_end"),
    )
    counted = pl.when(pl.col("outcome") == "both").then("span").otherwise("last").str.len_chars().cast(pl.Int64)
    return frame.select(
        "outcome",
        (pl.col("verdict_end") - counted).cast(pl.Int32).alias("rationale_end"),
        pl.col("verdict_end").cast(pl.Int32),
    )


def _tails(frame: pl.DataFrame) -> pl.Series:
    """Count the characters after the last occurrence of `span` in `text`; null without a span.

    Most texts end with their verdict, and cutting the others apart is what costs time.
    """
    frame = frame.with_row_index("row")
    rest = frame.filter(~pl.col("text").str.ends_with(pl.col("span")))
    lengths = rest.select("row", pl.col("text").str.split(pl.col("span")).list.last().str.len_chars().cast(pl.Int64).alias("tail"))
    ended = pl.when(pl.col("span").is_not_null()).then(pl.lit(0, pl.Int64))
    joined = frame.select("row", ended.alias("ended")).join(lengths, on="row", how="left", maintain_order="left")
    return joined.select(pl.coalesce("tail", "ended")).to_series()


def cut(texts: pl.Series) -> pl.Series:
    """Cut texts behind the counted verdict, so that nothing rambles on after it in training; others stay whole."""
    frame = readings(texts).with_columns(texts.alias("text"))
    return frame.select(
        pl.when(pl.col("verdict_end").is_null()).then("text").otherwise(pl.col("text").str.slice(0, pl.col("verdict_end")))
    ).to_series()


def judge(completions: pa.Table, pairs: pa.Table) -> pa.Table:
    """Turn `completions` into `judgments`, row by row in their order; gold is mapped to the order shown.

    `verdict` is the letter as shown where A or B counts, else null (ties too: their status says so). `prob_gold` is
    1 - prob_a where the gold response was shown second. Raises StepFailedError for a completion of an unknown pair.
    """
    columns = [*JUDGMENT_ID, "finish_reason", "n_tokens", "prob_a", "error"]
    frame = _frame(completions.select(columns))
    frame = pl.concat([frame, readings(_series(completions.column("text")))], how="horizontal")
    frame = with_shown_gold(frame, pairs).with_columns(_status().alias("status"))
    counts = pl.col("status").is_in([Status.CORRECT.value, Status.WRONG.value])
    frame = frame.with_columns(
        pl.when(counts).then("outcome").alias("verdict"),
        pl.when(pl.col("shown_gold") == "A").then("prob_a").otherwise(1 - pl.col("prob_a")).alias("prob_gold"),
    )
    return to_table(frame, "judgments")


def _status() -> pl.Expr:
    outcome = pl.col("outcome")
    return (
        pl.when(pl.col("error").is_not_null() | ~pl.col("finish_reason").is_in(["stop", "length"]).fill_null(False))
        .then(pl.lit(Status.ERROR.value))
        .when(pl.col("finish_reason") == "length")
        .then(pl.lit(Status.TRUNCATED.value))
        .when(outcome.is_null())
        .then(pl.lit(Status.UNPARSED.value))
        .when(outcome.is_in(["both", "tie"]))
        .then(outcome)  # the words are those of Status
        .when(outcome == pl.col("shown_gold"))
        .then(pl.lit(Status.CORRECT.value))
        .otherwise(pl.lit(Status.WRONG.value))
    )


def with_shown_gold(frame: pl.DataFrame, pairs: pa.Table) -> pl.DataFrame:
    """Add `shown_gold`: the letter of the better response as it was shown, from the pair's gold and the row's order."""
    golds = _frame(pairs.select(["pair_id", "gold"]))
    frame = frame.join(golds, on="pair_id", how="left", validate="m:1", maintain_order="left")
    lost = frame.filter(~pl.col("gold").is_in(["A", "B"]).fill_null(False))
    if lost.height:
        raise StepFailedError(
            f"{lost.height} rows belong to no pair with a gold verdict, the first to pair {lost['pair_id'][0]}; "
            "give the pairs that were judged"
        )
    swapped = pl.when(pl.col("gold") == "A").then(pl.lit("B")).otherwise(pl.lit("A"))
    return frame.with_columns(pl.when(pl.col("order") == Order.AB.value).then("gold").otherwise(swapped).alias("shown_gold")).drop("gold")


def to_table(frame: pl.DataFrame, artifact: str) -> pa.Table:
    """Give a frame's columns as a table of an artifact's schema."""
    schema = SCHEMAS[artifact]
    return frame.select(schema.names).to_arrow(compat_level=pl.CompatLevel.oldest()).cast(schema)


def _frame(table: pa.Table) -> pl.DataFrame:
    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    return frame


def _series(column: pa.ChunkedArray) -> pl.Series:
    series = pl.from_arrow(column)
    assert isinstance(series, pl.Series)
    return series
