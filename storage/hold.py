"""Take a run over: refuse while its holder beats, wait until it is known to be gone, and be the only one to follow.

What is waited for: nothing where nobody holds the run, where the last holder closed or released it, or where its
process was of this machine and is no more; else the time-out of its beat.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from storage import layout, lease
from storage.errors import HeldError, StoreError
from storage.holder import Holder, of_record
from storage.lease import Life, Watch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from storage.runlog import RunLog
    from storage.store import Store

CLOSED, REMOVED = "closed", "removed"  # a record's kind; the outcome of the last record of a run that was removed


@dataclass(frozen=True, slots=True)
class Held:
    """Name the last holder of a run; `since` is its own clock's word."""

    epoch: int
    holder: Holder
    since: str

    def __str__(self) -> str:
        return f"process {self.holder.pid} on {self.holder.host} since {self.since} by its clock"


def last_holder(records: Sequence[Mapping[str, Any]]) -> Held | None:
    """Give who holds the run by its log; None where nobody opened it or the last one closed it."""
    opened = next((one for one in reversed(records) if one["kind"] == "opened"), None)
    if opened is None or (records[-1]["kind"] == CLOSED and records[-1]["epoch"] == opened["epoch"]):
        return None
    return Held(opened["epoch"], of_record(opened), opened["time"])


def is_removed(records: Sequence[Mapping[str, Any]]) -> bool:
    """Say whether a log ends with the run's removal."""
    return bool(records) and records[-1]["kind"] == CLOSED and records[-1].get("outcome") == REMOVED


def wait_until_free(store: Store, run_id: str, *, tell: Callable[[str], None], freed: int = 0) -> int:
    """Return the epoch of the last holder once nobody holds the run; HeldError where the holder lives.

    `freed` is an epoch whose holder the caller has seen gone already. What is waited for is told in one sentence.
    """
    while True:
        records = store.run_log(run_id).records()
        if is_removed(records):
            raise StoreError(
                f"run {run_id} in {store.url} was removed; start a new run, which reuses what is still there"
            )
        held = last_holder(records)
        if held is None or held.epoch <= freed:
            return records[-1]["epoch"] if records else 0
        _wait_for(store, run_id, held, tell)
        freed = held.epoch


def take_run(store: Store, run_id: str, *, tell: Callable[[str], None], freed: int = 0, **fields: Any) -> RunLog:
    """Open the log of a run once nobody holds it; of several who try at once one does, the others meet its beat."""
    log = store.run_log(run_id)
    while True:
        freed = wait_until_free(store, run_id, tell=tell, freed=freed)
        records = log.records()
        held = last_holder(records)
        if (held is None or held.epoch <= freed) and log.take(len(records), **fields):
            return log


def _wait_for(store: Store, run_id: str, held: Held, tell: Callable[[str], None]) -> None:
    watch, told = Watch(store.backend, layout.lease(run_id, held.epoch), held.holder), False
    while (life := watch.look()) is not Life.GONE:
        if life is Life.LIVES:
            raise HeldError(
                f"run {run_id} in {store.url} is held by {held}, which is alive: it beats; wait for its end, or stop "
                f"it there and `starwheel resume {run_id}`"
            )
        if not told:
            tell(
                f"run {run_id} was last held by {held}; waiting for a sign of life, and going on after "
                f"{lease.PACE.timeout_s:g} s without one"
            )
            told = True
        time.sleep(lease.PACE.look_s)
