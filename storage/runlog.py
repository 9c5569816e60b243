"""Keep the log of a run: gapless, chained by hash, appended by exclusive create; its epoch fences stale holders."""

from __future__ import annotations

import secrets
import threading
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from storage import failpoint, layout, record
from storage.backend import NotFoundError
from storage.digest import digest_bytes
from storage.errors import CorruptArtifactError, FencedError, StoreError
from storage.holder import this_process

if TYPE_CHECKING:
    from storage.backend import Backend

_GENESIS = "0" * 64


class RunLog:
    """Append to and read the log of one run.

    `open` takes the run over: its record, of the next epoch, makes every later append of the holder before it collide
    and stop. The end of the log is found by reading 0, 1, 2 … until there is none: never by listing.
    """

    def __init__(self, backend: Backend, run_id: str) -> None:
        self._backend = backend
        self._run_id = run_id
        self._epoch: int | None = None
        self._records: list[dict[str, Any]] = []
        self._head = _GENESIS
        self._lock = threading.Lock()

    @property
    def epoch(self) -> int | None:
        """The epoch this holder writes under, None before `open`."""
        return self._epoch

    def records(self) -> list[dict[str, Any]]:
        """Return all records, verified; a gap in the chain or a falling epoch raises CorruptArtifactError."""
        with self._lock:
            self._catch_up(self._backend)
            return list(self._records)

    def open(self, **fields: Any) -> int:
        """Take the run over, whoever holds it, and return the new epoch; see `take`."""
        while not self.take(len(self.records()), **fields):
            continue
        assert self._epoch is not None
        return self._epoch

    def take(self, seen: int, **fields: Any) -> bool:
        """Take the run over unless its log has more than `seen` records; False where somebody was faster.

        `opened` is appended with the fields and the holder: host, process id and what tells this process from others.
        """
        with self._lock:
            self._catch_up(self._backend)
            if len(self._records) != seen:
                return False
            epoch = 1 + self._last_epoch()
            if not self._write({"kind": "opened", "epoch": epoch, **this_process().to_json(), **fields}):
                return False
            self._epoch = epoch
            return True

    def taken_over(self, backend: Backend | None = None) -> bool:
        """Look, by a backend of another patience if one is given; an append that is under way finds out by itself."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            self._catch_up(backend or self._backend)
            return self._epoch is not None and self._last_epoch() > self._epoch
        finally:
            self._lock.release()

    def append(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Append a record and return it as stored; raises FencedError when someone has taken the run over."""
        with self._lock:
            if self._epoch is None:
                raise StoreError(f"the log of run {self._run_id} is not open for writing; open it first")
            self.stop_if_fenced()  # who has read a newer epoch already would not collide with it any more
            while not self._write({"kind": kind, "epoch": self._epoch, **fields}):
                self._catch_up(self._backend)
                self.stop_if_fenced()
            return self._records[-1]

    def close_damaged(self, **fields: Any) -> None:
        """Put a last record behind a log that can't be read, into which its holder's next append runs; lists it."""
        taken = True
        while taken:
            last = max(self._backend.list(f"{layout.run_folder(self._run_id)}log/"))
            data = self._backend.get(last)
            try:
                epoch = 1 + int(record.decode(data, last)["epoch"])
            except (StoreError, KeyError):
                epoch = 1
            seq = 1 + int(last.rpartition("/")[2].removesuffix(".json"))
            words = {"nonce": secrets.token_hex(16), "time": datetime.now(UTC).isoformat(timespec="seconds")}
            mine = {"kind": "closed", "epoch": epoch, "seq": seq, "prev": digest_bytes(data), **words, **fields}
            taken = not self._backend.put_new(layout.log(self._run_id, seq), record.encode(mine))

    def _write(self, fields: dict[str, Any]) -> bool:
        """Try to put a record at the next place; whose record is there is told by its nonce, not by the answer."""
        seq, nonce = len(self._records), secrets.token_hex(16)
        entry = {
            **fields,
            "seq": seq,
            "prev": self._head,
            "nonce": nonce,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        self._backend.put_new(layout.log(self._run_id, seq), record.encode(entry))
        failpoint.hit(f"log {self._run_id} {seq} appended")
        self._read_next(self._backend)
        return bool(len(self._records) > seq and self._records[seq]["nonce"] == nonce)

    def stop_if_fenced(self) -> None:
        """Raise FencedError, which names who took the run over, where the records read so far show one who did."""
        for entry in self._records:
            if self._epoch is not None and entry["epoch"] > self._epoch:
                raise FencedError(
                    f"run {self._run_id} was taken over by process {entry.get('pid')} on {entry.get('host')} at "
                    f"{entry.get('time')}; "
                    "what this process committed stays valid, it stops here"
                )

    def _last_epoch(self) -> int:
        return max((entry["epoch"] for entry in self._records), default=0)

    def _catch_up(self, backend: Backend) -> None:
        while True:
            while self._read_next(backend):
                pass
            gap = layout.log(self._run_id, len(self._records))
            if backend.size(layout.log(self._run_id, len(self._records) + 1)) is None:
                return
            if not self._read_next(backend):  # asked again: two records may have been appended since
                raise CorruptArtifactError(
                    f"{self._backend.address(gap)} is missing; start a new run, which reuses every committed step"
                )

    def _read_next(self, backend: Backend) -> bool:
        seq = len(self._records)
        key = layout.log(self._run_id, seq)
        try:
            entry, data = record.read(backend, key)
        except NotFoundError:
            return False
        last_epoch = self._records[-1]["epoch"] if self._records else 1
        if entry.get("seq") != seq or entry.get("prev") != self._head or entry.get("epoch", 0) < last_epoch:
            raise CorruptArtifactError(
                f"{self._backend.address(key)} doesn't follow from the record before it; start a new "
                "run, which reuses every committed step"
            )
        self._records.append(entry)
        self._head = digest_bytes(data)
        return True
