"""Kill a whole run at every store operation, resume it, and find the same work as undisturbed (trap 1).

A child is forked for each point. It starts from a copy of the undisturbed run as it was before the job that passes the
point (the golden prefix) and dies in the point by `os._exit`. Before it is resumed, what later jobs would commit is
laid beside (their steps have the same keys or are not found), so that the matrix doesn't compute each run to its end;
at some points nothing is laid beside and the whole rest is computed.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from auditor import audit
from conftest import Raw
from kill_child import KILLED, clone

from storage.store import open_store
from tasks.history import read_history

if TYPE_CHECKING:
    from collections.abc import Iterator

    from storage.manifest import Manifest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
WHOLE = 20  # at every so manieth point the rest of the run is computed, not laid beside
STEPS = {"base", "split", "bootstrap", "train", "parity", "evaluate", "score", "gate", "sample", "rationalize"}
STEPS |= {"select", "pairs"}


class Children:
    """Ask the clean process for children; one does a task and is gone."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self._process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / "kill_child.py")],
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "POLARS_MAX_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def do(self, what: str, folder: Path, **more: Any) -> int:
        """Have a task done in a folder; give the exit code."""
        task = {"do": what, "folder": str(folder), "base": str(self._base), **more}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


@dataclass(frozen=True)
class Golden:
    """Hold the undisturbed run: its points, and copies of its folder before each job and at its end."""

    points: list[str]
    cuts: list[int]  # points passed at each copy
    copies: Path
    judge: str
    manifests: dict[str, Manifest]
    used: list[tuple[int, str, str, str]]

    def segment(self, point: int) -> int:
        """Name the last copy before a point."""
        return max(number for number, passed in enumerate(self.cuts) if passed <= point)

    def copy(self, number: int) -> Path:
        return self.copies / str(number)


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Give a folder in memory where there is one: each point costs some thousand links."""
    memory = Path("/dev/shm")
    if os.access(memory, os.W_OK):
        folder = memory / f"starwheel-test-{os.getpid()}"
        folder.mkdir()
    else:
        folder = tmp_path_factory.mktemp("kills")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def children(room: Path) -> Iterator[list[Children]]:
    """Start one clean process a CPU, two at most."""
    made = [Children(room / "base") for _ in range(min(2, os.cpu_count() or 1))]
    yield made
    for one in made:
        one.close()


@pytest.fixture(scope="module")
def golden(room: Path, children: list[Children]) -> Golden:
    folder = room / "golden"
    folder.mkdir()
    assert children[0].do("golden", folder, into=str(room / "copies")) == 0
    for other in children[1:]:
        other.do("load", folder)
    told = json.loads((folder / "result.json").read_text())
    manifests = committed(folder)
    assert {one.step for one in manifests.values()} == STEPS
    return Golden(told["points"], told["cuts"], room / "copies", told["judge"], manifests, used(folder))


def committed(folder: Path) -> dict[str, Manifest]:
    """Give the manifest of each step by key; no step may have a second attempt."""
    store = open_store(str(folder / "store"), cache=folder / "reading", create=False)
    found = {}
    for step in (folder / "store" / "steps").iterdir():
        attempts = sorted(path.name for path in step.iterdir() if path.name != "claim.json")
        manifest = store.manifest(step.name)
        if manifest is not None:
            assert attempts == ["0"]
            found[step.name] = manifest
    return found


def used(folder: Path) -> list[tuple[int, str, str, str]]:
    """Give the steps in the run's log; the reader checks that it is gapless and chained."""
    store = open_store(str(folder / "store"), cache=folder / "reading", create=False)
    (run_id,) = store.runs()
    history = read_history(store, run_id)
    assert len(history.used) == sum(one["kind"] == "step" for one in history.records), "a step was logged twice"
    assert history.state == "done"
    return sorted((one.iteration, one.step, one.label, one.key) for one in history.used)


def same(point: str) -> str:
    """Take out of a point's name what differs from run to run: run id, place in the log, the probe's folder."""
    return re.sub(r"small-\d{8}t\d{6}-[0-9a-f]{4}|\d{8}\.json|(?<=probe/)[0-9a-f]+|(?<= )\d+(?= appended)", "…", point)


def kill(children: Children, golden: Golden, folder: Path, *, point: int, threads: bool = False) -> str:
    """Restore the golden prefix, go on and die at the point; give the name of the point it died at."""
    segment = golden.segment(point)
    clone(golden.copy(segment), folder)
    left = point - golden.cuts[segment]
    assert children.do("kill", folder, point=left, threads=threads) == KILLED, golden.points[point]
    return (folder / "died-at").read_text()


