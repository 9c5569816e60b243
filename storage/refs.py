"""Pin what must stay: a name points to a step's attempt and checkpoints, whatever becomes of the run they come from.

Each change of a name is a record of its own, created exclusively; the last one counts.
"""

from __future__ import annotations

import secrets
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from storage import layout, record
from storage.backend import NotFoundError
from storage.errors import CorruptArtifactError, StoreError
from storage.marks import Settled, settle

if TYPE_CHECKING:
    from storage.backend import Backend
    from storage.store import Store


@dataclass(frozen=True, slots=True)
class Pin:
    """Say what a name points to; `words` tells people where it comes from."""

    key: str
    attempt: int
    checkpoints: tuple[str, ...]
    words: str


def set_ref(backend: Backend, name: str, pin: Pin | None) -> None:
    """Point a name to something, or to nothing any more."""
    target = None if pin is None else asdict(pin)
    while True:
        seq = _end(backend, name)
        nonce = secrets.token_hex(16)
        words = {"time": datetime.now(UTC).isoformat(timespec="seconds"), "nonce": nonce}
        where = layout.ref(name, seq)
        backend.put_new(where, record.encode({"target": target, **words}))
        if record.read(backend, where)[0]["nonce"] == nonce:
            return


def pin_down(store: Store, name: str, pin: Pin) -> None:
    """Point a name to something that is there and stays; StoreError where the collector was faster.

    The name is written first and what it points to is looked at then: the collector does it the other way round.
    """
    set_ref(store.backend, name, pin)
    backend = store.backend
    there = store.settled(pin.key, pin.attempt) and all(
        settle(backend, layout.collecting(digest)) is not Settled.SILENT
        and backend.size(layout.checkpoint_index(digest)) is not None
        for digest in pin.checkpoints
    )
    if not there:
        set_ref(backend, name, None)
        raise StoreError(f"{store.url}: {pin.words} is void, lost or collected, so it can't be pinned")


def get_ref(backend: Backend, name: str) -> Pin | None:
    """Return what a name points to, None where it is unknown or points to nothing any more."""
    end = _end(backend, name)
    if end == 0:
        return None
    where = layout.ref(name, end - 1)
    target: dict[str, Any] | None = record.read(backend, where)[0]["target"]
    if target is None:
        return None
    try:
        return Pin(**{**target, "checkpoints": tuple(map(layout.digest, target["checkpoints"]))})
    except (TypeError, KeyError):
        raise CorruptArtifactError(f"{backend.address(where)} is not a pin; set it again") from None


def all_refs(backend: Backend) -> dict[str, Pin]:
    """List the names that point to something."""
    found = {name: get_ref(backend, name) for name in backend.folders(layout.REFS)}
    return {name: pin for name, pin in found.items() if pin is not None}


def _end(backend: Backend, name: str) -> int:
    seq = 0
    while True:
        try:
            record.read(backend, layout.ref(name, seq))
        except NotFoundError:
            return seq
        seq += 1
