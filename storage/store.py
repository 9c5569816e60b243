"""Open a store and ask it what is committed: the one truth about steps, checkpoints and runs."""

from __future__ import annotations

import os
import re
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from storage import checkpoint, layout, record
from storage.attempt import Attempt, read_files
from storage.backend import NotFoundError
from storage.cache import ObjectCache
from storage.errors import StoreError
from storage.hold import is_removed
from storage.local import LocalBackend
from storage.marks import Settled, settle
from storage.probe import probe
from storage.runlog import RunLog
from storage.state import StepState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from storage.backend import Backend
    from storage.checkpoint import CheckpointRef
    from storage.manifest import Artifact, Manifest

LOCAL_RACES = {"rounds": 2, "threads": 6}
S3_RACES = {"rounds": 10, "threads": 12}


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Hold what was frozen when a run was made."""

    run_id: str
    config: Mapping[str, Any]
    code_version: str
    created: str


class Store:
    """Read what is committed and lend attempts to write; made by `open_store`."""

    def __init__(self, backend: Backend, cache: ObjectCache, *, store_id: str = "") -> None:
        self.backend = backend
        self.cache = cache
        self.store_id = store_id

    @property
    def url(self) -> str:
        """The address of the store, without credentials."""
        return self.backend.url

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    def manifest(self, key: str) -> Manifest | None:
        """Return the manifest of a step if its attempt that counts is committed, else None.

        The attempt that counts is the first one that isn't void; nothing is listed: one GET and one HEAD for a
        committed step.
        """
        number = 0
        while True:
            attempt = self._attempt(key, number)
            found = attempt.read_manifest()
            if not attempt.is_void():
                return found
            number += 1

    def attempt(self, key: str) -> Attempt:
        """Return the attempt to write: the first one that isn't void."""
        number = 0
        while (attempt := self._attempt(key, number)).is_void():
            number += 1
        return attempt

    def use(self, log: RunLog, **fields: Any) -> bool:
        """Log that a run uses the attempt of the fields `key` and `attempt`; say whether it still counts then.

        The order is what the collector relies on (`storage/collect.py`): first the log, then the look.
        """
        log.append("step", **fields)
        return self.stays(fields["key"], fields["attempt"])

    def stays(self, key: str, number: int) -> bool:
        """Say whether an attempt that a log names counts and is there to stay, the weights that it made too.

        It is voided where its weights are gone, so that it is made again; TransientError where that isn't decided.
        """
        found = self.manifest_of(key, number) if self.settled(key, number) else None
        if found is None:
            return False
        if not all(checkpoint.stays(self.backend, digest) for digest in found.checkpoints):
            self._attempt(key, number).void("its weights were collected", "settle")
            return False
        return True

    def settled(self, key: str, number: int) -> bool:
        """Say whether an attempt that was just named somewhere counts, and stays for as long as it is named.

        Where a collector marked it and fell silent it may still come back and delete it, so it is voided.
        """
        if settle(self.backend, layout.collecting_step(key, number)) is Settled.SILENT:
            self._attempt(key, number).void("a collector fell silent over it", "settle")
        return self.counts(key, number)

    def counts(self, key: str, number: int) -> bool:
        """Say whether an attempt is committed and not void, the void mark being looked for first."""
        attempt = self._attempt(key, number)
        return not attempt.is_void() and self.backend.size(layout.manifest(key, number)) is not None

    def manifest_of(self, key: str, number: int) -> Manifest | None:
        """Return the manifest of one attempt, void or not; None where there is none."""
        return self._attempt(key, number).read_manifest()

    def begun(self, key: str) -> bool:
        """Say whether anything of the attempt that counts is there; lists it."""
        return any(True for _ in self.backend.list(layout.attempt(key, self.attempt(key).number)))

    def state(self, key: str) -> StepState:
        """Return the place of the state inside the attempt to write, from which an interrupted step goes on."""
        return StepState(key=key, number=self.attempt(key).number, backend=self.backend)

    def find_step(self, beginning: str) -> str:
        """Return the key of the one step that begins so; StoreError where none or several do. Lists the steps."""
        found = [key for key in self.backend.folders(layout.STEPS) if beginning and key.startswith(beginning)]
        if len(found) == 1:
            return found[0]
        which = f"{len(found)} steps begin with" if found else "no step begins with"
        raise StoreError(
            f"{self.url}: {which} `{beginning}`; give a key, or its beginning, of `starwheel show RUN ITERATION`"
        )

    def void(self, key: str, reason: str, who: str) -> int:
        """Mark the attempt that counts as void and return its number; the next one may be written."""
        attempt = self.attempt(key)
        attempt.void(reason, who)
        return attempt.number

    def read(self, artifact: Artifact, columns: list[str] | None = None) -> pa.Table:
        """Return the rows of an artifact in their order; every file's digest is checked before use."""
        return pa.concat_tables(read_files(self.backend, self.cache, artifact.name, artifact.files, columns=columns))

    def fetch(self, artifact: Artifact) -> list[Path]:
        """Return verified local copies of an artifact's Parquet files, in order."""
        return [
            self.cache.fetch(self.backend, file.path, sha256=file.sha256, size=file.bytes) for file in artifact.files
        ]

    def put_checkpoint(self, folder: Path) -> CheckpointRef:
        """Store a flat folder of safetensors, JSON, tokenizer and template files; see `storage.checkpoint.put`."""
        return checkpoint.put(self.backend, folder)

    def fetch_checkpoint(self, digest: str) -> Path:
        """Return a verified local folder of a checkpoint; don't write into it."""
        return checkpoint.fetch(self.backend, self.cache, digest)

    def create_run(self, name: str, config: Mapping[str, Any], *, code_version: str) -> str:
        """Freeze a config under a new run id `<name>-<utc>-<4 hex>` and return the id."""
        while True:
            now = _now()
            run_id = layout.name(f"{name}-{now:%Y%m%dt%H%M%S}-{secrets.token_hex(2)}")
            created = now.isoformat(timespec="seconds")
            frozen = {"run_id": run_id, "config": config, "code_version": code_version, "created": created}
            if self.backend.put_new(layout.run(run_id), record.encode({**frozen, "nonce": secrets.token_hex(16)})):
                return self.run(run_id).run_id  # read back, so that a config damaged on the way is noticed now

    def run(self, run_id: str) -> RunRecord:
        """Return what was frozen when the run was made, or raise StoreError naming the runs there are."""
        try:
            fields, _ = record.read(self.backend, layout.run(run_id))
        except NotFoundError:
            known = ", ".join(self.runs()[-5:]) or "none"
            raise StoreError(f"there is no run {run_id} in {self.url}; the latest are: {known}") from None
        return RunRecord(run_id, fields["config"], fields["code_version"], fields["created"])

    def run_config(self, run_id: str) -> Mapping[str, Any]:
        """Return the frozen config of a run."""
        return self.run(run_id).config

    def runs(self) -> list[str]:
        """List the ids of all runs, by name and then by time."""
        return [run_id for run_id in self.backend.folders(layout.RUNS) if _is_name(run_id)]

    def is_removed(self, run_id: str) -> bool:
        """Say whether a run is removed, by the last record alone: the first may be damaged, or deleted already."""
        keys = sorted(self.backend.list(f"{layout.run_folder(run_id)}log/"))
        return bool(keys) and is_removed([record.read(self.backend, keys[-1])[0]])

    def put_report(self, run_id: str, name: str, content: bytes) -> None:
        """Store a file of a run's report; one that is there already stays."""
        self.backend.put_new(layout.report(run_id, name), content)

    def report(self, run_id: str, name: str) -> bytes | None:
        """Return a file of a run's report, None where there is none."""
        try:
            return self.backend.get(layout.report(run_id, name))
        except NotFoundError:
            return None

    def run_log(self, run_id: str) -> RunLog:
        """Return the log of a run, to read or to open for writing."""
        return RunLog(self.backend, run_id)

    def _attempt(self, key: str, number: int) -> Attempt:
        return Attempt(key=key, number=number, backend=self.backend, cache=self.cache)


