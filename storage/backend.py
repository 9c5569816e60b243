"""Say what the store needs from a place that keeps objects; two places do it: a local folder and S3."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from storage.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class NotFoundError(StoreError, KeyError):
    """Report a key that holds no object."""


class Backend(Protocol):
    """Keep objects under keys like `steps/<key>/0/manifest.json`; every call may come from several threads at once.

    An object is visible whole or not at all. A call that raises anything but CommitUnknownError changed nothing.
    """

    @property
    def url(self) -> str:
        """The address a person would use, without credentials."""
        ...

    def address(self, key: str) -> str:
        """Return the full address of a key, for messages."""
        ...

    def hasty(self, *, silence: float, deadline: float) -> Backend:
        """Give the same place with a shorter patience, in seconds: with one request, and with all its tries."""
        ...

    def get(self, key: str) -> bytes:
        """Return the whole object or raise NotFoundError."""
        ...

    def get_file(self, key: str, path: Path) -> None:
        """Write the whole object to a local path or raise NotFoundError."""
        ...

    def put_new(self, key: str, data: bytes) -> bool:
        """Create the object unless the key is taken; False means that it held other bytes than `data`.

        An own write whose answer was lost counts as won, so a record that must differ from all others carries a nonce.
        """
        ...

    def put(self, key: str, data: bytes) -> None:
        """Create or replace the object: for beats, claims and the state of unfinished steps only."""
        ...

    def put_file(self, key: str, path: Path, *, sha256: str, read_back: bool) -> None:
        """Store a local file under a key that names its content; storing it again is a no-op.

        With `read_back` the stored bytes are read and hashed again before the call returns.
        """
        ...

    def size(self, key: str) -> int | None:
        """Return the bytes of an object, None where there is none."""
        ...

    def list(self, prefix: str) -> Iterator[str]:
        """Yield all keys under a prefix (`""` or ending in a slash), page by page; no decision rests on it."""
        ...

    def folders(self, prefix: str) -> Iterator[str]:
        """Yield the names directly under a prefix that have keys below them, in order, page by page."""
        ...

    def delete(self, key: str) -> None:
        """Delete an object; a key without one is left alone."""
        ...
