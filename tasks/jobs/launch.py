"""Start jobs: one process group each, events read back, everything it started ended with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from storage import errors
from storage.errors import StarwheelError, StepFailedError, TransientError
from tasks.jobs.entry import JobSpec, run_job

if TYPE_CHECKING:
    from collections.abc import Callable

    from tasks.step import Event

ROOT = Path(__file__).resolve().parents[2]
GRACE_SECONDS = 5.0

# No library phones home, and none spins, unless the user set these otherwise.
QUIET = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "OMP_WAIT_POLICY": "PASSIVE",  # spinning threads bring a shared CPU to a halt
}


class Launcher(Protocol):
    """Run a job to its end; raises what the job raised."""

    def run(self, spec: JobSpec, emit: Callable[[Event], None]) -> None:
        """Run the job."""
        ...


class InlineLauncher:
    """Run jobs in this process: for tests with the scripted engine and trainer."""

    def run(self, spec: JobSpec, emit: Callable[[Event], None]) -> None:
        """Run the job."""
        run_job(spec, emit)


class ProcessLauncher:
    """Run each job in a process group of its own; its output goes to `<work>/logs/<number>-<kind>.log`."""

    def __init__(self, work: Path, *, python: str = sys.executable) -> None:
        self._jobs = work / "jobs"
        self._python = python

    def run(self, spec: JobSpec, emit: Callable[[Event], None]) -> None:
        """Run the job; on any exit, also Ctrl-C, the whole group is ended before this returns."""
        self._jobs.mkdir(parents=True, exist_ok=True)
        number = len(list(self._jobs.glob("*.json")))
        spec_file = self._jobs / f"{number:03d}-{spec.kind}.json"
        spec_file.write_text(spec.to_json())
        log = spec_file.with_suffix(".log")
        reader, writer = os.pipe()
        command = [self._python, "-m", "tasks.jobs.entry", str(spec_file), str(writer)]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**QUIET, **os.environ},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(writer,),
                start_new_session=True,
            )
            os.close(writer)
            try:
                failure = _listen(reader, emit)
                code = process.wait()
            finally:
                end_group(process)
        if failure is not None:
            raise failure
        if code != 0:
            raise TransientError(f"the {spec.kind} job ended with code {code}: {_last_line(log)} (log: {log})")


def _listen(reader: int, emit: Callable[[Event], None]) -> StarwheelError | None:
    """Pass events on until the job closes its end; give the error it reported, if any."""
    failure = None
    with os.fdopen(reader) as events:
        for line in events:
            event = json.loads(line)
            if event["event"] == "error":
                kind = getattr(errors, event["kind"], StepFailedError)
                failure = kind(event["message"])
            else:
                emit(event)
    return failure


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End every process of the group: SIGTERM, and SIGKILL after a grace time."""
    for sign, seconds in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, GRACE_SECONDS)):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            break
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and _alive(process):
            time.sleep(0.05)
    process.wait()


def _alive(process: subprocess.Popen[bytes]) -> bool:
    process.poll()
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it printed nothing"
