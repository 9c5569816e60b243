"""Settle between the collector and whoever begins to use something: who comes second sees who came first.

The collector marks a thing, looks for its names then, and either takes the mark back or deletes the thing. Whoever
begins to use it writes its name first and settles then: where there is a mark it waits for the collector's decision.
"""

from __future__ import annotations

import time
from enum import StrEnum
from typing import TYPE_CHECKING

from storage import layout, lease, record
from storage.backend import NotFoundError
from storage.errors import StoreError
from storage.holder import is_gone, of_record, this_process
from storage.lease import Life, Watch

if TYPE_CHECKING:
    from storage.backend import Backend


class Settled(StrEnum):
    """Say how it stands: never marked, decided by the collector meanwhile, or marked by one that fell silent."""

    CLEAR = "clear"
    DECIDED = "decided"
    SILENT = "silent"


def mark(backend: Backend, where: str, *, holder_lease: str) -> None:
    """Mark a thing; the mark names the collector's lease."""
    backend.put(where, record.encode({**this_process().to_json(), "lease": holder_lease}))


def settle(backend: Backend, where: str) -> Settled:
    """Wait until no mark is there; a collector that surely is no more has decided nothing, its mark is taken away."""
    data, watch, settled = None, None, Settled.CLEAR
    while True:
        try:
            found = backend.get(where)
        except NotFoundError:
            return settled
        settled = Settled.DECIDED
        if found != data or watch is None:
            data, watch = found, _watch(backend, where, found)
        if watch is None:
            return Settled.SILENT
        if watch.look() is Life.GONE:
            if not (watch.surely_gone or _let_go(backend, data)):
                return Settled.SILENT
            backend.delete(where)
        time.sleep(lease.PACE.look_s)


def clear(backend: Backend) -> None:
    """Take away all marks whose collectors surely are no more or ended, and then such ends' leases; lists them."""
    several = list(backend.list(layout.COLLECTOR))
    marks = [one for one in several if one.startswith((f"{layout.COLLECTOR}step-", f"{layout.COLLECTOR}checkpoint-"))]
    left = False
    for where in marks:
        try:
            data = record.read(backend, where)[1]
        except NotFoundError:
            continue
        except StoreError:
            left = True
            continue
        if is_gone(of_record(record.decode(data, where))) or _let_go(backend, data):
            backend.delete(where)
        else:
            left = True
    for where in several:
        if not left and where.startswith(f"{layout.COLLECTOR}lease-") and _is_released(backend, where):
            backend.delete(where)


def _let_go(backend: Backend, data: bytes) -> bool:
    """Say whether the collector of a mark ended without taking it back: it released its lease and deletes no more."""
    try:
        return _is_released(backend, layout.key(record.decode(data, "a mark")["lease"]))
    except (StoreError, KeyError, TypeError):
        return False


def _is_released(backend: Backend, where: str) -> bool:
    try:
        return record.read(backend, where)[0].get("released") is True
    except StoreError:
        return False


def _watch(backend: Backend, where: str, data: bytes) -> Watch | None:
    try:
        fields = record.decode(data, backend.address(where))
        return Watch(backend, layout.key(fields["lease"]), of_record(fields))
    except (StoreError, KeyError, TypeError, AttributeError):
        return None
