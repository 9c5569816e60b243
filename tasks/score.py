"""Score the judgments of one checkpoint on one suite: every number with interval, n and clusters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import polars as pl

from storage.errors import StepFailedError
from storage.schema import Status
from tasks.judge import frames, statistics, verdict, votes
from tasks.judge.statistics import Interval, clustered
from tasks.judge.verdict import PARSED, with_shown_gold
from tasks.step import Step

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa

    from storage.manifest import Manifest

VERSION = 1

# Metric -> column of the frame below. Over pairs: mean of the orders, majority of the votes.
OVER_PAIRS = {
    "forced_choice": "forced_choice",  # the reading of record
    "free_text": "free_text",  # a majority for gold; no verdict at all counts as not right
    "free_text_parsed": "free_text_parsed",  # over the orders with a verdict
    "soft_vote": "soft_vote",  # mean probability of gold over votes and orders above 1/2
    "consistency": "consistent",  # the same response wins in both orders (free text)
}
# Over single judgments; n counts judgments.
OVER_JUDGMENTS = {
    "single_vote": "right",  # majority@1: right 1, tie 1/2, all else 0
    "parse_rate": "parsed",  # a verdict counts (right, wrong, tie)
    "truncation_rate": "truncated",
    "pick_a": "picked_a",  # share of A among verdicts A and B, letters as shown
    "pick_a_forced": "picked_a_forced",  # share of P(A) above 1/2, letters as shown
    "prob_gold": "prob_gold",
    "rationale_tokens": "n_tokens",  # verdict included; errors left out
}
METRICS = (*OVER_PAIRS, *OVER_JUDGMENTS)
UNBOUNDED = ("rationale_tokens",)
LETTERS = ("forced_choice", "soft_vote", "pick_a_forced", "prob_gold")  # what needs no text


def score(judgments: pa.Table, pairs: pa.Table, *, suite: str) -> tuple[pa.Table, pa.Table]:
    """Give `metrics` (overall: subset "", and per subset) and `pair_scores` of one checkpoint's votes on a suite.

    `pairs` are the pairs of the suite, no more and no fewer. Raises StepFailedError where a pair was not judged, a
    judged one is none of the suite's, or the judgments are hinted or of several checkpoints.
    """
    _check(judgments, pairs)
    groups = frames.frame(pairs.select(["pair_id", "group", "subset"])).with_columns(pl.col("subset").fill_null(""))
    by_pair = frames.frame(votes.by_pair(votes.by_order(judgments)))
    scored = by_pair.join(groups, on="pair_id", how="left", validate="m:1", maintain_order="left")
    single = _single(judgments, pairs).join(groups, on="pair_id", how="left", maintain_order="left")
    rows = [*_measure(scored, OVER_PAIRS, suite), *_measure(single, OVER_JUDGMENTS, suite)]
    ranks = {name: rank for rank, name in enumerate(METRICS)}
    rows.sort(key=lambda row: (str(row["subset"]), ranks[str(row["metric"])]))
    metrics = pl.DataFrame(rows, schema=_METRIC_TYPES, orient="row")
    return frames.table(metrics, "metrics"), frames.table(scored.with_columns(suite=pl.lit(suite)), "pair_scores")


def score_choices(choices: pa.Table, pairs: pa.Table, *, suite: str) -> tuple[pa.Table, pa.Table]:
    """Give the same of `choices`: metrics that need a text are not there, their columns of `pair_scores` are null."""
    metrics, pair_scores = score(_unspoken(choices, pairs), pairs, suite=suite)
    kept = frames.frame(metrics).filter(pl.col("metric").is_in(LETTERS))
    unread = [pl.lit(None, pl.Float64).alias("free_text"), pl.lit(None, pl.Boolean).alias("consistent")]
    return frames.table(kept, "metrics"), frames.table(frames.frame(pair_scores).with_columns(unread), "pair_scores")


def _unspoken(choices: pa.Table, pairs: pa.Table) -> pa.Table:
    """Take readings as judgments of which only `prob_gold` is known."""
    prob = pl.when(pl.col("shown_gold") == "A").then("prob_a").otherwise(1 - pl.col("prob_a"))
    unknown = {"verdict": pl.String, "status": pl.String, "rationale_end": pl.Int32, "n_tokens": pl.Int32}
    rows = with_shown_gold(frames.frame(choices), pairs).with_columns(
        prob.alias("prob_gold"),
        pl.lit(0, pl.Int32).alias("sample"),
        pl.lit(False).alias("hinted"),
        *(pl.lit(None, dtype).alias(name) for name, dtype in unknown.items()),
    )
    return frames.table(rows, "judgments")


def score_step(evaluated: Sequence[Manifest], split: Manifest, suite: str, *, artifact: str) -> Step:
    """Name the step by what every vote block holds (`completions`, or `choices`) and the pairs."""
    inputs = {f"{artifact}-{number}": one.artifact(artifact).digest for number, one in enumerate(evaluated)}
    inputs["pairs"] = split.artifact("pairs").digest
    versions = {"parser": verdict.VERSION, "votes": votes.VERSION, "statistics": statistics.VERSION}
    return Step("score", VERSION, inputs, {"suite": suite, **versions})


def make_choice_score(choices: pa.Table, pairs: pa.Table, suite: str) -> dict[str, Any]:
    """Score the readings of a suite."""
    metrics, pair_scores = score_choices(choices, pairs, suite=suite)
    errors = choices.num_rows - choices.column("error").null_count
    counts = {"in": choices.num_rows, "kept": choices.num_rows - errors, "dropped": {"error": errors} if errors else {}}
    return {"tables": {"metrics": metrics, "pair_scores": pair_scores}, "counts": counts}


def make_score(completions: pa.Table, pairs: pa.Table, suite: str) -> dict[str, Any]:
    """Judge the completions of a suite and score them."""
    judgments = verdict.judge(completions, pairs)
    metrics, pair_scores = score(judgments, pairs, suite=suite)
    counts = {"in": completions.num_rows, "kept": judgments.num_rows, "dropped": {}}
    return {"tables": {"judgments": judgments, "metrics": metrics, "pair_scores": pair_scores}, "counts": counts}


_METRIC_TYPES = {
    **dict.fromkeys(("suite", "subset", "section", "metric"), pl.String),
    **dict.fromkeys(("value", "low", "high"), pl.Float64),
    **dict.fromkeys(("n", "clusters"), pl.Int64),
}


def _check(judgments: pa.Table, pairs: pa.Table) -> None:
    rows = frames.frame(judgments.select(["pair_id", "checkpoint", "hinted"]))
    checkpoints = rows["checkpoint"].n_unique()
    if checkpoints > 1 or rows["hinted"].any():
        raise StepFailedError(
            f"a score is of one checkpoint's unhinted judgments, these are of {checkpoints} checkpoints"
            f"{' and partly hinted' if rows['hinted'].any() else ''}; score them apart"
        )
    judged, asked = rows["pair_id"].unique(), frames.frame(pairs.select(["pair_id"]))["pair_id"]
    missing = asked.len() - asked.is_in(judged.implode()).sum()
    strange = judged.len() - judged.is_in(asked.implode()).sum()
    if missing or strange:
        raise StepFailedError(
            f"{missing} of {asked.len()} pairs of the suite have no judgment and {strange} judged pairs are none of "
            "the suite's; give the judgments and the pairs of one suite"
        )


def _single(judgments: pa.Table, pairs: pa.Table) -> pl.DataFrame:
    """Give one row a judgment with the values under OVER_JUDGMENTS, null where a judgment doesn't count."""
    columns = ["pair_id", "order", "verdict", "status", "n_tokens", "prob_gold"]
    rows = with_shown_gold(frames.frame(judgments.select(columns)), pairs)
    status, prob = pl.col("status"), pl.col("prob_gold")
    prob_a = pl.when(pl.col("shown_gold") == "A").then(prob).otherwise(1 - prob)
    right = pl.when(status == Status.CORRECT.value).then(1.0).when(status == Status.TIE.value).then(0.5).otherwise(0.0)
    return rows.select(
        "pair_id",
        right.alias("right"),
        status.is_in([one.value for one in PARSED]).alias("parsed"),
        (status == Status.TRUNCATED.value).alias("truncated"),
        (pl.col("verdict") == "A").alias("picked_a"),
        ((prob_a - 0.5).sign() / 2 + 0.5).alias("picked_a_forced"),
        "prob_gold",
        pl.when(status != Status.ERROR.value).then("n_tokens").alias("n_tokens"),
    )


