"""Pin a run's checkpoints and remove runs."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING

from storage.errors import CorruptArtifactError, DataError, StoreError
from storage.hold import CLOSED, REMOVED, take_run
from storage.refs import Pin
from tasks.history import manifest_of, metric, read_history
from tasks.models import Model

if TYPE_CHECKING:
    from collections.abc import Callable

    from storage.store import Store
    from tasks.history import History, Used


def checkpoint_pin(store: Store, run_id: str, number: int | None) -> Pin:
    """Describe checkpoint `number` of a run, by default its last; checkpoint 0 is the base or its warm start."""
    made = _checkpoints(read_history(store, run_id))
    if number is None and made:
        number = max(made)
    if number is None or number not in made:
        known = ", ".join(map(str, sorted(made))) or "none"
        raise DataError(f"{store.url}: run {run_id} has no checkpoint {number}; it has {known}")
    used = made[number]
    manifest = manifest_of(store, used)
    if manifest is None:
        raise DataError(
            f"{store.url}: step {used.key[:12]} of {run_id}, which made checkpoint {number}, is void or lost"
        )
    model = Model(**manifest.facts["model"])
    digests = tuple(one for one in (model.base, model.adapter) if one is not None)
    return Pin(used.key, manifest.attempt, digests, f"checkpoint {number} of {run_id} ({digests[-1][:12]})")


def _checkpoints(history: History) -> dict[int, Used]:
    return {one.iteration: one for step in ("base", "train") for one in history.of(step)}


def best_checkpoint(store: Store, run_id: str) -> int:
    """Name the checkpoint with the highest forced-choice accuracy on dev; of equal ones the first."""
    scores = {}
    for used in read_history(store, run_id).of("score"):
        manifest = manifest_of(store, used) if used.label == "dev" else None
        if manifest is not None:
            value = metric(store.read(manifest.artifact("metrics")), "forced_choice")["value"]
            if value is not None:
                scores[used.iteration] = value
    if not scores:
        raise DataError(
            f"{store.url}: run {run_id} has no score on dev, so none of its checkpoints is known to be best"
        )
    return max(sorted(scores), key=lambda number: scores[number])


def summary(store: Store, run_id: str) -> str:
    """Say in a few words what a removal takes away."""
    try:
        history = read_history(store, run_id)
    except StoreError:
        return "which can't be read"
    return f"{history.state}, {len(history.used)} steps, {len(_checkpoints(history))} checkpoints"


def remove(store: Store, run_id: str, *, tell: Callable[[str], None]) -> None:
    """Close a run for good; HeldError where it is held.

    The log's last record says so and fences a holder that comes back. Nothing is deleted: the collector does that. The
    record is put behind a damaged log too, which tells of no holder: the next append of one that lives runs into it.
    """
    try:
        log = take_run(store, run_id, tell=tell, code_version=version("starwheel"))
    except CorruptArtifactError as error:
        tell(f"{error}; the run is removed all the same")
        store.run_log(run_id).close_damaged(outcome=REMOVED)
        return
    log.append(CLOSED, outcome=REMOVED)
