r"""Read verdicts: one parser, versioned, for the training filter and for evaluation alike.

A verdict is `[[A]]` or `[[B]]`; `[[C]]` and `[[tie]]` are ties. Blanks inside the brackets are tolerated. The letters
are capitals, because `[[a]]` is a list in a rationale about code; `tie` may be written tie, Tie or TIE. Anything else
(`[A]`, `[[Response A]]`, `[[A/B]]`, `[[**A**]]`, `\[\[A\]\]`) is no verdict: the format is part of what is learnt.
The last verdict counts. Where the last line that holds a verdict holds different ones (`[[A]] or [[B]]`), none counts
and the judgment is `both`. Lines end at a line feed or a carriage return.
A completion that ran into the token limit is `truncated`, whatever it says; one without a proper end is an `error`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

import polars as pl

from storage.errors import StepFailedError
from storage.schema import JUDGMENT_ID, Order, Status
from tasks.judge import frames

if TYPE_CHECKING:
    import pyarrow as pa

VERSION = 1

# The two engines (Python's `re`, Polars' Rust regex) read these patterns alike; a test holds them together.
_A, _B, _TIE = (rf"\[\[[ \t]*(?:{word})[ \t]*\]\]" for word in ("A", "B", "C|tie|Tie|TIE"))
_VERDICT = rf"(?:{_A}|{_B}|{_TIE})"
_SPAN = rf"{_VERDICT}(?:[^\r\n]*{_VERDICT})?"  # from the first to the last verdict of a line

_SPAN_RE, _VERDICT_RE = re.compile(_SPAN), re.compile(_VERDICT)

_NEAR = 200  # characters at the end of a text that are searched first

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
    spans = [found.span() for found in _SPAN_RE.finditer(text)]
    if not spans:
        return Reading(None, None, None)
    verdicts = list(_VERDICT_RE.finditer(text, *spans[-1]))
    outcomes = {_letter(found[0]) for found in verdicts}
    if len(outcomes) > 1:
        return Reading("both", *spans[-1])
    return Reading(outcomes.pop(), *verdicts[-1].span())


def _letter(verdict: str) -> str:
    word = verdict.strip("[ \t]")
    return word if word in ("A", "B") else "tie"


def rationale_end(text: str) -> int | None:
    """Count the characters before the verdict that counts; None without one."""
    return read(text).rationale_end


def readings(texts: pl.Series) -> pl.DataFrame:
    """Read a column of texts as `read` does; give outcome, rationale_end, verdict_end."""
    text, span, last = pl.col("text"), pl.col("span"), pl.col("last")
    rows = texts.fill_null("").to_frame("text").with_columns(text.str.extract_all(_SPAN).list.last().alias("span"))
    rows = rows.with_columns(
        _outcome().alias("outcome"),
        span.str.extract_all(_VERDICT).list.last().alias("last"),
        (text.str.len_chars().cast(pl.Int64) - _tails(rows)).alias("verdict_end"),
    )
    counted = pl.when(pl.col("outcome") == "both").then(span).otherwise(last).str.len_chars().cast(pl.Int64)
    start = pl.col("verdict_end") - counted
    return rows.select("outcome", start.cast(pl.Int32).alias("rationale_end"), pl.col("verdict_end").cast(pl.Int32))


def _outcome() -> pl.Expr:
    says_a, says_b, says_tie = (pl.col("span").str.contains(pattern) for pattern in (_A, _B, _TIE))
    return (
        pl.when(pl.sum_horizontal(says_a, says_b, says_tie) > 1)
        .then(pl.lit("both"))
        .when(says_a)
        .then(pl.lit("A"))
        .when(says_b)
        .then(pl.lit("B"))
        .when(says_tie)
        .then(pl.lit("tie"))
    )


def _tails(rows: pl.DataFrame) -> pl.Series:
    """Count the characters after the last occurrence of `span` in `text`; null without a span.

    Most texts end with their verdict or soon after; cutting whole texts apart is what costs time.
    """
    text, span, near = pl.col("text"), pl.col("span"), pl.col("text").str.tail(_NEAR)
    rows = rows.with_row_index("row")
    rest = rows.filter(~text.str.ends_with(span))
    rest = rest.with_columns(pl.when(near.str.contains(span, literal=True)).then(near).otherwise(text).alias("text"))
    tail = text.str.split(span).list.last().str.len_chars().cast(pl.Int64)
    ended = pl.when(span.is_not_null()).then(pl.lit(0, pl.Int64)).alias("ended")
    lengths = rest.select("row", tail.alias("tail"))
    joined = rows.select("row", ended).join(lengths, on="row", how="left", maintain_order="left")
    return joined.select(pl.coalesce("tail", "ended")).to_series()


def cut(texts: pl.Series) -> pl.Series:
    """Cut texts behind the counted verdict (for `both`, behind the last); texts without a verdict stay whole."""
    rows = readings(texts).with_columns(texts.alias("text"))
    short = pl.col("text").str.slice(0, pl.col("verdict_end"))
    return rows.select(pl.when(pl.col("verdict_end").is_null()).then("text").otherwise(short)).to_series()


def judge(completions: pa.Table, pairs: pa.Table) -> pa.Table:
    """Turn `completions` into `judgments`, row by row in their order; gold is mapped to the order shown.

    `verdict` is the letter as shown where A or B counts, else null (ties too: their status says so). `prob_gold` is
    1 - prob_a where the gold response was shown second. Raises StepFailedError for a completion of an unknown pair.
    """
    columns = [*JUDGMENT_ID, "finish_reason", "n_tokens", "prob_a", "error"]
    rows = frames.frame(completions.select(columns))
    rows = pl.concat([rows, readings(frames.series(completions.column("text")))], how="horizontal")
    rows = with_shown_gold(rows, pairs).with_columns(_status().alias("status"))
    counts = pl.col("status").is_in([Status.CORRECT.value, Status.WRONG.value])
    rows = rows.with_columns(
        pl.when(counts).then("outcome").alias("verdict"),
        pl.when(pl.col("shown_gold") == "A").then("prob_a").otherwise(1 - pl.col("prob_a")).alias("prob_gold"),
    )
    return frames.table(rows, "judgments")


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


def with_shown_gold(rows: pl.DataFrame, pairs: pa.Table) -> pl.DataFrame:
    """Add `shown_gold`: the letter of the better response as it was shown, from the pair's gold and the row's order."""
    golds = frames.frame(pairs.select(["pair_id", "gold"]))
    rows = rows.join(golds, on="pair_id", how="left", validate="m:1", maintain_order="left")
    lost = rows.filter(~pl.col("gold").is_in(["A", "B"]).fill_null(False))
    if lost.height:
        raise StepFailedError(
            f"{lost.height} rows belong to no pair with a gold verdict, the first to pair {lost['pair_id'][0]}; "
            "give the pairs that were judged"
        )
    swapped = pl.when(pl.col("gold") == "A").then(pl.lit("B")).otherwise(pl.lit("A"))
    shown = pl.when(pl.col("order") == Order.AB.value).then("gold").otherwise(swapped)
    return rows.with_columns(shown.alias("shown_gold")).drop("gold")
