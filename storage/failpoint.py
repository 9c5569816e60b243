"""Let a test stop the process at any store operation; does nothing otherwise."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_hook: Callable[[str], None] | None = None


def install(hook: Callable[[str], None] | None) -> None:
    """Call `hook` with the name of every point reached from now on (None removes it)."""
    global _hook
    _hook = hook


def hit(name: str) -> None:
    """Mark a point of the protocol, e.g. `put_new steps/…/manifest.json before`."""
    if _hook is not None:
        _hook(name)


@contextmanager
def around(operation: str, key: str) -> Iterator[None]:
    """Mark the points before a mutation and after it was applied."""
    hit(f"{operation} {key} before")
    yield
    hit(f"{operation} {key} after")
