"""Sum a run up: accuracy per checkpoint with intervals, yields, paired tests of the last judge, a plot."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

from tasks.gate import compare
from tasks.history import History, manifest_of, metric, read_history
from tasks.rates import WRITTEN

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from storage.manifest import Manifest
    from storage.store import Store

SHOWN = (
    "forced_choice",
    "free_text",
    "parse_rate",
    "truncation_rate",
    "pick_a",
    "pick_a_forced",
    "consistency",
    "rationale_tokens",
)


@dataclass(frozen=True)
class Scores:
    """Hold one checkpoint on one suite: metric -> value, low, high, n, clusters (95 %)."""

    judge: str  # "base" | "0" | "1" …
    suite: str
    metrics: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Yield:
    """Count what an iteration kept: prompts shown, those that gave a training row, completions, selected, rows.

    `hinted` counts the rows of completions that were shown the answer.
    """

    iteration: int
    asked: int
    with_rows: int
    completions: int
    selected: int
    rows: int
    hinted: int
    dropped: Mapping[str, int]


@dataclass(frozen=True)
class Compared:
    """Hold a paired test on the same pairs, clustered by prompt: difference, 95 % interval, two-sided p."""

    suite: str
    metric: str
    judge: str
    against: str
    difference: float
    low: float
    high: float
    p: float
    n: int


@dataclass(frozen=True)
class Report:
    """Hold what a run shows for itself."""

    run_id: str
    scores: Sequence[Scores]
    yields: Sequence[Yield]
    compared: Sequence[Compared]
    engine_starts: int

    def to_json(self) -> dict[str, Any]:
        """Give the JSON form."""
        return asdict(self)


def make_report(store: Store, run_id: str) -> Report:
    """Read a run's committed scores; steps that were lost since are left out."""
    history = read_history(store, run_id)
    return Report(
        run_id,
        read_scores(store, history),
        read_yields(store, history),
        _compare(store, _scored(store, history)),
        _engine_starts(store, history),
    )


def read_scores(store: Store, history: History, iteration: int | None = None) -> list[Scores]:
    """Read the metrics of the judges that were scored in an iteration, or in all."""
    scores = []
    for (judge, suite), manifest in _scored(store, history, iteration).items():
        if manifest is not None:
            table = store.read(manifest.artifact("metrics"))
            known = set(table["metric"].to_pylist())  # a judge without reasons has no metrics of a text
            scores.append(Scores(judge, suite, {name: metric(table, name) for name in SHOWN if name in known}))
    return scores


def _scored(store: Store, history: History, iteration: int | None = None) -> dict[tuple[str, str], Manifest | None]:
    return {
        (_judge(one.iteration, one.label), one.label.split(" ")[-1]): manifest_of(store, one)
        for one in history.of("score", iteration)
    }


def _judge(iteration: int, label: str) -> str:
    return "base" if label.startswith("base ") else str(iteration)


def read_yields(store: Store, history: History) -> list[Yield]:
    """Count what each iteration kept."""
    yields = []
    for used in history.of("select"):
        manifest = manifest_of(store, used)
        rows = next((manifest_of(store, one) for one in history.of("pairs", used.iteration)), None)
        if manifest is not None and rows is not None:
            trained = next(iter(rows.artifacts.values())).rows
            asked, counts = rows.facts["yields"], manifest.counts
            yields.append(
                Yield(
                    iteration=used.iteration,
                    asked=asked["asked"],
                    with_rows=asked["with_rows"],
                    completions=counts["in"],
                    selected=counts["kept"],
                    rows=trained,
                    hinted=rows.facts.get("hinted", 0),
                    dropped=counts["dropped"],
                )
            )
    return yields


def _compare(store: Store, scored: Mapping[tuple[str, str], Any]) -> list[Compared]:
    """Test the last checkpoint against the untrained base and against checkpoint 0, suite by suite."""
    compared = []
    last = max((int(judge) for judge, _ in scored if judge != "base"), default=0)
    for (judge, suite), manifest in scored.items():
        if judge not in {"base", "0"} or last == 0 or manifest is None or scored.get((str(last), suite)) is None:
            continue
        now = store.read(scored[str(last), suite].artifact("pair_scores"))
        before = store.read(manifest.artifact("pair_scores"))
        metric, test = compare(now, before)
        if test is not None:
            compared.append(Compared(suite, metric, str(last), judge, test.value, test.low, test.high, test.p, test.n))
    return compared


