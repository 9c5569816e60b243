"""Tie a process group to the process that started it: when that one is gone, killed or crashed, so is the group."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def die_with_parent(lifeline: int) -> None:
    """Kill the own process group when the pipe `lifeline` ends: the parent holds its other end and never writes."""

    def watch() -> None:
        while os.read(lifeline, 1):
            pass
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, name="die-with-parent", daemon=True).start()


def die_with_owner(pipe: Path) -> None:
    """Kill the own process group when the one that holds the named pipe open is gone, or was gone before this call."""
    lifeline = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)  # doesn't wait for an owner
    os.set_blocking(lifeline, True)
    die_with_parent(lifeline)
