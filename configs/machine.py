"""Ask what memory this machine offers, without torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

GIB = 2**30


@dataclass(frozen=True)
class Machine:
    """Hold what a machine offers, in GiB."""

    ram: float  # free now
    gpus: tuple[float, ...] = ()  # whole memory of each


def find_machine() -> Machine:
    """Ask psutil and the control group for free memory, `nvidia-smi` for the GPUs; torch isn't imported."""
    import psutil

    free = psutil.virtual_memory().available
    limit = _group_free()
    return Machine((free if limit is None else min(free, limit)) / GIB, _gpus())


def _group_free() -> int | None:
    """Give what a container's own limit leaves, which psutil doesn't see; files in the page cache can be dropped."""
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such file, or no limit: "max"
        return None
    return max(limit - used + int(stat.get("inactive_file", 0)), 0)


def _gpus() -> tuple[float, ...]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shutil.which("nvidia-smi") is None or visible in ("", "-1"):
        return ()
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
        sizes = [float(line) / 1024 for line in done.stdout.split("\n") if line.strip()]
    except (OSError, ValueError, subprocess.SubprocessError):
        return ()
    chosen = (visible or "").split(",")
    if visible and all(one.isdecimal() for one in chosen):
        sizes = [sizes[int(one)] for one in chosen if int(one) < len(sizes)]
    return tuple(sizes)
