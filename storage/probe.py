"""Find out whether a place keeps the promises the store is built on, by a race before it is trusted."""

from __future__ import annotations

import secrets
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from storage import layout
from storage.errors import StoreError

if TYPE_CHECKING:
    from storage.backend import Backend


def probe(backend: Backend, *, rounds: int = 10, threads: int = 12) -> dict[str, Any]:
    """Return what was found, or raise StoreError where an exclusive create is not exclusive.

    Measured on real servers: some ignore `If-None-Match`, one honours it one request at a time but lets several racers
    win.
    """
    nonce = secrets.token_hex(8)
    keys = [layout.probe(nonce, "sequential"), *(layout.probe(nonce, f"race-{number}") for number in range(rounds))]
    try:
        _sequential(backend, keys[0])
        with ThreadPoolExecutor(threads) as pool:
            winners = [_race(backend, key, pool, threads) for key in keys[1:]]
    finally:
        for key in keys:
            backend.delete(key)
    if any(won != 1 for won in winners):
        raise _unsafe(
            backend,
            f"{sum(won != 1 for won in winners)} of {rounds} races had {min(winners)} to {max(winners)} winners",
        )
    return {"exclusive_create": True, "races": rounds, "threads": threads}


def _sequential(backend: Backend, key: str) -> None:
    if not backend.put_new(key, b"first") or backend.get(key) != b"first":
        raise _unsafe(backend, "a new object can't be read after it was written")
    if backend.put_new(key, b"second") or backend.get(key) != b"first":
        raise _unsafe(backend, "a second create overwrote the first")
    if not backend.put_new(key, b"first"):
        raise _unsafe(backend, "a repeated create is not recognised")


def _race(backend: Backend, key: str, pool: ThreadPoolExecutor, threads: int) -> int:
    """Let threads create one key at once and count those who were told that they won; the object must be a winner's."""
    start = threading.Barrier(threads)

    def create(number: int) -> bool:
        start.wait()
        return backend.put_new(key, b"racer %d" % number)

    won = [number for number, result in enumerate(pool.map(create, range(threads))) if result]
    if backend.get(key) not in [b"racer %d" % number for number in won]:
        raise _unsafe(backend, "the object after a race is not the winner's")
    return len(won)


def _unsafe(backend: Backend, found: str) -> StoreError:
    return StoreError(
        f"{backend.url} is not safe for a store: {found}; use a local folder or a server with atomic conditional writes"
    )
