"""The STaR loop of "Generative Reward Models" (Mahan et al., 2024, section 3), top to bottom."""

from __future__ import annotations

from typing import TYPE_CHECKING

from configs.run import Method
from tasks.run import Checkpoint, Run

if TYPE_CHECKING:
    from storage.manifest import Manifest
    from tasks.jobs.session import SessionResult
    from tasks.models import Model


def star(run: Run) -> Checkpoint:
    """Turn preference pairs into ever better judges; give the last one that was evaluated."""
    base = run.base()
    data = run.split(base)
    judge, rows = warm_start(run, base, data)
    before: Manifest | None = None
    for i in range(1, run.config.iterations + 1):
        # The latest judge is checked, evaluated on dev, gated, and writes rationales for a fresh part of the pairs.
        session = run.session(data, judge, base, before=before, sample=True)
        if not session.goes_on:  # the gate stopped the run
            return judge
        rows = training_rows(run, i, data, session, rows)
        judge, before = run.train(i, rows, base, judge.model), session.dev
    run.session(data, judge, base, before=before, sample=False)
    return judge


def training_rows(run: Run, i: int, data: Manifest, session: SessionResult, earlier: Manifest | None) -> Manifest:
    """Make what iteration i trains on."""
    if run.config.method is Method.GENRM:  # no chain of thought: the pairs and their verdicts alone
        return run.indicators(i, data, earlier=earlier)
    # Rationales that reach the known verdict are kept, and the next judge is trained on them.
    selected = run.select(i, data, session.completions)
    return run.pairs(i, data, session.completions, selected=selected, earlier=earlier)


def warm_start(run: Run, base: Model, data: Manifest) -> tuple[Checkpoint, Manifest | None]:
    """Make checkpoint 0: the base model, or the base trained on rationales of another source (Table 1)."""
    if run.config.bootstrap is None:
        return Checkpoint(0, base, None), None
    rows = run.bootstrap(data)
    return run.train(0, rows, base, base), rows
