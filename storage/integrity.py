"""Look whether what a manifest names is there and whole, without using a local copy."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from storage import checkpoint, layout
from storage.cache import download
from storage.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from storage.manifest import Manifest
    from storage.store import Store

_READERS = 8


@dataclass(frozen=True, slots=True)
class Object:
    """Name a stored object by what its bytes must be."""

    key: str
    bytes: int
    sha256: str


def manifest_objects(manifest: Manifest) -> list[Object]:
    """Give the files of a manifest."""
    return [
        Object(file.path, file.bytes, file.sha256)
        for artifact in manifest.artifacts.values()
        for file in artifact.files
    ]


def checkpoint_objects(store: Store, digest: str) -> list[Object]:
    """Give the files of a checkpoint; StoreError where its index is lost or damaged."""
    entries = checkpoint.read_index(store.backend, digest)
    return [Object(layout.checkpoint(digest, one.name), one.bytes, one.sha256) for one in entries]


def damaged(store: Store, objects: Iterable[Object], *, deep: bool) -> dict[Object, str]:
    """Give what is wrong with those objects that are not as they must be, each with its full address.

    Existence and length are looked at; `deep` also reads all bytes from the store and hashes them.
    """
    several = list(dict.fromkeys(objects))
    with ThreadPoolExecutor(_READERS) as pool:
        found = pool.map(lambda one: _damage(store, one, deep), several)
        return {one: what for one, what in zip(several, found, strict=True) if what is not None}


def _damage(store: Store, one: Object, deep: bool) -> str | None:
    address = store.backend.address(one.key)
    size = store.backend.size(one.key)
    if size is None:
        return f"{address} is missing"
    if size != one.bytes:
        return f"{address} has {size} bytes instead of {one.bytes}"
    if not deep:
        return None
    with store.cache.scratch() as folder:
        try:
            download(store.backend, one.key, folder / "copy", sha256=one.sha256, size=one.bytes)
        except StoreError as error:
            return str(error).partition("; ")[0]
    return None
