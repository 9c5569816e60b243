"""Keep verified copies of stored objects on the local disk, named by their digest."""

from __future__ import annotations

import os
import secrets
import shutil
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from storage import layout
from storage.backend import NotFoundError
from storage.digest import digest_file
from storage.errors import CorruptArtifactError, StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from storage.backend import Backend

LIMIT_BYTES = 64 << 30
FETCH_TRIES = 5
FETCH_PAUSE_S = 0.05
KEEP_S = 600.0


class ObjectCache:
    """Fetch whole objects once; a file is hashed when it arrives and again at its first use in each process.

    Least recently used entries go when the total passes `limit_bytes`, but none used within `keep_s` seconds by any
    process: someone may be about to open it.
    """

    def __init__(self, folder: str | Path, limit_bytes: int = LIMIT_BYTES, *, keep_s: float = KEEP_S) -> None:
        self._folder = Path(folder).expanduser().absolute()
        self._limit = limit_bytes
        self._keep_s = keep_s
        self._trusted: set[str] = set()
        self._lock = threading.Lock()
        for name in ("objects", "folders", "tmp"):
            try:
                (self._folder / name).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise StoreError(
                    f"can't make the cache {self._folder}: {error.strerror}; choose another folder"
                ) from error

    def fetch(self, backend: Backend, key: str, *, sha256: str, size: int) -> Path:
        """Return a local file with exactly these bytes, or raise CorruptArtifactError with the full address."""
        path = self._object(sha256)
        if self._usable(path, sha256, size):
            return path
        with self.scratch() as folder:
            temporary = folder / sha256
            download(backend, key, temporary, sha256=sha256, size=size)
            self._settle(temporary, path)
        return path

    def adopt(self, path: Path, sha256: str) -> Path:
        """Move a file that was just written and hashed into the cache, so that reading it back costs no download."""
        target = self._object(sha256)
        self._settle(path, target)
        return target

    @property
    def root(self) -> Path:
        """The folder that the cache keeps itself in."""
        return self._folder

    def folder(self, digest: str) -> Path:
        """Name the place of a folder of several files that go together (a checkpoint)."""
        return self._folder / "folders" / layout.digest(digest)

    def keep_folder(self, built: Path, digest: str) -> Path:
        """Move a complete and verified folder to its place; one that is there already gives way."""
        target = self.folder(digest)
        with self._lock, self.scratch() as old:
            if target.exists():
                target.rename(old / "replaced")
            try:
                built.rename(target)
            except (
                OSError
            ):  # another process was faster; its folder was verified by it and is verified again by our caller
                if not target.is_dir():
                    raise
            self._trusted.add(target.name)
        self._evict()
        return target

    def trusted(self, digest: str) -> bool:
        """Say whether this process has verified the folder already."""
        return digest in self._trusted and self.folder(digest).is_dir()

    def trust_folder(self, digest: str) -> Path:
        """Remember that the caller has verified the folder."""
        self._trusted.add(digest)
        os.utime(self.folder(digest))
        return self.folder(digest)

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """Lend a folder on the cache's disk, removed at the end."""
        folder = self._folder / "tmp" / f"{os.getpid()}-{secrets.token_hex(6)}"
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _object(self, sha256: str) -> Path:
        return self._folder / "objects" / layout.digest(sha256)

    def _usable(self, path: Path, sha256: str, size: int) -> bool:
        try:
            if path.is_symlink() or path.stat().st_size != size:
                raise ValueError
            if sha256 not in self._trusted and digest_file(path) != sha256:
                raise ValueError
            os.utime(path)
        except FileNotFoundError:
            return False
        except ValueError:
            path.unlink(missing_ok=True)
            self._trusted.discard(sha256)
            return False
        self._trusted.add(sha256)
        return True

    def _settle(self, temporary: Path, path: Path) -> None:
        os.replace(temporary, path)
        os.utime(path)
        self._trusted.add(path.name)
        self._evict()

    def _evict(self) -> None:
        """Remove the least recently used entries above the limit."""
        with self._lock:
            entries = sorted(_entries(self._folder / "objects", self._folder / "folders"))
            total = sum(size for _, size, _ in entries)
            for used, size, path in entries:
                if total <= self._limit or used > time.time() - self._keep_s:
                    return
                self._trusted.discard(path.name)
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
                total -= size


def download(backend: Backend, key: str, path: Path, *, sha256: str, size: int) -> None:
    """Get a whole object and check its length and digest, several times if need be."""
    found = "nothing"
    for tried in range(1, FETCH_TRIES + 1):
        try:
            backend.get_file(key, path)
        except NotFoundError:
            raise CorruptArtifactError(f"{backend.address(key)} is missing; {mend(key)}") from None
        found = f"{path.stat().st_size} bytes of digest {digest_file(path)}"
        if found == f"{size} bytes of digest {sha256}":
            return
        time.sleep(FETCH_PAUSE_S * tried)
    raise CorruptArtifactError(
        f"{backend.address(key)} holds {found} instead of {size} bytes of digest {sha256}; {mend(key)}"
    )


def mend(key: str) -> str:
    """Say how the object is made again: the key of an artifact tells its step, that of a checkpoint's file doesn't."""
    kind, step, *_ = key.split("/")
    if f"{kind}/" == layout.STEPS:
        return f"`starwheel void {step[:12]} --reason lost` and `starwheel resume RUN` compute its step again"
    return "`starwheel verify RUN` names its step, `starwheel void` lets it be computed again"


def _entries(*folders: Path) -> Iterator[tuple[float, int, Path]]:
    for folder in folders:
        for entry in os.scandir(folder):
            path = Path(entry.path)
            try:
                files = (
                    [path]
                    if entry.is_file(follow_symlinks=False)
                    else [file for file in path.rglob("*") if file.is_file()]
                )
                yield entry.stat().st_mtime, sum(file.stat().st_size for file in files), path
            except FileNotFoundError:  # evicted by another process
                continue