def _measure(rows: pl.DataFrame, metrics: dict[str, str], suite: str) -> list[dict[str, str | float | int | None]]:
    """Measure every metric over all rows and per subset, from each group's sum and count."""
    values = [pl.col(column).cast(pl.Float64) for column in metrics.values()]
    totals = [value.sum().alias(f"{name}:sum") for name, value in zip(metrics, values, strict=True)]
    totals += [value.count().alias(f"{name}:n") for name, value in zip(metrics, values, strict=True)]
    made: list[dict[str, str | float | int | None]] = []
    for keys in (["group"], ["subset", "group"]):
        clusters = rows.group_by(keys).agg(totals).sort(keys)
        parts = {"": clusters} if keys == ["group"] else _parts(clusters)
        for subset, part in parts.items():
            for name in metrics:
                measured = _interval(part, name)._asdict()
                made.append({"suite": suite, "subset": subset, "section": "", "metric": name, **measured})
    return made


def _parts(clusters: pl.DataFrame) -> dict[str, pl.DataFrame]:
    named = clusters.filter(pl.col("subset") != "")
    return {str(part["subset"][0]): part for part in named.partition_by("subset", maintain_order=True)}


def _interval(part: pl.DataFrame, name: str) -> Interval:
    found = clustered(part[f"{name}:sum"].to_numpy(), part[f"{name}:n"].to_numpy(), bounded=name not in UNBOUNDED)
    if name in UNBOUNDED and found.low is not None:
        return found._replace(low=max(0.0, found.low))
    return found