def _engine_starts(store: Store, history: History) -> int:
    """Count the engine processes that computed this run's steps, from their manifests."""
    starts = set()
    for used in history.used:
        if used.step in ("parity", *WRITTEN) and not used.reused:
            manifest = manifest_of(store, used)
            if manifest is not None and "engine" in manifest.facts:
                starts.add(manifest.facts["engine"]["start"])
    return len(starts)


def results_table(report: Report) -> list[dict[str, str]]:
    """Give one row a judge and suite, every metric there is with its interval, and n."""
    return scores_table(report.scores)


def scores_table(scores: Sequence[Scores]) -> list[dict[str, str]]:
    """Give the same of some scores."""
    rows = []
    for one in sorted(scores, key=lambda score: (_place(score.judge), score.suite)):
        rows.append(
            {
                "judge": "untrained" if one.judge == "base" else f"checkpoint {one.judge}",
                "suite": one.suite,
                "n": str(one.metrics["forced_choice"]["n"]),
                **{name: _cell(name, row) for name, row in one.metrics.items()},
            }
        )
    return rows


def _cell(name: str, row: Mapping[str, Any]) -> str:
    if name != "rationale_tokens":
        return percent(row)
    return "–" if row["value"] is None else f"{row['value']:.1f}"


def _place(judge: str) -> int:
    return -1 if judge == "base" else int(judge)


def percent(row: Mapping[str, Any]) -> str:
    """Show a share with its 95 % interval as percentages: `78.2 [74.0, 82.1]`."""
    if row["value"] is None:
        return "–"
    return f"{100 * row['value']:.1f} [{100 * row['low']:.1f}, {100 * row['high']:.1f}]"


def write_report(store: Store, report: Report, picture: bytes, folder: Path) -> list[Path]:
    """Write results and plot into a local folder and beside the run in the store; give the local files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {"results.json": json.dumps(report.to_json(), indent=2).encode(), "accuracy.png": picture}
    for name, content in files.items():
        (folder / name).write_bytes(content)
        store.put_report(report.run_id, name, content)
    return [folder / name for name in files]


def plot(report: Report) -> bytes:
    """Draw accuracy per checkpoint and suite with 95 % intervals, and yield, parse rate and position bias; a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    judges = sorted({one.judge for one in report.scores}, key=_place)
    suites = sorted(
        {one.suite for one in report.scores if one.suite != "dev"}, key=lambda suite: (suite != "test", suite)
    )
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.8), layout="constrained")
    for number, suite in enumerate(suites):
        _draw(left, report, judges, (suite, "forced_choice"), label=suite, shift=0.06 * number)
    left.axhline(0.5, color="0.6", linewidth=0.8, linestyle=":")
    left.set(title="Forced choice, both orders (95 % intervals)", ylabel="accuracy", ylim=(0.0, 1.02))
    for name, label in (
        ("parse_rate", "parse rate"),
        ("pick_a", "P(pick A), verdicts"),
        ("pick_a_forced", "P(pick A), forced choice"),
        ("free_text", "free-text accuracy"),
    ):
        _draw(right, report, judges, ("test", name), label=f"{label}, test")
    if report.yields:
        share = [one.with_rows / max(one.asked, 1) for one in report.yields]
        places = [judges.index(str(one.iteration)) for one in report.yields if str(one.iteration) in judges]
        right.plot(places, share[: len(places)], "s--", color="0.4", label="yield: prompts with a training row")
    right.axhline(0.5, color="0.6", linewidth=0.8, linestyle=":")
    right.set(title="How it answers", ylim=(0.0, 1.02))
    for axes in (left, right):
        axes.set_xticks(
            range(len(judges)), ["untrained" if judge == "base" else f"checkpoint {judge}" for judge in judges]
        )
        axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(0, -0.1), ncols=2)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(report.run_id, fontsize=9, color="0.4")
    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=150)
    pyplot.close(figure)
    return picture.getvalue()


def _draw(
    axes: Any, report: Report, judges: Sequence[str], what: tuple[str, str], *, label: str, shift: float = 0.0
) -> None:
    suite, name = what
    scores = [one for one in report.scores if one.suite == suite and name in one.metrics]
    if not scores:
        return
    points = [(judges.index(one.judge), one.metrics[name]) for one in scores]
    points = sorted((place, row) for place, row in points if row["value"] is not None)
    places = [place + shift for place, _ in points]
    values = [row["value"] for _, row in points]
    below = [row["value"] - row["low"] for _, row in points]
    above = [row["high"] - row["value"] for _, row in points]
    axes.errorbar(places, values, yerr=[below, above], marker="o", capsize=3, label=label)
