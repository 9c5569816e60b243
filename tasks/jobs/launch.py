"""Start jobs: one process group each, events read back, everything it started ended with it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from storage import errors
from storage.errors import MissingDependencyError, StarwheelError, StepFailedError, TransientError
from tasks.jobs.entry import JobSpec, run_job

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tasks.step import Event

PACKAGES = Path(__file__).resolve().parents[2]
GRACE_SECONDS = 5.0

# No library phones home, unless the user set these otherwise.
QUIET = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


class Launcher(Protocol):
    """Run a job to its end; raises what the job raised."""

    def run(self, spec: JobSpec, emit: Callable[[Event], None]) -> None:
        """Run the job."""
        ...

    def stop(self, why: StarwheelError) -> None:
        """End the job that runs, from another thread, and start none any more: `run` raises `why`."""
        ...


class InlineLauncher:
    """Run jobs in this process: for tests with the scripted engine and trainer."""

    def stop(self, why: StarwheelError) -> None:
        """Do nothing: a job in this process meets the fence at the run's next append."""

    def run(self, spec: JobSpec, emit: Callable[[Event], None]) -> None:
        """Run the job."""
        run_job(spec, emit)


class ProcessLauncher:
    """Run each job in a process group of its own, with the interpreter that the config names for its kind.

    Spec and output are in `<work>/jobs/<number>-<kind>.*`. MissingDependencyError where the interpreter isn't there or
    lacks a package.
    """

    def __init__(self, work: Path) -> None:
        self._jobs, self._packages = work / "jobs", work / "packages"
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped: StarwheelError | None = None
        self._lock = threading.Lock()

    def run(self, spec: JobSpec, emit: Callable[[Event], None]) -> None:
        """Run the job; on any exit, also Ctrl-C, the whole group is ended before this returns."""
        self._raise_stopped()
        self._jobs.mkdir(parents=True, exist_ok=True)
        number = len(list(self._jobs.glob("*.json")))
        spec_file = self._jobs / f"{number:03d}-{spec.kind}.json"
        spec_file.write_text(spec.to_json())
        log = spec_file.with_suffix(".log")
        key, python = interpreter(spec)
        if shutil.which(python) is None:
            raise MissingDependencyError(f"{key}: `{python}` is no program that can be started; name another")
        with start_job([python, "-m", "tasks.jobs.entry", str(spec_file)], log, self._code()) as (process, events):
            with self._lock:
                self._process = process
            self._raise_stopped()
            failure = _listen(events, emit)
            code = process.wait()
        self._raise_stopped()
        if failure is not None:
            raise failure
        if code != 0:
            last = last_line(log)
            if last.startswith(("ModuleNotFoundError", "ImportError")):
                lacking = f"`{python}` lacks what a {spec.kind} job needs"
                raise MissingDependencyError(f"{key}: {lacking}: {last} (log: {log})")
            raise TransientError(f"the {spec.kind} job ended with code {code}: {last} (log: {log})")

    def stop(self, why: StarwheelError) -> None:
        """End the job's group; the listener then meets the end of its events."""
        with self._lock:
            self._stopped = why
            process = self._process
        if process is not None and process.poll() is None:
            end_group(process)

    def _raise_stopped(self) -> None:
        with self._lock:
            if self._stopped is not None:
                raise self._stopped

    def _code(self) -> Path:
        """Make a folder of our packages alone: another interpreter must not find this one's libraries beside them."""
        self._packages.mkdir(exist_ok=True)
        for package in ("configs", "storage", "tasks"):
            temporary = self._packages / f".{package}-{os.getpid()}"
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(PACKAGES / package)
            os.replace(temporary, self._packages / package)  # of an earlier session, perhaps of an older release
        return self._packages


def interpreter(spec: JobSpec) -> tuple[str, str]:
    """Give the Python of a job and the config key that names it; the one that runs this where none is named."""
    name = "engine" if spec.kind == "session" else "trainer"
    return f"interpreters.{name}", spec.config["interpreters"][name] or sys.executable


@contextmanager
def start_job(command: Sequence[str], log: Path, folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Start a command in a process group of its own, in a folder; give it and the pipe of its events.

    The command gets two descriptors as its last arguments: where events go, and its lifeline. Whatever it started is
    ended when it ends by itself, when the block is left, and when this process dies.
    """
    events, events_end = os.pipe()
    lifeline_end, lifeline = os.pipe()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, str(events_end), str(lifeline_end)],
            cwd=folder,
            env={**QUIET, **os.environ},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=(events_end, lifeline_end),
            start_new_session=True,
        )
    os.close(events_end)
    os.close(lifeline_end)
    # What a dead job leaves behind would hold the events open, and the listener would wait for it for ever.
    warden = threading.Thread(target=_end_rest, args=(process,), name="warden", daemon=True)
    warden.start()
    try:
        yield process, events
    finally:
        end_group(process)
        warden.join()
        os.close(lifeline)


def _listen(reader: int, emit: Callable[[Event], None]) -> StarwheelError | None:
    """Pass events on until the job closes its end; give the error it reported, if any."""
    failure = None
    with os.fdopen(reader) as events:
        for line in events:
            if not line.endswith("\n"):  # killed while it wrote
                break
            event = json.loads(line)
            if event["event"] == "error":
                kind = getattr(errors, event["kind"], StepFailedError)
                failure = kind(event["message"])
            else:
                emit(event)
    return failure


def _end_rest(process: subprocess.Popen[bytes]) -> None:
    process.wait()
    end_group(process)


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


def last_line(log: Path) -> str:
    """Give the last words of a job."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it printed nothing"
