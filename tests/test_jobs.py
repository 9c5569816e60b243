"""Start real job processes: events, errors, signals, and nothing that outlives its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import small

from storage import errors, lease
from storage.errors import DataError, FencedError, StepFailedError, TransientError
from storage.store import open_store
from tasks.jobs import launch
from tasks.jobs.entry import JobSpec
from tasks.jobs.launch import QUIET, ProcessLauncher
from tasks.models import base_step
from tasks.run import Run, create_run, open_run

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[1]

# Jobs that stand in for a model's: they speak the protocol of tasks/jobs/entry.py and misbehave.
SCRIPTS = {
    "events": """
tell({"event": "progress", "done": 1})
tell({"event": "progress", "done": 2})
""",
    "unfinished": """
tell({"event": "progress", "done": 1})
os.write(events, b'{"event": "prog')
os.kill(os.getpid(), signal.SIGKILL)
""",
    "killed": """
print("the last words")
sys.stdout.flush()
os.kill(os.getpid(), signal.SIGKILL)
""",
    "orphans": """
child = os.fork()
if child == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
tell({"event": "progress", "pid": child})
os.kill(os.getpid(), signal.SIGKILL)
""",
    "engine": """
import subprocess
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
tell({"event": "progress", "pid": child.pid})
time.sleep(600)
""",
    "environment": """
tell({"event": "progress", "environment": dict(os.environ)})
""",
}
HEAD = """
import json, os, signal, sys, time
events = int(sys.argv[-2])
from tasks.jobs.lifeline import die_with_parent
die_with_parent(int(sys.argv[-1]))
def tell(event): os.write(events, (json.dumps(event) + "\\n").encode())
"""


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Run one of the scripts through the launcher in place of tasks/jobs/entry.py and give its events."""

    def run(name: str, listen: Callable[[Any], None] = lambda event: None) -> list[dict[str, Any]]:
        heard: list[dict[str, Any]] = []

        def emit(event: Any) -> None:
            heard.append(event)
            listen(event)

        ProcessLauncher(tmp_path).run(spec(tmp_path, "session", interpreters=standing_in(tmp_path, name)), emit)
        return heard

    return run


def standing_in(folder: Path, name: str) -> dict[str, str]:
    """Name an interpreter that runs the script whatever module it is asked for, for every job."""
    return dict.fromkeys(("engine", "trainer"), interpreter(folder, name))


def interpreter(folder: Path, name: str) -> str:
    script = folder / f"{name}.py"
    script.write_text(HEAD + SCRIPTS[name])
    wrapper = folder / name
    wrapper.write_text(f'#!/bin/sh\nexec {sys.executable} {script} "$@"\n')
    wrapper.chmod(0o755)
    return str(wrapper)


def spec(folder: Path, kind: str, **changes: Any) -> JobSpec:
    described = small.config(folder, **changes)
    store = open_store(described.store)
    return JobSpec(
        kind, store.url, str(store.cache.root), str(folder / "work"), described.model_dump(mode="json"), asked={}
    )


def gone(pid: int, seconds: float) -> bool:
    """Wait until a process has ended; one that is a zombie has."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


def test_a_job_commits_and_tells(tmp_path: Path) -> None:
    asked = spec(tmp_path, "base")
    heard: list[Any] = []
    ProcessLauncher(tmp_path / "work").run(asked, heard.append)
    described = small.config(tmp_path)
    store = open_store(described.store)
    step = base_step(described, store.cache.root)
    assert store.manifest(step.key) is not None
    assert [(one["event"], one["step"], one["key"]) for one in heard] == [("step", "base", step.key)]
    assert sorted(path.name for path in (tmp_path / "work" / "jobs").iterdir()) == ["000-base.json", "000-base.log"]


def test_an_error_comes_back_as_it_was_raised(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    asked = spec(tmp_path, "base")
    (tmp_path / "base" / "model.safetensors").unlink()
    with pytest.raises(DataError, match=r"base: holds no \*\.safetensors; convert the weights") as caught:
        ProcessLauncher(tmp_path / "work").run(asked, lambda event: None)
    assert type(caught.value) is DataError


def test_every_error_class_survives_the_way_back() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert len(kinds) > 6
    for kind in kinds:
        assert str(getattr(errors, kind.__name__)("one sentence")) == "one sentence"


def test_an_error_of_unknown_kind_fails_the_step(tmp_path: Path) -> None:
    SCRIPTS["unknown"] = 'tell({"event": "error", "kind": "Odd", "message": "what happened"})'
    with pytest.raises(StepFailedError, match="what happened"):
        ProcessLauncher(tmp_path).run(
            spec(tmp_path, "session", interpreters=standing_in(tmp_path, "unknown")), lambda event: None
        )


def test_events_arrive_in_order(job: Callable[..., list[dict[str, Any]]]) -> None:
    assert [one["done"] for one in job("events")] == [1, 2]


def test_a_killed_job_is_transient_and_names_its_log(job: Callable[..., list[dict[str, Any]]], tmp_path: Path) -> None:
    with pytest.raises(TransientError) as caught:
        job("killed")
    log = tmp_path / "jobs" / "000-session.log"
    assert str(caught.value) == f"the session job ended with code -9: the last words (log: {log})"
    assert log.read_text() == "the last words\n"


def test_a_job_killed_in_the_middle_of_an_event_is_transient(job: Callable[..., list[dict[str, Any]]]) -> None:
    heard: list[Any] = []
    with pytest.raises(TransientError, match="it printed nothing"):
        job("unfinished", heard.append)
    assert heard == [{"event": "progress", "done": 1}]


def test_what_a_dead_job_leaves_behind_ends_too(
    job: Callable[..., list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forked child holds the events open and ignores SIGTERM: the launcher neither waits for it nor leaves it."""
    monkeypatch.setattr(launch, "GRACE_SECONDS", 0.5)
    heard: list[Any] = []
    with pytest.raises(TransientError, match="ended with code -9"):
        job("orphans", heard.append)
    assert gone(heard[0]["pid"], 1)


