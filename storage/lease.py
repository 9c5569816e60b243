"""Tell others that somebody is at work: a beat that its holder rewrites, and how an observer judges by it.

Each lease has a key that one holder alone writes; that of a run is named by the run's epoch. It only keeps work from
being done twice: what is safe rests on the log, whose epoch stops a stale holder at its next append. No wall clock is
compared and nothing is swapped: an observer measures on its own monotonic clock how long the bytes of the beat stood
still, and time in which it didn't look itself doesn't count.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from storage import record
from storage.backend import NotFoundError
from storage.errors import CorruptArtifactError, StoreError
from storage.holder import Holder, is_gone, this_process

if TYPE_CHECKING:
    from collections.abc import Callable

    from storage.backend import Backend


@dataclass(frozen=True, slots=True)
class Pace:
    """Say how often a holder beats and after which silence it counts as gone, in seconds."""

    beat_s: float = 10.0
    timeout_s: float = 60.0

    @property
    def look_s(self) -> float:
        """Give the pause of an observer between two looks."""
        return self.beat_s / 4


PACE = Pace()  # of every holder and observer; tests set another in scaled time
_held: set[tuple[str, str]] = set()  # what this very process holds now: store, key of the lease
_held_lock = threading.Lock()


class Life(StrEnum):
    """Say what is known of a holder."""

    LIVES = "lives"
    GONE = "gone"
    UNKNOWN = "unknown"


class Lease:
    """Beat under a key from `start` to `release`, in a thread that ends with the process.

    `lost` is asked after each beat, with a backend of short patience, whether someone took over what is held; when it
    says so, the beat ends and `on_lost` is called once, in the beating thread.
    """

    def __init__(
        self,
        backend: Backend,
        key: str,
        *,
        lost: Callable[[Backend], bool] = lambda backend: False,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self._backend, self._key = backend, key
        self._lost, self._on_lost = lost, on_lost
        self._pace = PACE
        # One lost connection must not look like a holder that is gone: it is let go of long before the time-out.
        self._hasty = backend.hasty(silence=self._pace.beat_s, deadline=self._pace.timeout_s / 3)
        self._holder = this_process()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Write the first beat and go on beating."""
        with _held_lock:
            _held.add(self._place)
        try:
            self._write(self._backend, 0)
        except BaseException:
            with _held_lock:
                _held.discard(self._place)
            raise
        self._thread = threading.Thread(target=self._beat, name="lease", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Say that the run is held no more, so that the next holder needn't wait; a store that is silent is let be."""
        self._end.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(self._pace.timeout_s)
        with _held_lock:
            _held.discard(self._place)
        self._let_go()

    def _let_go(self) -> None:
        try:
            self._write(self._hasty, -1, released=True)
        except OSError:  # the next holder waits for the time-out then
            return

    def _beat(self) -> None:
        number = 0
        while not self._end.wait(self._pace.beat_s):
            number += 1
            try:
                self._write(self._hasty, number)
                if self._end.is_set():  # this beat was stuck and may have replaced the last word
                    self._let_go()
                    return
                lost = self._lost(self._hasty)
            except OSError:  # a beat is missed, whatever the store or its disk says; the next one may come through
                continue
            if lost:
                self._on_lost()
                return

    def _write(self, backend: Backend, beat: int, *, released: bool = False) -> None:
        backend.put(self._key, record.encode({**self._holder.to_json(), "beat": beat, "released": released}))

    @property
    def _place(self) -> tuple[str, str]:
        return self._backend.url, self._key


class Watch:
    """Judge by repeated looks whether the holder of a lease lives."""

    def __init__(self, backend: Backend, key: str, holder: Holder) -> None:
        self._backend, self._key, self._holder = backend, key, holder
        self._pace = PACE
        self._beat: bytes | None = None
        self._looked: float | None = None
        self._still = 0.0

    @property
    def silent_s(self) -> float:
        """Give how long the beat is known to stand still."""
        return self._still

    @property
    def surely_gone(self) -> bool:
        """Say whether the holder can't come back: its process is no more, not only silent."""
        if self._holder == this_process():
            with _held_lock:
                return (self._backend.url, self._key) not in _held
        return is_gone(self._holder)

    def look(self) -> Life:
        """Read the beat once; StoreError where it can't be read, which is no silence of the holder."""
        if self._holder == this_process():
            with _held_lock:
                return Life.LIVES if (self._backend.url, self._key) in _held else Life.GONE
        if is_gone(self._holder):
            return Life.GONE
        beat = self._read()
        if beat is not None and _released(beat):
            return Life.GONE
        now = time.monotonic()
        before, self._looked = self._looked, now
        if before is None or beat != self._beat:
            self._beat, self._still = beat, 0.0
            return Life.UNKNOWN if before is None else Life.LIVES
        # If this process stood still too (stopped, suspended), one look counts no more than one beat.
        self._still += min(now - before, self._pace.beat_s)
        return Life.GONE if self._still >= self._pace.timeout_s else Life.UNKNOWN

    def _read(self) -> bytes | None:
        try:
            return self._backend.get(self._key)
        except NotFoundError:
            return None


def _released(beat: bytes) -> bool:
    """Say whether the holder let go; a damaged beat is no word of it."""
    try:
        fields: dict[str, Any] = record.decode(beat, "a lease")
    except (CorruptArtifactError, StoreError):
        return False
    return fields.get("released") is True
