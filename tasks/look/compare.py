"""Hold two judges against each other: settings, yields, paired tests clustered by prompt, the pairs that flipped."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import polars as pl

from storage.errors import DataError
from tasks.differences import Known, differences
from tasks.judge import paired_scores
from tasks.judge.statistics import mean_interval, paired
from tasks.report import Yield, read_yields

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pyarrow as pa

    from storage.manifest import Manifest
    from tasks.judge.statistics import Difference, Interval
    from tasks.look.contents import Contents


@dataclass(frozen=True)
class Measured:
    """Hold a metric of two judges on the pairs that both answered, with 95 % intervals and the paired test."""

    suite: str
    metric: str
    before: Interval
    now: Interval
    difference: Difference

    def to_json(self) -> dict[str, Any]:
        """Give the JSON form."""
        parts = ("before", "now", "difference")
        return {"suite": self.suite, "metric": self.metric, **{one: getattr(self, one)._asdict() for one in parts}}


@dataclass(frozen=True)
class Side:
    """Name one side of a comparison: a run and its judge, `base` or the number of a checkpoint.

    `alone` tells that the iteration was named: only its yields are compared.
    """

    contents: Contents
    judge: str
    alone: bool

    def __str__(self) -> str:
        return f"{self.contents.history.run_id}@{self.judge}"


@dataclass(frozen=True)
class Comparison:
    """Hold what two sides differ in; of the flipped pairs the first, and how many there are a suite."""

    before: str
    now: str
    settings: Sequence[str]
    yields: Sequence[tuple[Yield | None, Yield | None]]
    metrics: Sequence[Measured]
    flipped: Mapping[str, Mapping[str, int]]  # suite -> gained, lost
    flips: Sequence[Mapping[str, Any]]

    def to_json(self) -> dict[str, Any]:
        """Give the JSON form."""
        yields = [{"before": then and asdict(then), "now": now and asdict(now)} for then, now in self.yields]
        metrics = [one.to_json() for one in self.metrics]
        return {**vars(self), "yields": yields, "metrics": metrics}


def scores(contents: Contents) -> dict[tuple[str, str], Manifest]:
    """Give the manifests of the scores by judge (`base`, `0`, `1` …) and suite."""
    return {
        (
            "base" if place.label.startswith("base ") else str(place.iteration),
            place.label.rpartition(" ")[2],
        ): manifest
        for place, manifest in contents.manifests.items()
        if place.step == "score"
    }


def measure(suite: str, now: pa.Table, before: pa.Table) -> list[Measured]:
    """Compare two judges' `pair_scores` of a suite by every metric that both have."""
    measured = []
    for metric in (*paired_scores.METRICS, "consistent"):
        rows = paired_scores.shared(now, before, metric)
        if rows.height:
            groups = rows["group"].to_list()
            later, earlier = rows["now"].to_numpy(), rows["before"].to_numpy()
            values = mean_interval(earlier, groups), mean_interval(later, groups)
            measured.append(Measured(suite, metric, *values, paired(later, earlier, groups)))
    return measured


def compare(before: Side, now: Side, *, limit: int) -> Comparison:
    """Compare two sides; of all flipped pairs `limit` are named, the greatest changes first.

    Raises DataError where they share no pair of any suite.
    """
    metrics: list[Measured] = []
    flipped: dict[str, pl.DataFrame] = {}
    then, later = (
        {suite: manifest for (judge, suite), manifest in scores(side.contents).items() if judge == side.judge}
        for side in (before, now)
    )
    for suite in (one for one in then if one in later):
        was, is_ = (
            side.contents.store.read(manifest.artifact("pair_scores"))
            for side, manifest in ((before, then[suite]), (now, later[suite]))
        )
        metrics += measure(suite, is_, was)
        flipped[suite] = paired_scores.flips(is_, was)
    if not metrics:
        raise DataError(f"{before} and {now} answered no pair in common, so nothing can be compared")
    counts = {suite: _count(rows) for suite, rows in flipped.items()}
    first = _with_prompts(now.contents, _first(flipped, limit))
    return Comparison(str(before), str(now), _settings(before, now), _yields(before, now), metrics, counts, first)


