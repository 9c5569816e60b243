"""Hold runs in processes of their own, which can be commanded, stopped and killed as an orchestrator can.

They are forked: a fresh interpreter would take longer to start than the tests that use it. Options change what a
machine may have otherwise: a wall clock that is off, the identity of another machine.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
import sys
import traceback
from typing import IO, TYPE_CHECKING, Any

from samples import judgments

import storage.holder
from storage import layout
from storage.claim import Claims
from storage.errors import StarwheelError
from storage.hold import take_run
from storage.lease import Lease, Pace
from storage.store import Store, open_store

if TYPE_CHECKING:
    from pathlib import Path

# Scaled time, with room for a machine whose cores are busy: a holder that lives must get its turn within the time-out.
QUICK = Pace(beat_s=0.1, timeout_s=2.0)


class Orchestrator:
    """One such process; it has taken nothing yet."""

    def __init__(self, url: str, run_id: str, cache: Path, **options: Any) -> None:
        commands, self._commands = _pipe()
        self._answers, answers = _pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self._commands.close()
                _obey(_Obeying(open_store(url, cache=cache, create=False), run_id), options, commands, answers)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        commands.close()
        answers.close()

    def ask(self, *words: str) -> dict[str, Any]:
        self.tell(*words)
        return self.answer()

    def tell(self, *words: str) -> None:
        """Give a command without waiting for what comes of it."""
        self._commands.write(" ".join(words) + "\n")
        self._commands.flush()

    def answer(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._answers.readline())
        return found

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Kill it, once."""
        if not self._commands.closed:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            with contextlib.suppress(BrokenPipeError):
                self._commands.close()
            self._answers.close()


class _Obeying:
    """What the process does at a command."""

    def __init__(self, store: Store, run_id: str) -> None:
        self.store, self.run_id = store, run_id
        self.told: list[str] = []

    def take(self) -> dict[str, Any]:
        self.log = take_run(self.store, self.run_id, tell=self.told.append)
        assert self.log.epoch is not None
        self.lost = False
        backend = self.store.backend
        self.lease = Lease(
            backend, layout.lease(self.run_id, self.log.epoch), lost=self.log.taken_over, on_lost=self._lose
        )
        self.lease.start()
        self.claims = Claims(backend, self.run_id, self.log.epoch)
        return {"epoch": self.log.epoch, "told": self.told}

    def _lose(self) -> None:
        self.lost = True

    def append(self, key: str) -> dict[str, Any]:
        self.log.append("step", key=key, attempt=0)
        return {}

    def commit(self, key: str) -> dict[str, Any]:
        parts: dict[str, Any] = {"inputs": {}, "key_parts": {}, "facts": {}, "counts": {}}
        made = self.store.attempt(key).commit(step="s", version=1, tables={"judgments": judgments(3)}, **parts)
        return {"nonce": made.nonce}

    def claim(self, *keys: str) -> dict[str, Any]:
        other = self.claims.claim(keys)
        return {"other": None if other is None else other.run_id}

    def is_lost(self) -> dict[str, Any]:
        return {"lost": self.lost}

    def release(self) -> dict[str, Any]:
        self.claims.release()
        self.lease.release()
        return {}


def _obey(process: _Obeying, options: dict[str, Any], commands: IO[str], answers: IO[str]) -> None:
    if options.get("elsewhere"):
        storage.holder._machine = lambda: "another boot"
    _skew(options.get("skew", 0))
    for line in commands:
        command, *words = line.split()
        try:
            answer = getattr(process, command)(*words)
        except StarwheelError as error:
            answer = {"error": type(error).__name__, "message": str(error), "code": error.exit_code}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _skew(seconds: float) -> None:
    """Let every module of the store read a wall clock that is off."""

    class Skewed(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.datetime.now(tz) + datetime.timedelta(seconds=seconds)

    for name, module in list(sys.modules.items()):
        if name.startswith("storage.") and hasattr(module, "datetime"):
            module.datetime = Skewed  # type: ignore[attr-defined]


def _pipe() -> tuple[IO[str], IO[str]]:
    reader, writer = os.pipe()
    return os.fdopen(reader, "r"), os.fdopen(writer, "w")