def open_store(url: str, *, cache: Path | None = None, create: bool = True) -> Store:
    """Open the store at `s3://bucket/prefix` or in a folder, making it where there is none and `create` allows.

    `cache` is the folder of verified local copies; by default `STARWHEEL_CACHE`, else `.cache` in a local store, else
    the user's cache folder. A new store is probed by a race of exclusive creates; one that isn't safe is refused with
    StoreError.
    """
    backend = _backend(url)
    try:
        fields, _ = record.read(backend, layout.FORMAT)
    except NotFoundError:
        if not create:
            raise StoreError(
                f"there is no store at {backend.url}; check the address, or make one with `starwheel run`"
            ) from None
        fields = _make(backend)
    return Store(backend, ObjectCache(cache or _default_cache(backend)), store_id=fields["store_id"])


def _backend(url: str) -> Backend:
    if url.startswith("s3://"):
        from storage.s3 import S3Backend  # here, so that local work doesn't load the AWS libraries

        return S3Backend(url)
    if scheme := re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", url):
        raise StoreError(f"a store can't be opened under {scheme.group()}; use s3://bucket/prefix or a folder")
    return LocalBackend(url)


def _make(backend: Backend) -> dict[str, Any]:
    races = LOCAL_RACES if isinstance(backend, LocalBackend) else S3_RACES
    found = probe(backend, **races)
    backend.put_new(layout.FORMAT, record.encode({"store_id": secrets.token_hex(16), "probe": found}))
    return record.read(backend, layout.FORMAT)[0]


def _default_cache(backend: Backend) -> Path:
    if folder := os.environ.get("STARWHEEL_CACHE"):
        return Path(folder)
    if isinstance(backend, LocalBackend):
        return Path(backend.url, ".cache")
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "starwheel")


def _is_name(text: str) -> bool:
    try:
        return layout.name(text) == text
    except StoreError:
        return False


def _now() -> datetime:
    return datetime.now(UTC)
