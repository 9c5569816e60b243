"""Decide on dev whether the loop goes on: only evidence that a checkpoint is worse, or a collapse, stops it."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import polars as pl

from configs.run import key_part
from tasks.judge import frames, paired_scores, statistics
from tasks.judge.statistics import Difference, paired
from tasks.step import Step

if TYPE_CHECKING:
    import pyarrow as pa

    from configs.run import GateConfig, RunConfig
    from storage.manifest import Manifest
    from storage.store import Store

VERSION = 1


class Decision(StrEnum):
    """Say whether the loop goes on."""

    GO = "go"
    STOP = "stop"


class Gate(NamedTuple):
    """Hold a decision and what it rests on.

    `difference` is now - before on the dev pairs, with its 95 % interval; `p` is one-sided: small where now is worse.
    All four are None at the first look.
    """

    decision: Decision
    reason: str
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None


def decide(
    dev_now: pa.Table, dev_before: pa.Table | None, metrics_now: pa.Table, config: GateConfig, looks: int
) -> Gate:
    """Decide from two checkpoints' `pair_scores` on dev and the `metrics` of the newer one.

    The comparison is the forced choice, or free text where no probabilities were read. It stops where the newer is
    worse at alpha / looks (Bonferroni over the looks of a run), or its parse rate is below the floor; with
    `on_worse: continue` the loop goes on all the same and the reason says so. No evidence goes on.
    """
    if looks < 1:
        raise ValueError(f"{looks} looks: a run has at least one")
    limit = config.alpha / looks
    metric, found = compare(dev_now, dev_before)
    numbers = (found.value, found.low, found.high, found.p_worse) if found else ()
    bad = _collapse(metrics_now, config.min_parse_rate)
    if bad is None and found and found.value < 0 and found.p_worse <= limit:
        bad = f"Worse than the checkpoint before: {_say(metric, found, limit)}"
    if bad is None:
        return Gate(Decision.GO, _fine(metric, found, limit), *numbers)
    if config.on_worse == "continue":
        return Gate(Decision.GO, f"{bad}; goes on because gate.on_worse is continue.", *numbers)
    return Gate(Decision.STOP, f"{bad}.", *numbers)


def gate_step(config: RunConfig, dev: Manifest | None, before: Manifest | None) -> Step:
    """Name the step by the dev scores of the checkpoint and of the one before."""
    inputs: dict[str, str | None] = {
        name: dev.artifact(name).digest if dev else None for name in ("pair_scores", "metrics")
    }
    inputs["before"] = before.artifact("pair_scores").digest if before else None
    parts = {"gate": key_part(config.gate), "looks": config.iterations, "statistics": statistics.VERSION}
    return Step("gate", VERSION, inputs, parts)


def make_gate(config: RunConfig, store: Store, dev: Manifest | None, before: Manifest | None) -> dict[str, Any]:
    """Decide from committed scores; the decision and its reason are the step's facts. Without dev pairs all goes on."""
    if dev is None:
        return {"counts": {}, "facts": {**Gate(Decision.GO, "No dev pairs to decide on.")._asdict(), "decision": "go"}}
    gate = decide(
        store.read(dev.artifact("pair_scores")),
        store.read(before.artifact("pair_scores")) if before else None,
        store.read(dev.artifact("metrics")),
        config.gate,
        config.iterations,
    )
    return {"counts": {}, "facts": {**gate._asdict(), "decision": str(gate.decision)}}


def compare(now: pa.Table, before: pa.Table | None) -> tuple[str, Difference | None]:
    """Compare two checkpoints on the same pairs: by forced choice, or free text where it was not read."""
    if before is None:
        return "", None
    metric = paired_scores.metric_of_record(now, before)
    if metric is None:
        return "", None
    rows = paired_scores.shared(now, before, metric)
    return metric, paired(rows["now"].to_numpy(), rows["before"].to_numpy(), rows["group"].to_list())


def _collapse(metrics: pa.Table, floor: float) -> str | None:
    rows = frames.frame(metrics).filter((pl.col("metric") == "parse_rate") & (pl.col("subset") == ""))
    rate = rows["value"][0] if rows.height else None
    if rate is None or rate >= floor:
        return None
    return f"Only {rate:.1%} of {rows['n'][0]} judgments have a verdict, below gate.min_parse_rate {floor:.1%}"


def _fine(metric: str, found: Difference | None, limit: float) -> str:
    if found is None:
        return "Nothing to compare with yet."
    return f"No evidence that it is worse than the checkpoint before: {_say(metric, found, limit)}."


def _say(metric: str, found: Difference, limit: float) -> str:
    value, low, high = (f"{100 * number:+.1f}" for number in (found.value, found.low, found.high))
    return (
        f"{metric.replace('_', ' ')} {value} points (95 % interval {low} to {high}) on {found.n} dev pairs of "
        f"{found.clusters} groups, one-sided p {found.p_worse:.2g}, limit {limit:.2g}"
    )
