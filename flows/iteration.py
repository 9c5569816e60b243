"""The STaR loop of "Generative Reward Models" (Mahan et al., 2024, section 3), top to bottom."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tasks.run import Checkpoint, Run

if TYPE_CHECKING:
    from storage.manifest import Manifest
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
        if session.samples is None:  # the gate stopped the run
            return judge
        # Rationales that reach the known verdict are kept, and the next judge is trained on them.
        selected = run.select(i, data, session.samples)
        rows = run.pairs(i, data, session.samples, selected=selected, earlier=rows)
        judge, before = run.train(i, rows, base, judge.model), session.dev
    run.session(data, judge, base, before=before, sample=False)
    return judge


def warm_start(run: Run, base: Model, data: Manifest) -> tuple[Checkpoint, Manifest | None]:
    """Make checkpoint 0: the base model, or the base trained on rationales of another source (Table 1)."""
    if run.config.bootstrap is None:
        return Checkpoint(0, base, None), None
    rows = run.bootstrap(data)
    return run.train(0, rows, base, base), rows
