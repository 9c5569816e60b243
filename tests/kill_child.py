"""Fork small runs from a clean process: a child of pytest itself would inherit dead threads of polars and Arrow.

Started by `test_kill_loop.py`; reads one JSON task a line, answers with the exit code of the child that did it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import re
import shutil
import sys
import traceback
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import small

import storage.store
import tasks.jobs.session
from configs.run import RunConfig
from flows.iteration import star
from storage import failpoint, lease
from storage.store import Store, open_store
from tasks.jobs.launch import InlineLauncher
from tasks.run import Run, open_run

if TYPE_CHECKING:
    from collections.abc import Callable

    from tasks.jobs.entry import JobSpec
    from tasks.step import Event

KILLED, FAILED = 42, 1
SMALL: dict[str, Any] = {
    "iterations": 1,
    "data": {"sources": [{"name": "made", "generator": {"categories": ["capitals"], "count": 30}}], "suites": []},
    "split": {"dev": 0.1, "test": 0.1, "bootstrap": 2},
    "sample": {"n": 2, "shard_pairs": 8},
    "evaluate": {"votes": 1, "dev_votes": 1, "base": False},
    "pairs": {"data": "cumulative"},
    "rationalize": {"failures": True},
}


class InlinePool:
    """Commit shards at once, so that the points of a run come in one order."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def submit(self, work: Callable[..., Any], *given: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(work(*given))
        return done

    def shutdown(self, **_: Any) -> None:
        pass


class Recorder(InlineLauncher):
    """Copy the folder of a run before each job and the claims that were just taken for it, with the points passed."""

    def __init__(self, points: list[str], into: Path) -> None:
        self.points, self.into = points, into
        self.cuts: list[int] = []

    def run(self, spec: JobSpec, emit: Callable[[Event], None]) -> None:
        self.cut()
        super().run(spec, emit)

    def cut(self) -> None:
        copy, passed = self.into / str(len(self.cuts)), len(self.points)
        clone(Path(), copy)
        while passed and re.match(r"put_new steps/\w+/claim\.json ", self.points[passed - 1]):
            passed -= 1
        for claim in copy.rglob("claim.json"):
            claim.unlink()
        self.cuts.append(passed)


def clone(source: Path, target: Path) -> None:
    """Copy a tree by hard links: nothing in it is ever changed in place."""
    shutil.copytree(source, target, copy_function=os.link, dirs_exist_ok=True)


def described(base: Path) -> RunConfig:
    """Describe the run, in folders relative to the working directory; the first caller writes the base model."""
    frozen = base / "config.json"
    if not frozen.exists():
        made = small.config(base, **SMALL).model_copy(update={"store": "store", "work": "work"})
        frozen.write_text(made.model_dump_json())
    return RunConfig.model_validate_json(frozen.read_text())


def frozen_run(store: Store, base: Path) -> str:
    """Make the run with its folders left relative, so that a copy of them is a run of its own."""
    config = described(base)
    return store.create_run(config.name, config.model_dump(mode="json"), code_version="test")


def golden(base: Path, into: Path) -> dict[str, Any]:
    """Run undisturbed; give all points and where the folder was copied."""
    points: list[str] = []
    recorder = Recorder(points, into)
    recorder.cut()
    failpoint.install(points.append)
    store = open_store("store")
    run = open_run(store, frozen_run(store, base), lambda work: recorder, kind=Run, listen=lambda event: None)
    judge = star(run)
    run.close("done")
    failpoint.install(None)
    recorder.cut()
    return {"points": points, "cuts": recorder.cuts, "judge": judge.model.digest, "modules": list(sys.modules)}


def killed(base: Path, point: int) -> dict[str, Any]:
    """Go on with the run until the given point, counted from 0, and die there without any clean-up."""
    left = point

    def hook(name: str) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            Path("died-at").write_text(name)
            os._exit(KILLED)

    if not Path("store").exists():  # it dies while it is made
        failpoint.install(hook)
        run = resumed(base)
    else:
        run = resumed(base)
        failpoint.install(hook)
    star(run)
    run.close("done")
    return {}


def finished(base: Path) -> dict[str, Any]:
    """Resume to the end; give the judge and the points passed."""
    points: list[str] = []
    failpoint.install(points.append)
    run = resumed(base)
    judge = star(run)
    run.close("done")
    return {"points": points, "judge": judge.model.digest}


def resumed(base: Path) -> Run:
    """Open the run that is there; make one where the kill came before it was."""
    store = open_store("store")
    known = store.runs()
    run_id = known[0] if known and store.backend.size(f"runs/{known[0]}/run.json") else ""
    return small.start(described(base), run_id=run_id)[1]


def do(task: dict[str, Any]) -> None:
    """Do one task in this process and write what it gives to `result.json`."""
    os.chdir(task["folder"])
    os.fsync = lambda fd: None  # it guards against power cuts, which no test here makes
    storage.store.LOCAL_RACES.update(rounds=1, threads=1)
    lease.PACE = lease.Pace(beat_s=3600.0)  # a beat would be a point that comes or not
    if not task.get("threads"):
        tasks.jobs.session.ThreadPoolExecutor = InlinePool  # type: ignore[assignment,attr-defined]
    base = Path(task["base"])
    if task["do"] == "golden":
        result = golden(base, Path(task["into"]))
    elif task["do"] == "kill":
        result = killed(base, task["point"])
    else:
        result = finished(base)
    Path("result.json").write_text(json.dumps(result))


def serve() -> None:
    """Fork a child for each task."""
    for line in sys.stdin:
        task = json.loads(line)
        print(0 if task["do"] == "load" else fork(task), flush=True)
        if task["do"] in {"load", "golden"}:
            load_what_was_needed(Path(task["folder"]))


def fork(task: dict[str, Any]) -> int:
    """Do a task in a child; give its exit code."""
    child = os.fork()
    if child == 0:
        code = FAILED
        try:
            do(task)
            code = 0
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def load_what_was_needed(golden: Path) -> None:
    """Import what the undisturbed run imported, so that no later child has to."""
    for name in json.loads((golden / "result.json").read_text())["modules"]:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()


if __name__ == "__main__":
    serve()
