"""Let two pieces of work on one store take turns, one store operation at a time, in an order that the test gives."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from storage.cache import ObjectCache
from storage.local import LocalBackend
from storage.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WAIT_S = 60
LOOKS = 60  # more than either side has operations


class Side:
    """Run a piece of work in a thread that stops before each operation that `stops` names."""

    def __init__(
        self, folder: Path, cache: Path, work: Callable[[Store], Any], stops: Callable[[str, str], bool]
    ) -> None:
        self.passed: list[str] = []
        self.result: Any = None
        self.error: BaseException | None = None
        self.ended = False
        self._stops, self._work = stops, work
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._store = Store(Stepped(folder, self), ObjectCache(cache))
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._wait()

    def advance(self, operations: int | None = None) -> None:
        """Do so many operations, or all that are left."""
        while not self.ended and operations != 0:
            self._go.release()
            self._wait()
            operations = None if operations is None else operations - 1

    def before(self, operation: str, key: str) -> None:
        """Wait for the turn; what the work's own helper threads do belongs to the operation that started them."""
        if threading.current_thread() is not self._thread or not self._stops(operation, key):
            return
        self._stopped.release()
        assert self._go.acquire(timeout=WAIT_S)
        self.passed.append(f"{operation} {key}")

    def _run(self) -> None:
        try:
            self.result = self._work(self._store)
        except Exception as error:
            self.error = error
        finally:
            self.ended = True
            self._stopped.release()

    def _wait(self) -> None:
        assert self._stopped.acquire(timeout=WAIT_S)


class Stepped(LocalBackend):
    """The local store, which tells a side before each operation."""

    def __init__(self, folder: Path, side: Side) -> None:
        super().__init__(folder)
        self._side = side

    def get(self, key: str) -> bytes:
        self._side.before("get", key)
        return super().get(key)

    def put_new(self, key: str, data: bytes) -> bool:
        self._side.before("put_new", key)
        return super().put_new(key, data)

    def put(self, key: str, data: bytes) -> None:
        self._side.before("put", key)
        super().put(key, data)

    def put_file(self, key: str, path: Path, *, sha256: str, read_back: bool) -> None:
        self._side.before("put_file", key)
        super().put_file(key, path, sha256=sha256, read_back=read_back)

    def size(self, key: str) -> int | None:
        self._side.before("size", key)
        return super().size(key)

    def list(self, prefix: str) -> Any:
        self._side.before("list", prefix)
        return super().list(prefix)

    def folders(self, prefix: str) -> Any:
        self._side.before("folders", prefix)
        return super().folders(prefix)

    def delete(self, key: str) -> None:
        self._side.before("delete", key)
        super().delete(key)


def length(make: Callable[[], Side]) -> int:
    """Count the operations of a piece of work that nobody disturbs."""
    side = make()
    side.advance()
    if side.error is not None:
        raise side.error
    return len(side.passed)


def orders(one: int, other: int) -> list[tuple[int, int, bool]]:
    """Give every pair of places to change turns at, and who ends first: (operations of one, of other, one first)."""
    return [(i, j, first) for i in range(one + 1) for j in range(other + 1) for first in (True, False)]


def interleave(one: Side, other: Side, order: tuple[int, int, bool]) -> None:
    """Do i operations of one and j of the other, whoever ends first having begun; then both to their ends.

    Where the first one waits for the other, which stands still, it gives it the turn after a number of looks.
    """
    i, j, first = order
    for side, operations in ((one, i), (other, j)) if first else ((other, j), (one, i)):
        side.advance(operations)
    begins, follows = (one, other) if first else (other, one)
    begins.advance(LOOKS)
    follows.advance(LOOKS)
    begins.advance()
    follows.advance()
