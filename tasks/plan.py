"""Plan a run without starting anything: each step reused or to do, and why."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.run import Method, RunConfig, SampleOrder
from storage.schema import Split, part
from tasks import repair
from tasks.earlier import Earlier, Place, learn_wording
from tasks.evaluate import blocks
from tasks.jobs.session import Asked, Session
from tasks.run import DryRun
from tasks.sizes import Sizes, source_sizes, split_sizes
from tasks.step import Context, Event, NotCommittedError, Step

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from storage.store import Store
    from tasks.jobs.session import SessionPlan, SessionResult

SHOWN = 3  # differences of a step in a plan's table; `starwheel explain` shows all


@dataclass(frozen=True)
class Planned:
    """Name a step of a run to be; `rows` is what it writes, None where that can't be told yet."""

    iteration: int
    step: str
    label: str
    state: str  # reused | to do
    why: str
    rows: int | None


class _LookingSession(Session):
    """Look on past a suite that is not scored: nothing of the loop waits for it."""

    def _score_suites(self, later: Mapping[tuple[str, str], list[Asked]]) -> None:
        for (role, suite), evaluated in later.items():
            with contextlib.suppress(NotCommittedError):
                self._finish(evaluated)
                self._score(role, suite, evaluated)


class Walk(DryRun):
    """Look on past a missing sample too: the scores of the same session don't wait for it."""

    def _committed_session(self, plan: SessionPlan) -> SessionResult:
        try:
            return _LookingSession(self._context, plan, start_engine=None).run()
        except NotCommittedError:
            if plan.sample:
                _LookingSession(self._context, replace(plan, sample=False), start_engine=None).run()
            raise


def make_plan(store: Store, config: RunConfig, walk: Any, earlier: Earlier | None = None) -> list[Planned]:
    """Walk the loop `walk` (flows/iteration.py) over what is committed; what it doesn't find is to do.

    The first step to do is compared with that of an `earlier` run.
    """
    return plan_run(store, config, walk, earlier)[0]


def plan_run(store: Store, config: RunConfig, walk: Any, earlier: Earlier | None = None) -> tuple[list[Planned], Sizes]:
    """Give the plan, and the sizes of the sets that its rows are counted from."""
    reused: dict[tuple[int, str, str], Event] = {}

    def heard(event: Event) -> None:
        if event["event"] == "step":
            reused[event["iteration"], event["step"], event["label"]] = event

    run = Walk(Context(store, config, Path(config.work)), heard)
    with contextlib.suppress(NotCommittedError):
        walk(run)
    earlier = earlier or Earlier()
    learn_wording(earlier.known, config)
    missing = {Place(number, step.name, step.label): step for number, step in run.missing}
    sizes = _sizes(store, config, reused)
    planned, first = [], True
    for iteration, step, label, rows in outline(config, sizes.pairs):
        if event := reused.get((iteration, step, label)):
            why = f"committed as {event['key'][:12]}"
            planned.append(Planned(iteration, step, label, "reused", why, _rows(store, event)))
            continue
        why, place = "its inputs are still to be made", Place(iteration, step, label)
        if first or place in missing:
            why = _why(missing.get(place), iteration, earlier)
        planned.append(Planned(iteration, step, label, "to do", why, rows))
        first = False
    return planned, sizes


def _why(step: Step | None, iteration: int, earlier: Earlier) -> str:
    """Say in what a step that is to do differs from the nearest one of an earlier run."""
    if step is None or not earlier.runs:
        return "no step with this key is committed"
    against, lines = earlier.compare(step, iteration)
    more = f" and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
    return f"{f'differs from {against}: ' if against else ''}{'; '.join(lines[:SHOWN])}{more}"


def outline(config: RunConfig, sizes: Mapping[str, int]) -> Iterator[tuple[int, str, str, int | None]]:
    """List every step of an undisturbed run in order: iteration, step, label, completions it writes where known."""
    yield 0, "base", "", None
    yield 0, "split", "", None
    if config.bootstrap:
        taught = sizes.get(Split.BOOTSTRAP)
        if config.method is Method.GENRM:
            yield from ((0, step, "", rows) for step, rows in _rows_of_iteration(config, taught))
        else:
            yield 0, "bootstrap", "", taught
        yield 0, "train", "", None
    for checkpoint in range(config.iterations + 1):
        yield from _session(config, sizes, checkpoint)
        if checkpoint < config.iterations:
            for step, rows in _rows_of_iteration(config, sizes.get(part(checkpoint + 1))):
                yield checkpoint + 1, step, "", rows
            yield checkpoint + 1, "train", "", None


def _rows_of_iteration(config: RunConfig, pairs: int | None) -> Iterator[tuple[str, int | None]]:
    """List the steps that make an iteration's training rows, with the rows that they write where known."""
    asked = pairs * (2 if config.sample.order is SampleOrder.BOTH else 1) if pairs is not None else None
    if config.method is Method.GENRM:
        yield "indicators", asked
        return
    written = asked * config.sample.n if asked is not None else None
    yield "rationalize" if config.method is Method.STAR_RATIONALIZER else "sample", written
    if repair.wanted(config):
        yield "repair", None
    if config.rationalize.failures:
        yield "rationalize", None
    yield "select", None
    yield "pairs", None


def _session(
    config: RunConfig, sizes: Mapping[str, int], checkpoint: int
) -> Iterator[tuple[int, str, str, int | None]]:
    if checkpoint or config.bootstrap:
        yield checkpoint, "parity", "", None
    apart = checkpoint == 0 and config.bootstrap is not None and config.evaluate.base
    asked = [("", "dev")]
    suites = [str(Split.TEST), *(source.name for source in config.data.suites)]
    asked += [(role, suite) for role in (["", "base "] if apart else [""]) for suite in suites]
    asked = [one for one in asked if not sizes or sizes.get(one[1])]
    for role, suite in asked:
        for block in blocks(config, suite):
            pairs = sizes.get(suite)
            yield checkpoint, "evaluate", f"{role}{block}", pairs * max(block.votes, 1) if pairs is not None else None
    for role, suite in asked:
        yield checkpoint, "score", f"{role}{suite}", None
    yield checkpoint, "gate", "", None


def _rows(store: Store, event: Event) -> int | None:
    manifest = store.manifest(event["key"])
    if manifest is None:
        return None
    rows = [manifest.artifacts[name].rows for name in ("sft", "dpo") if name in manifest.artifacts]
    return rows[0] if rows else manifest.counts.get("kept")


def _sizes(store: Store, config: RunConfig, reused: Mapping[tuple[int, str, str], Event]) -> Sizes:
    """Give the pairs of each set: of the committed split, else estimated from the sources."""
    event = reused.get((0, "split", ""))
    manifest = store.manifest(event["key"]) if event else None
    return split_sizes(store, config, manifest) if manifest else source_sizes(config, store.cache.root)