def lay_beside(golden: Golden, folder: Path, segment: int) -> None:
    """Put what the jobs after this segment committed into the store."""
    done, end = golden.copy(segment + 1), golden.copy(len(golden.cuts) - 1)
    for kind in ("steps", "checkpoints"):
        for path in (end / "store" / kind).iterdir():
            if not (done / "store" / kind / path.name).exists():
                clone(path, folder / "store" / kind / path.name)


def records(folder: Path) -> dict[str, bytes]:
    """Read every record that is committed; a claim is none."""
    store = folder / "store"
    return {
        str(path.relative_to(store)): path.read_bytes()
        for kind in ("steps", "runs", "checkpoints")
        for path in (store / kind).rglob("*.json")
        if path.name != "claim.json"
    }


def check_resumed(children: Children, golden: Golden, folder: Path, *, threads: bool = False) -> None:
    """Resume; the same rows as undisturbed, nothing twice, what was committed neither changed nor done again."""
    before = records(folder)
    assert children.do("finish", folder, threads=threads) == 0
    told = json.loads((folder / "result.json").read_text())
    assert told["judge"] == golden.judge

    after = committed(folder)
    assert set(after) == set(golden.manifests)
    for key, manifest in after.items():
        expected = golden.manifests[key].artifacts
        assert {name: (one.digest, one.rows) for name, one in manifest.artifacts.items()} == {
            name: (one.digest, one.rows) for name, one in expected.items()
        }
        assert manifest.counts == golden.manifests[key].counts
        assert manifest.facts.get("model") == golden.manifests[key].facts.get("model")

    now = records(folder)
    assert {name: now[name] for name in before} == before
    for name in told["points"]:
        words = name.split()
        if words[0] == "commit":
            assert f"steps/{words[1]}/0/manifest.json" not in before, f"{words[1]} was computed again"
        if words[0] == "commit_shard":
            shard = f"steps/{words[1]}/0/shards/{int(words[2]):05d}.json"
            assert shard not in before, f"{shard} was computed again"
    assert used(folder) == golden.used


def die_and_resume(children: Children, golden: Golden, folder: Path, point: int) -> str:
    """Kill at a point, resume and check; give the name of the point it died at."""
    died_at = kill(children, golden, folder, point=point)
    whole = point % WHOLE == 0
    if not whole:
        lay_beside(golden, folder, golden.segment(point))
    check_resumed(children, golden, folder)
    if whole:
        manifests = audit(Raw(folder / "store")).manifests
        assert set(manifests) == {f"steps/{key}/0/manifest.json" for key in golden.manifests}
    shutil.rmtree(folder)
    return died_at


def test_kill_at_every_store_operation_of_a_run(children: list[Children], golden: Golden, room: Path) -> None:
    def share(number: int) -> list[tuple[int, str]]:
        points = range(number, len(golden.points), len(children))
        return [(one, die_and_resume(children[number], golden, room / f"killed-{number}", one)) for one in points]

    with ThreadPoolExecutor(len(children)) as pool:
        fired = dict(itertools.chain.from_iterable(pool.map(share, range(len(children)))))
    assert sorted(fired) == list(range(len(golden.points)))
    assert [same(fired[point]) for point in sorted(fired)] == [same(name) for name in golden.points]
    assert len(fired) > 300
    kinds = {name.split()[0] for name in fired.values()}
    assert kinds >= {"put_new", "put_file", "write", "commit", "commit_shard", "checkpoint", "log"}


def test_kill_while_threads_commit_shards(children: list[Children], golden: Golden, room: Path) -> None:
    """With the threads of a real session the order of the points is not the same, but their number is."""
    folder = room / "threads"
    shards = [number for number, name in enumerate(golden.points) if "/shards/" in name]
    for point in shards[::2]:
        kill(children[0], golden, folder, point=point, threads=True)
        lay_beside(golden, folder, golden.segment(point))
        check_resumed(children[0], golden, folder, threads=True)
        shutil.rmtree(folder)


def test_no_kill_behind_the_last_point(children: list[Children], golden: Golden, room: Path) -> None:
    """The points are all there are: the next one never comes."""
    folder = room / "behind"
    segment = golden.segment(len(golden.points) - 1)
    clone(golden.copy(segment), folder)
    assert children[0].do("kill", folder, point=len(golden.points) - golden.cuts[segment]) == 0
    shutil.rmtree(folder)