def _count(flips: pl.DataFrame) -> dict[str, int]:
    return {change: flips.filter(pl.col("change") == change).height for change in ("gained", "lost")}


def _first(flipped: Mapping[str, pl.DataFrame], limit: int) -> list[dict[str, Any]]:
    rows = pl.concat([rows.with_columns(pl.lit(suite).alias("suite")) for suite, rows in flipped.items()])
    change = (pl.col("now") - pl.col("before")).abs()
    first = rows.sort(change, "suite", "pair_id", descending=[True, False, False]).head(limit)
    return first.select("suite", "subset", "pair_id", "before", "now", "change").to_dicts()


def _with_prompts(contents: Contents, flips: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add the prompts of the pairs that are named, and read no others."""
    sql = f"SELECT pair_id, prompt FROM {contents.split('pairs')} WHERE pair_id IN (SELECT unnest(?::VARCHAR[]))"
    prompts = {row["pair_id"]: row["prompt"] for row in contents.select(sql, [[one["pair_id"] for one in flips]])}
    return [{**one, "prompt": prompts.get(one["pair_id"])} for one in flips]


def _settings(before: Side, now: Side) -> list[str]:
    """Say in which settings the runs differ, and whether their pairs or their base do."""
    then, later = (side.contents.history.config.model_dump(mode="json") for side in (before, now))
    lines = differences({"config": later}, {"config": then}, Known())
    for kind in ("pairs", "splits"):
        made = [[one.artifact.digest for one in side.contents.placed(kind)] for side in (before, now)]
        if made[0] != made[1] and all(made):
            lines.append(f"{kind} of the split {made[0][0][:8]} → {made[1][0][:8]}")
    return lines


def _yields(before: Side, now: Side) -> list[tuple[Yield | None, Yield | None]]:
    """Give the yields side by side: of the named iterations, or of all."""
    found = []
    for side in (before, now):
        yields = {one.iteration: one for one in read_yields(side.contents.store, side.contents.history)}
        found.append({i: one for i, one in yields.items() if not side.alone or str(i) == side.judge})
    if before.alone and now.alone:
        sides = tuple(next(iter(one.values()), None) for one in found)
        return [(sides[0], sides[1])] if any(sides) else []
    return [(found[0].get(one), found[1].get(one)) for one in sorted({*found[0], *found[1]})]


def side(contents: Contents, judge: str | None) -> Side:
    """Take a run's judge, by default the last one that was scored; DataError where it wasn't."""
    judges = list(dict.fromkeys(one for one, _ in scores(contents)))
    numbers = sorted((int(one) for one in judges if one != "base"), reverse=True)
    where = f"{contents.store.url}: {contents.history.run_id}"
    if judge == "base" and "base" not in judges and contents.history.config.bootstrap is None:
        judge = "0"  # without a warm start the untrained judge is checkpoint 0
    if judge is None and numbers:
        return Side(contents, str(numbers[0]), alone=False)
    if judge is None or judge not in judges:
        known = ", ".join(sorted(judges)) or "none yet"
        raise DataError(f"{where} has no scored judge {judge or ''}; scored are {known}")
    return Side(contents, judge, alone=True)


def flipped_pairs(contents: Contents, iteration: int) -> list[str]:
    """Name the pairs that an iteration's checkpoint and the one before it put on different sides of right."""
    known = scores(contents)
    now, before = str(iteration), str(iteration - 1) if iteration else "base"
    suites = [suite for judge, suite in known if judge == now and (before, suite) in known]
    if not suites:
        who = "the untrained judge" if before == "base" else f"checkpoint {before}"
        raise DataError(
            f"{contents.store.url}: {contents.history.run_id} has no scores of both {who} and checkpoint {iteration}, "
            "so what flipped can't be told; name another iteration"
        )
    ids: list[str] = []
    for suite in suites:
        scored = (contents.store.read(known[judge, suite].artifact("pair_scores")) for judge in (now, before))
        ids += paired_scores.flips(*scored)["pair_id"].to_list()
    return ids
