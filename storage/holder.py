"""Name the process that holds something, and say where that is certain whether it is gone.

Only a process of the same kernel and the same process namespace can be looked for. Of all others nothing is certain:
their beat decides (`storage/lease.py`). Host names and wall clocks are words for people and decide nothing.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = Path("/proc/self/ns/pid")
_STATE, _STARTED = 0, 19  # fields of /proc/<pid>/stat behind the name, as proc(5) counts them from 3
_DEAD = {"Z", "X", "x"}


@dataclass(frozen=True, slots=True)
class Holder:
    """Name a process: `machine` is its kernel's boot and process namespace, `started` its start in ticks since then.

    Both are empty where the system doesn't tell them.
    """

    host: str
    pid: int
    machine: str
    started: str

    def to_json(self) -> dict[str, Any]:
        """Give the fields for a record."""
        return {"host": self.host, "pid": self.pid, "machine": self.machine, "started": self.started}


def this_process() -> Holder:
    """Name this process, also after a fork."""
    return _name(os.getpid())


@cache
def _name(pid: int) -> Holder:
    return Holder(socket.gethostname(), pid, _machine(), _look(pid)[1])


def of_record(fields: Mapping[str, Any]) -> Holder:
    """Read a holder from a record; one that an earlier version wrote has host and process id alone."""
    return Holder(
        str(fields.get("host", "?")),
        fields["pid"] if isinstance(fields.get("pid"), int) else 0,
        str(fields.get("machine", "")),
        str(fields.get("started", "")),
    )


def is_gone(holder: Holder) -> bool:
    """Say whether the process is certainly gone: it was of this machine and namespace, and is there no more."""
    here = this_process()
    if not holder.machine or not holder.started or (holder.host, holder.machine) != (here.host, here.machine):
        return False
    state, started = _look(holder.pid)
    if not started:  # none there, or its state can't be read: hidden, or no descriptor is left to read it by
        return not _exists(holder.pid)
    return started != holder.started or state in _DEAD


def _machine() -> str:
    try:
        return f"{_BOOT.read_text().strip()} {os.readlink(_NAMESPACE)}"
    except OSError:
        return ""


def _look(pid: int) -> tuple[str, str]:
    """Give state and start of a process; both empty where they can't be read."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "", ""
    fields = stat.rpartition(")")[2].split()
    return fields[_STATE], fields[_STARTED]


def _exists(pid: int) -> bool:
    """Say whether a process has this id, whoever's it is."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    else:
        return True
