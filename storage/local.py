"""Keep the store in a local folder: temporary file, fsync, hard link to the final name, fsync of the folder."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from storage import failpoint, layout
from storage.backend import NotFoundError
from storage.digest import digest_file
from storage.errors import CommitUnknownError, CorruptArtifactError, StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator

_TEMPORARY = ".tmp-"


class LocalBackend:
    """Keep each object in a file of its key's name; `link(2)` creates it atomically, and only if the name is free."""

    def __init__(self, root: str | Path) -> None:
        self._root = Path(root).expanduser().resolve()

    @property
    def url(self) -> str:
        """The folder."""
        return str(self._root)

    def __repr__(self) -> str:
        return f"LocalBackend({self.url!r})"

    def address(self, key: str) -> str:
        """Return the file's path."""
        return f"{self._root}/{key}"

    def hasty(self, *, silence: float, deadline: float) -> LocalBackend:
        """Give itself: a folder has no patience that could be set."""
        return self

    def get(self, key: str) -> bytes:
        """Return the whole file."""
        path = self._path(key)
        try:
            return path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise NotFoundError(f"{path} doesn't exist") from None
        except OSError as error:
            raise _refused("read", path, error) from error

    def get_file(self, key: str, path: Path) -> None:
        """Copy the whole file."""
        source = self._path(key)
        try:
            shutil.copyfile(source, path)
        except FileNotFoundError:
            raise NotFoundError(f"{source} doesn't exist") from None
        except OSError as error:
            raise _refused("copy", source, error) from error

    def put_new(self, key: str, data: bytes) -> bool:
        """Link a finished temporary file to the name; a taken name is won if it holds the same bytes."""
        path = self._path(key)
        with failpoint.around("put_new", key):
            temporary = self._temporary(path)
            try:
                _write(temporary, data)
                created = _link(temporary, path)
            except StoreError:
                raise
            except OSError as error:
                raise _refused("write", path, error) from error
            finally:
                _discard(temporary)
        try:
            return created or self.get(key) == data
        except NotFoundError:  # taken then, deleted since
            return False

    def put(self, key: str, data: bytes) -> None:
        """Replace the file in one step."""
        path = self._path(key)
        with failpoint.around("put", key):
            temporary = self._temporary(path)
            try:
                _write(temporary, data)
                os.replace(temporary, path)
                _sync_folder(path.parent)
            except OSError as error:
                raise _refused("write", path, error) from error
            finally:
                _discard(temporary)

    def put_file(self, key: str, path: Path, *, sha256: str, read_back: bool) -> None:
        """Copy, hash the copy, then link it; a file of that name with other bytes is damaged and gets replaced."""
        target = self._path(key)
        with failpoint.around("put_file", key):
            temporary = self._temporary(target)
            try:
                self._copy(path, temporary, sha256 if read_back else None)
                if not _link(temporary, target) and digest_file(target) != sha256:
                    os.replace(temporary, target)
                    _sync_folder(target.parent)
            except StoreError:
                raise
            except OSError as error:
                raise _refused("write", target, error) from error
            finally:
                _discard(temporary)

    def size(self, key: str) -> int | None:
        """Return the file's size."""
        path = self._path(key)
        try:
            return path.stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise _refused("look at", path, error) from error

    def list(self, prefix: str) -> Iterator[str]:
        """Yield the files below a folder; names that the store could not have written are passed over."""
        for folder, names, files in os.walk(self._folder(prefix)):
            names[:] = sorted(name for name in names if not name.startswith("."))
            for file in sorted(files):
                if not file.startswith("."):
                    yield str(Path(folder, file).relative_to(self._root))

    def folders(self, prefix: str) -> Iterator[str]:
        """Yield the folders directly under a folder that hold a file; empty ones stay behind deletions."""
        base = self._folder(prefix)
        if not base.is_dir():
            return
        for name in sorted(entry.name for entry in os.scandir(base) if entry.is_dir(follow_symlinks=False)):
            if any(True for _, _, files in os.walk(base / name) for file in files if not file.startswith(".")):
                yield name

    def delete(self, key: str) -> None:
        """Unlink the file."""
        path = self._path(key)
        with failpoint.around("delete", key):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise _refused("delete", path, error) from error

    def _path(self, key: str) -> Path:
        """Return the file of a key; a symbolic link on the way could lead out of the store and is refused."""
        path = self._root
        for part in layout.key(key).split("/"):
            path = path / part
            try:
                leads_away = path.is_symlink()
            except OSError as error:
                raise _refused("look at", path, error) from error
            if leads_away:
                raise StoreError(
                    f"{path} is a symbolic link; a store holds none: put the file itself there or remove it"
                )
        return path

    def _folder(self, prefix: str) -> Path:
        return self._path(prefix.removesuffix("/")) if prefix else self._root

    def _temporary(self, path: Path) -> Path:
        try:
            _make_folder(path.parent, self._root)
        except OSError as error:
            raise _refused("make the folder of", path, error) from error
        return path.parent / f"{_TEMPORARY}{os.getpid()}-{secrets.token_hex(6)}"

    def _copy(self, source: Path, temporary: Path, sha256: str | None) -> None:
        shutil.copyfile(source, temporary)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        if sha256 is not None and (found := digest_file(temporary)) != sha256:
            raise CorruptArtifactError(f"the copy of {source} has digest {found} instead of {sha256}; check the disk")


def _write(path: Path, data: bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _discard(temporary: Path) -> None:
    """Delete what is left of a temporary file; what can't be deleted is garbage and fails no write that was done."""
    with contextlib.suppress(OSError):
        temporary.unlink(missing_ok=True)


def _link(temporary: Path, path: Path) -> bool:
    try:
        os.link(temporary, path)
        created = True
    except FileExistsError:
        created = False
    try:
        _sync_folder(path.parent)  # also where a racer won: what we adopt must survive a power cut
    except OSError as error:
        raise CommitUnknownError(
            f"{path} may or may not be durable ({error.strerror}); check the disk and resume"
        ) from error
    return created


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make_folder(folder: Path, root: Path) -> None:
    """Make a folder and its parents durable: each new entry is synced in the folder that holds it."""
    if folder.is_dir():
        return
    if folder != root and folder.parent != folder:
        _make_folder(folder.parent, root)
    folder.mkdir(parents=True, exist_ok=True)
    _sync_folder(folder.parent)


def _refused(verb: str, path: Path, error: OSError) -> StoreError:
    return StoreError(
        f"can't {verb} {path}: {error.strerror or error}; mend it and resume, nothing was committed by this write"
    )