def test_an_interrupt_ends_the_whole_group(job: Callable[..., list[dict[str, Any]]]) -> None:
    heard: list[Any] = []

    def interrupt(event: Any) -> None:
        heard.append(event)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        job("engine", interrupt)
    assert gone(heard[0]["pid"], 1)


def test_a_signal_while_the_job_runs_ends_it(job: Callable[..., list[dict[str, Any]]]) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    heard: list[Any] = []

    def later(event: Any) -> None:
        heard.append(event)
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()

    try:
        with pytest.raises(KeyboardInterrupt):
            job("engine", later)
    finally:
        signal.signal(signal.SIGINT, before)
    assert gone(heard[0]["pid"], 1)


def test_a_job_dies_with_its_parent(tmp_path: Path) -> None:
    """SIGKILL of the parent leaves it no time to end its jobs; job and grandchild go all the same, at once."""
    asked = spec(tmp_path, "session", interpreters=standing_in(tmp_path, "engine"))
    (tmp_path / "spec.json").write_text(asked.to_json())
    parent = f"""
import json, sys
from pathlib import Path
from tasks.jobs.entry import JobSpec
from tasks.jobs.launch import ProcessLauncher
spec = JobSpec(**json.loads(Path({str(tmp_path / "spec.json")!r}).read_text()))
launcher = ProcessLauncher(Path({str(tmp_path)!r}))
launcher.run(spec, lambda event: print(event["pid"], flush=True))
"""
    with subprocess.Popen([sys.executable, "-c", parent], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        grandchild = int(process.stdout.readline())
        job = psutil.Process(grandchild).ppid()
        assert psutil.Process(job).ppid() == process.pid
        process.kill()
    assert gone(job, 5)
    assert gone(grandchild, 5)


def test_a_job_whose_parent_died_before_it_was_up_ends(tmp_path: Path) -> None:
    events_end, events = os.pipe()
    lifeline, parents_end = os.pipe()
    os.close(parents_end)
    done = subprocess.run(
        [interpreter(tmp_path, "engine"), str(events), str(lifeline)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        pass_fds=(events, lifeline),
        start_new_session=True,
        timeout=60,
        check=False,
    )
    os.close(events_end)
    os.close(events)
    os.close(lifeline)
    assert done.returncode == -signal.SIGKILL


def test_no_library_of_a_job_phones_home(
    job: Callable[..., list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in QUIET:
        monkeypatch.delenv(name, raising=False)
    (told,) = job("environment")
    assert told["environment"].items() >= QUIET.items()
    assert {"VLLM_NO_USAGE_STATS", "DO_NOT_TRACK", "HF_HUB_DISABLE_TELEMETRY", "PREFECT_SERVER_ANALYTICS_ENABLED"} <= {
        *QUIET
    }


def test_the_user_may_turn_telemetry_on(
    job: Callable[..., list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "0")
    assert job("environment")[0]["environment"]["VLLM_NO_USAGE_STATS"] == "0"


def test_a_job_finds_no_descriptor_but_its_own(job: Callable[..., list[dict[str, Any]]]) -> None:
    SCRIPTS["descriptors"] = 'tell({"event": "progress", "open": len(os.listdir("/dev/fd")) - 1})'
    assert job("descriptors")[0]["open"] == 5  # the three standard ones, events, lifeline


def test_a_second_job_gets_files_of_its_own(tmp_path: Path) -> None:
    launcher = ProcessLauncher(tmp_path)
    asked = spec(tmp_path, "session", interpreters=standing_in(tmp_path, "events"))
    launcher.run(asked, lambda event: None)
    launcher.run(replace(asked, kind="train"), lambda event: None)
    names = ["000-session.json", "000-session.log", "001-train.json", "001-train.log"]
    assert sorted(path.name for path in (tmp_path / "jobs").iterdir()) == names


def test_the_job_of_a_run_that_was_taken_over_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A holder that stood still and comes back appends nothing for hours: its beat finds out and ends the group."""
    monkeypatch.setattr(lease, "PACE", lease.Pace(beat_s=0.1, timeout_s=2.0))
    described = small.config(tmp_path, interpreters=standing_in(tmp_path, "engine"))
    store = open_store(described.store)
    run_id = create_run(store, described)
    launcher = ProcessLauncher(tmp_path / "work")
    started: list[int] = []

    def heard(event: Any) -> None:
        if event["event"] == "progress":
            started.append(event["pid"])
            store.run_log(run_id).open()  # as one who saw it stand still

    with open_run(store, run_id, lambda work: launcher, kind=Run, listen=heard) as run:
        with pytest.raises(FencedError, match=f"run {run_id} was taken over by process {os.getpid()} on"):
            run.base()
        assert gone(started[0], 30)
        with pytest.raises(FencedError):  # and it starts no other
            run.base()
    assert len(started) == 1
    assert [one["epoch"] for one in store.run_log(run_id).records()] == [1, 2]
