"""Claim the steps that a run computes now, so that another run in the same store waits and reuses them.

A claim is advisory: what is right rests on the manifest, whose first writer wins, and a step computed twice costs time
and nothing else. It doesn't beat itself, it names the lease of its holder.

No deadlock: whoever waits for a claim holds none. Several steps are claimed together, in the order of their keys, all
or none; so of those who want the same steps the holder of the last contested one has all that it needs and goes on.
What a session only learns of while it runs (`follow`) is claimed if it is free and computed all the same if it is not,
since an engine that waits would hold what others wait for.
"""

from __future__ import annotations

import secrets
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from storage import layout, lease, record
from storage.backend import NotFoundError
from storage.errors import StoreError
from storage.holder import Holder, of_record, this_process
from storage.lease import Life, Watch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from storage.backend import Backend


@dataclass(frozen=True, slots=True)
class Claimed:
    """Name who works on a step, and the lease that the claim beats by; `data` is the claim as it lies there."""

    key: str
    run_id: str
    epoch: int
    lease: str
    holder: Holder
    data: bytes

    def __str__(self) -> str:
        return f"run {self.run_id} (process {self.holder.pid} on {self.holder.host})"


class Claims:
    """Hold the claims of one run under one epoch; its methods may be called by several threads.

    Somebody who is no run gives a name in its place, and the key of the lease.
    """

    def __init__(self, backend: Backend, run_id: str, epoch: int, lease: str = "") -> None:
        self._backend, self._run_id, self._epoch = backend, run_id, epoch
        self._lease = lease or layout.lease(run_id, epoch)
        self._held: dict[str, bytes] = {}
        self._let_go: dict[str, bytes] = {}  # of these the store may still keep the claim
        self._done: set[str] = set()
        self._lock = threading.RLock()

    def claim(self, keys: Iterable[str]) -> Claimed | None:
        """Claim all of the steps or none; give who has one of them."""
        self._sweep()
        for key in sorted(set(keys) - set(self._held)):
            if (other := self._claim(key)) is not None:
                self.release()
                return other
        return None

    def wait(self, other: Claimed, look: Callable[[], None] = lambda: None) -> None:
        """Wait until a claim is released or its holder is gone, whose claim is then taken away.

        `look` is called before each look and may end the wait by an error.
        """
        with self._lock:
            assert not self._held, "who waits for a claim holds none"
        watch = Watch(self._backend, other.lease, other.holder)
        while True:
            look()
            if self._read(other.key) != other.data:
                return
            self._sweep()  # else two who wait could wait for what the other has let go of
            if watch.look() is Life.GONE:
                self._delete(other.key, other.data)
                return
            time.sleep(lease.PACE.look_s)

    def follow(self, key: str) -> None:
        """Claim one more step that is computed now whether it is free or not; let go of those that are done.

        So there is no gap between one step of a session and the next into which another run could come. A store that
        is silent is let be: the session goes on without the claim.
        """
        with self._lock:
            try:
                if key not in self._held:
                    self._claim(key)
            except StoreError:
                return
            for done in self._done & set(self._held):
                self._let_go[done] = self._held.pop(done)
            self._sweep()

    def done(self, key: str) -> None:
        """Note that a step is committed: its claim goes when another step follows, or with all others."""
        with self._lock:
            self._done.add(key)

    def release(self) -> None:
        """Let go of all; what a silent store keeps goes at a later call, or ends with the lease."""
        with self._lock:
            self._let_go |= self._held
            self._held.clear()
            self._done.clear()
            self._sweep()

    def _sweep(self) -> None:
        """Delete what is let go of, up to the first that the store refuses: each refusal may take minutes."""
        with self._lock:
            for key, data in sorted(self._let_go.items()):
                try:
                    self._delete(key, data)
                except StoreError:
                    return
                del self._let_go[key]

    def _claim(self, key: str) -> Claimed | None:
        data = self._record()
        while not self._put(key, data):
            found = self._read(key)
            other = None if found is None else _parse(key, found)
            if other is not None and not self._is_stale(other):
                return other
            if found is not None:  # left behind by this run, or no claim at all
                self._delete(key, found)
        with self._lock:
            self._held[key] = data
        return None

    def _put(self, key: str, data: bytes) -> bool:
        try:
            return self._backend.put_new(layout.claim(key), data)
        except StoreError:  # it may be stored
            with self._lock:
                self._let_go[key] = data
            raise

    def _is_stale(self, other: Claimed) -> bool:
        """Say whether a claim is of this run before it was taken over, or of this holder, who has let go of it."""
        return other.lease == self._lease or (other.run_id == self._run_id and other.epoch < self._epoch)

    def _record(self) -> bytes:
        words = {"nonce": secrets.token_hex(16), "time": datetime.now(UTC).isoformat(timespec="seconds")}
        mine = {"run": self._run_id, "epoch": self._epoch, "lease": self._lease}
        return record.encode({**mine, **this_process().to_json(), **words})

    def _read(self, key: str) -> bytes | None:
        try:
            return self._backend.get(layout.claim(key))
        except NotFoundError:
            return None

    def _delete(self, key: str, data: bytes) -> None:
        """Take a claim away unless it was replaced; one that comes right after the look is lost, which costs time."""
        if self._read(key) == data:
            self._backend.delete(layout.claim(key))


def is_held(backend: Backend, claimed: Claimed) -> bool:
    """Watch the holder of a claim until it is known to live, or to be gone."""
    watch = Watch(backend, claimed.lease, claimed.holder)
    while (life := watch.look()) is Life.UNKNOWN:
        time.sleep(lease.PACE.look_s)
    return life is Life.LIVES


def read_claim(backend: Backend, key: str) -> Claimed | None:
    """Give who claims a step; None where nobody does or the claim can't be read."""
    try:
        return _parse(key, backend.get(layout.claim(key)))
    except NotFoundError:
        return None


def _parse(key: str, data: bytes) -> Claimed | None:
    try:
        fields: dict[str, Any] = record.decode(data, layout.claim(key))
        names = layout.name(fields["run"]), int(fields["epoch"]), layout.key(fields["lease"])
        return Claimed(key, *names, of_record(fields), data)
    except (StoreError, KeyError, TypeError, ValueError):
        return None
