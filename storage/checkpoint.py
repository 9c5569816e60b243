"""Store model weights as a set of safe files named by the digest of their index; no pickle gets in or out."""

from __future__ import annotations

import json
import os
import struct
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from storage import failpoint, layout, record
from storage.backend import NotFoundError
from storage.cache import download, mend
from storage.digest import canonical_json, digest_bytes, digest_file
from storage.errors import CorruptArtifactError, StoreError, TransientError
from storage.marks import Settled, settle

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from storage.backend import Backend
    from storage.cache import ObjectCache

INDEX = "index.json"
_SUFFIXES = (".safetensors", ".json", ".txt", ".model", ".jinja", ".tiktoken")
_MAX_HEADER = 100 << 20


@dataclass(frozen=True, slots=True)
class CheckpointRef:
    """Name a stored checkpoint; `bytes` counts all its files."""

    digest: str
    bytes: int
    files: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """Name a file by its size and content."""

    name: str
    bytes: int
    sha256: str


def put(backend: Backend, folder: Path) -> CheckpointRef:
    """Store the files of a folder, then the index that names them; storing the same files again stores nothing.

    Whoever stores weights holds a claim meanwhile: a collector that doesn't see it has left its mark before, and is
    waited for. Raises StoreError for anything but a flat folder of safetensors, JSON, tokenizer and template files.
    """
    paths = checked(folder)
    entries = [entry(path) for path in paths.values()]
    index = canonical_json({"files": [asdict(one) for one in entries]})
    digest = digest_bytes(index)
    _settle(backend, digest)
    for one in entries:
        key = layout.checkpoint(digest, one.name)
        backend.put_file(key, paths[one.name], sha256=one.sha256, read_back=True)
    failpoint.hit(f"checkpoint {digest} payload stored")
    if not backend.put_new(layout.checkpoint_index(digest), index):
        backend.put(layout.checkpoint_index(digest), index)  # the name tells the content: other bytes are damage
    read_index(backend, digest)  # a damaged index must be an error here and not next week
    return CheckpointRef(digest=digest, bytes=sum(one.bytes for one in entries), files=tuple(paths))


def stays(backend: Backend, digest: str) -> bool:
    """Say whether a checkpoint whose name was just written down is there, all its files; it stays then.

    A collector deletes the index first, but the files may have been found in their place, and the index stored, by one
    whose claim fell silent meanwhile.
    """
    _settle(backend, digest)
    if backend.size(layout.checkpoint_index(digest)) is None:
        return False
    return all(backend.size(layout.checkpoint(digest, one.name)) is not None for one in read_index(backend, digest))


def _settle(backend: Backend, digest: str) -> None:
    if settle(backend, layout.collecting(digest)) is Settled.SILENT:
        raise TransientError(
            f"a collector that fell silent was about to delete {backend.address(layout.checkpoint_index(digest))}; "
            f"end it, remove {backend.address(layout.collecting(digest))} and resume"
        )


def fetch(backend: Backend, cache: ObjectCache, digest: str) -> Path:
    """Return a local folder with exactly the files of a checkpoint, verified; damage raises CorruptArtifactError."""
    target = cache.folder(digest)
    if cache.trusted(digest):
        os.utime(target)
        return target
    entries = read_index(backend, digest)
    if _holds(target, entries):
        return cache.trust_folder(digest)
    with cache.scratch() as scratch:
        built = scratch / "checkpoint"
        built.mkdir()
        for one in entries:
            where = layout.checkpoint(digest, one.name)
            download(backend, where, built / one.name, sha256=one.sha256, size=one.bytes)
        checked(built)
        return cache.keep_folder(built, digest)


def checked(folder: Path) -> dict[str, Path]:
    """Return the files of a folder of weights by name, in order; refuse all that could run code or isn't whole."""
    if not folder.is_dir():
        raise StoreError(f"{folder} is not a folder with a checkpoint")
    paths = {path.name: path for path in sorted(folder.iterdir())}
    for name, path in paths.items():
        _check_name(name, str(path))
        if path.is_symlink() or not path.is_file():
            raise StoreError(f"{path} is not a plain file; a checkpoint is a flat folder of files")
        if name.endswith(".safetensors"):
            _check_safetensors(path)
        elif name.endswith(".json"):
            _check_json(path)
    if not any(name.endswith(".safetensors") for name in paths):
        raise StoreError(f"{folder} has no .safetensors file; save the model with safe_serialization=True")
    return paths


def _check_name(name: str, where: str) -> None:
    layout.name(name)
    if name == INDEX or not name.endswith(_SUFFIXES):
        raise StoreError(
            f"{where} has no place in a checkpoint; remove it: only {', '.join(_SUFFIXES)} files are stored, "
            "never a pickle"
        )


def _check_safetensors(path: Path) -> None:
    """Check that the header is JSON and that the tensors fill the file exactly (https://github.com/huggingface/safetensors#format)."""
    try:
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _MAX_HEADER:
                raise ValueError("header too long")
            header = json.loads(file.read(length))
        end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
        if 8 + length + end != path.stat().st_size:
            raise ValueError("tensors don't fill the file")
    except (ValueError, struct.error, KeyError, TypeError, AttributeError, IndexError) as error:
        raise StoreError(f"{path} is not a whole safetensors file ({error}); save the model again") from None


def _check_json(path: Path) -> None:
    try:
        json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise StoreError(f"{path} is not JSON; save the model again") from None


def read_index(backend: Backend, digest: str) -> list[Entry]:
    """Return the files that a checkpoint's index names; StoreError where there is none, CorruptArtifactError."""
    key = layout.checkpoint_index(digest)
    found = ""
    for _ in range(record.READ_TRIES):
        try:
            data = backend.get(key)
        except NotFoundError:
            raise StoreError(f"{backend.address(key)} is missing; {mend(key)}") from None
        found = digest_bytes(data)
        if found == digest:
            return [parse_entry(one, backend.address(key)) for one in json.loads(data)["files"]]
    raise CorruptArtifactError(f"{backend.address(key)} has digest {found} instead of {digest}; {mend(key)}")


def entry(path: Path) -> Entry:
    """Name a local file."""
    return Entry(path.name, path.stat().st_size, digest_file(path))


def parse_entry(fields: Mapping[str, Any], address: str) -> Entry:
    """Read an entry of the index at `address`; StoreError for a name that has no place among weights."""
    found = Entry(**fields)
    _check_name(found.name, f"{found.name} in {address}")
    return found


def _holds(folder: Path, entries: list[Entry]) -> bool:
    """Say whether a cached folder has these files and no others, with these digests."""
    if not folder.is_dir() or {path.name for path in folder.iterdir()} != {entry.name for entry in entries}:
        return False
    paths = {entry: folder / entry.name for entry in entries}
    return all(
        path.is_file()
        and not path.is_symlink()
        and path.stat().st_size == entry.bytes
        and digest_file(path) == entry.sha256
        for entry, path in paths.items()
    )
