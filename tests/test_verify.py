"""Lose or damage what a run names: found, refused by who reads it, and made again together with what follows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import pytest
import small
from click.testing import CliRunner
from finished import finish

from flows.arguments import find_run
from flows.cli import cli, main
from flows.iteration import star
from flows.printed import print_follows
from storage import layout, record
from storage.errors import StoreError, TransientError
from storage.store import open_store
from tasks.earlier import readable
from tasks.history import read_history
from tasks.keep import remove
from tasks.run import Run, open_run
from tasks.verify import not_counting, verify

if TYPE_CHECKING:
    from collections.abc import Callable

    from storage.manifest import Manifest
    from tasks.history import Used

pytestmark = pytest.mark.usefixtures("no_fsync")


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a folder with the store of a finished run."""
    folder = tmp_path_factory.mktemp("first")
    done = finish(folder, iterations=1, evaluate={"base": False})
    done.run.close("done")
    return folder


class Copy:
    """A copy of that store, whose objects may be harmed."""

    def __init__(self, first: Path, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(first / "store", folder / "store", ignore=shutil.ignore_patterns(".cache"))
        self.store = open_store(str(folder / "store"), cache=folder / "cache")
        (self.run_id,) = self.store.runs()

    @property
    def url(self) -> str:
        return self.store.url

    def used(self, step: str, iteration: int) -> Used:
        return next(read_history(self.store, self.run_id).of(step, iteration))

    def manifest(self, step: str, iteration: int) -> Manifest:
        found = self.store.manifest(self.used(step, iteration).key)
        assert found is not None
        return found

    def verify(self, *options: str) -> tuple[int, dict[str, Any]]:
        done = CliRunner().invoke(cli, ["verify", "last", "--store", self.url, "--json", *options])
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        return done.exit_code, json.loads(done.stdout)

    def resume(self) -> list[tuple[int, str, bool]]:
        """Go on in this process; give what was used, and whether it was reused."""
        told: list[tuple[int, str, bool]] = []

        def heard(event: Any) -> None:
            if event["event"] == "step":
                told.append((event["iteration"], event["step"], event["reused"]))

        run = open_run(self.store, self.run_id, lambda _: small.InlineLauncher(), kind=Run, listen=heard)
        star(run)
        run.close("done")
        return told


@pytest.fixture
def copy(first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Copy:
    monkeypatch.setattr(record, "READ_PAUSE_S", 0)
    monkeypatch.setattr("storage.cache.FETCH_PAUSE_S", 0)
    return Copy(first, tmp_path)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def swap(path: Path) -> None:
    """Put other whole bytes of the same length there."""
    path.write_bytes(bytes(reversed(path.read_bytes())))


HARM: dict[str, Callable[[Path], None]] = {"flipped": flip, "cut": cut, "swapped": swap, "missing": Path.unlink}


def sample_file(copy: Copy) -> str:
    return copy.manifest("sample", 1).artifact("completions").files[0].path


OBJECTS: dict[str, Callable[[Copy], str]] = {
    "rows": sample_file,
    "weights": lambda copy: next(
        str(path.relative_to(copy.url))
        for path in Path(copy.url, "checkpoints", copy.manifest("train", 1).facts["model"]["adapter"]).iterdir()
        if path.suffix == ".safetensors"
    ),
    "index": lambda copy: f"checkpoints/{copy.manifest('train', 1).facts['model']['adapter']}/index.json",
    "manifest": lambda copy: f"steps/{copy.used('sample', 1).key}/0/manifest.json",
    "log": lambda copy: f"runs/{copy.run_id}/log/00000003.json",
}


def test_a_whole_run_has_no_fault(copy: Copy) -> None:
    code, found = copy.verify("--deep")
    assert (code, found["faults"]) == (0, [])
    history = read_history(copy.store, copy.run_id)
    assert found["steps"] == len(history.used) > 20
    stored = [path for path in Path(copy.url).rglob("*") if path.suffix in (".parquet", ".safetensors")]
    assert found["objects"] >= len(stored) > 20
    assert found["bytes"] >= sum(path.stat().st_size for path in stored)


@pytest.mark.parametrize("harm", HARM)
@pytest.mark.parametrize("kind", OBJECTS)
def test_each_fault_is_named_with_its_address(copy: Copy, kind: str, harm: str) -> None:
    key = OBJECTS[kind](copy)
    HARM[harm](Path(copy.url, key))
    code, found = copy.verify("--deep")
    (fault,) = found["faults"]
    assert code == 1
    assert f"{copy.url}/{key}" in fault["what"]
    assert "\n" not in fault["what"]
    if kind != "log":
        owner = "train 1" if kind in ("weights", "index") else "sample 1"
        assert fault["step"] == owner
    payload_is_only_read_deeply = kind in ("rows", "weights") and harm in ("flipped", "swapped")
    assert copy.verify()[0] == (0 if payload_is_only_read_deeply else 1)


def test_a_fault_tells_what_was_made_from_it_and_how_to_mend_it(copy: Copy) -> None:
    flip(Path(copy.url, sample_file(copy)))
    key = copy.used("sample", 1).key
    done = CliRunner().invoke(cli, ["verify", "last", "--store", copy.url, "--deep"])
    assert done.exit_code == 1
    lines = done.stdout.splitlines()
    assert lines[0].endswith(": 1 fault")
    assert lines[1].startswith(f"sample 1 {key[:12]}: {copy.url}/{sample_file(copy)} holds ")
    assert lines[2].strip().startswith("made from it: select 1, pairs 1, train 1, parity 1, evaluate 1 ")
    assert lines[3:] == [f"mend: starwheel void {key[:12]} --reason lost", f"then: starwheel resume {copy.run_id}"]


@pytest.mark.parametrize("harm", HARM)
@pytest.mark.parametrize("kind", ["rows", "weights", "index"])
def test_every_reader_refuses_it_in_one_sentence(copy: Copy, kind: str, harm: str) -> None:
    key = OBJECTS[kind](copy)
    HARM[harm](Path(copy.url, key))
    model = copy.manifest("train", 1).facts["model"]["adapter"]
    artifact = copy.manifest("sample", 1).artifact("completions")
    readers: list[Callable[[], Any]] = [lambda: copy.store.fetch_checkpoint(model)]
    if kind == "rows":
        readers = [
            lambda: copy.store.read(artifact),
            lambda: copy.store.read(artifact, columns=["n_tokens"]),
            lambda: copy.store.fetch(artifact),
        ]
    for reader in readers:
        with pytest.raises(StoreError) as refused:
            reader()
        told = str(refused.value)
        assert f"{copy.url}/{key}" in told
        assert "starwheel void" in told
        assert "\n" not in told


@pytest.mark.parametrize("step", ["sample", "select", "train"])
def test_a_void_step_is_made_again_and_what_follows_only_where_it_differs(
    copy: Copy, step: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The scripted engine and trainer repeat themselves, so nothing behind the step differs."""
    used = copy.used(step, 1)
    before = copy.manifest(step, 1)
    copy.store.void(used.key, "lost", "a test")
    code, found = copy.verify()
    assert (code, len(found["faults"])) == (1, 1)
    assert f"{copy.url}/steps/{used.key}/0/void.json says" in found["faults"][0]["what"]
    history = read_history(copy.store, copy.run_id)
    assert not_counting(copy.store, history) == [used]
    print_follows(copy.store, history, [used])
    told = capsys.readouterr().err.splitlines()
    assert told[0] == f"void or lost: {step} 1 {used.key[:12]}"
    assert told[1].startswith(f"to do again: {step} 1")
    if step == "train":
        assert "; then, where its result differs, parity 1, evaluate 1 " in told[1]

    steps = copy.resume()
    assert [one[:2] for one in steps if not one[2]] == [(1, step)]
    after = copy.manifest(step, 1)
    assert (before.attempt, after.attempt) == (0, 1)
    assert {name: one.digest for name, one in before.artifacts.items()} == {
        name: one.digest for name, one in after.artifacts.items()
    }
    assert verify(copy.store, copy.run_id, deep=True).faults == ()
    assert not_counting(copy.store, read_history(copy.store, copy.run_id)) == []


@pytest.mark.parametrize("harm", HARM)
@pytest.mark.parametrize("kind", ["weights", "index"])
def test_weights_that_are_made_again_mend_the_stored_ones(copy: Copy, kind: str, harm: str) -> None:
    """A checkpoint is named by its content: the step that makes it again puts the lost file back."""
    HARM[harm](Path(copy.url, OBJECTS[kind](copy)))
    copy.store.void(copy.used("train", 1).key, "lost", "a test")
    copy.resume()
    assert verify(copy.store, copy.run_id, deep=True).faults == ()


def test_a_step_whose_weights_are_gone_is_made_again(copy: Copy) -> None:
    """As where a collector took them between the log's record and the look, and the run ended there."""
    used, model = copy.used("train", 1), copy.manifest("train", 1).facts["model"]["adapter"]
    (copy.folder / "store" / layout.checkpoint_index(model)).unlink()
    with pytest.raises(TransientError, match=f"attempt 0 of step train .{used.key[:12]}. was voided or collected"):
        copy.resume()
    assert (1, "train", False) in copy.resume()
    assert verify(copy.store, copy.run_id, deep=True).faults == ()


def called(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code: Any = 0
    try:
        main(lambda **settings: cli(arguments, **settings))
    except SystemExit as left:
        code = left.code
    told = capsys.readouterr()
    return code, told.out, told.err


def test_void_refuses_what_is_void_already(copy: Copy, capsys: pytest.CaptureFixture[str]) -> None:
    key = copy.used("select", 1).key[:12]
    void = ("void", key, "--reason", "lost", "--store", copy.url)
    assert called(capsys, *void)[:2] == (0, f"attempt 0 of {key} is void; runs that need the step compute it again\n")
    code, _, told = called(capsys, *void)
    assert code == 2
    assert f"step {key} is void already" in told


def test_pin_rm_and_gc_by_their_commands(copy: Copy, capsys: pytest.CaptureFixture[str]) -> None:
    store = ("--store", copy.url)
    model = copy.manifest("train", 1).facts["model"]["adapter"]
    code, out, _ = called(capsys, "pin", "last@1", "judge", *store)
    assert (code, out) == (0, f"judge is checkpoint 1 of {copy.run_id} ({model[:12]})\n")
    for wrong, sentence in (
        (("pin", "last@7", "judge"), "has no checkpoint 7; it has 0, 1"),
        (("pin", "last@x", "judge"), "write RUN@N"),
        (("pin", "last", "../judge"), "can't be a name in the store"),
        (
            ("pin", "last@0", "judge"),
            f"judge is checkpoint 1 of {copy.run_id} ({model[:12]}) already; `starwheel unpin",
        ),
        (("unpin", "nobody"), "nothing is pinned under nobody; pinned: judge"),
        (("gc", "--grace", "-1"), "--grace -1.0: give a number of days"),
        (("verify", "nothing"), "no run is named nothing"),
        (("rm", "nothing", "--yes"), "no run is named nothing"),
    ):
        code, out, told = called(capsys, *wrong, *store)
        assert (code, out) == (2, "")
        assert sentence in told
    code, out, _ = called(capsys, "gc", *store)
    assert (code, out) == (0, "nothing to collect: runs and pins use all that is there\n")

    asked = CliRunner().invoke(cli, ["rm", "last", *store], input="n\n")
    assert asked.exit_code == 1
    assert f"Remove {copy.run_id} (done, " in asked.stderr
    assert read_history(copy.store, copy.run_id).state == "done"
    code, out, _ = called(capsys, "rm", "last", "--yes", "--keep", "best", *store)
    assert code == 0
    assert out.splitlines()[0].startswith(f"{copy.run_id}-best is checkpoint ")
    assert out.splitlines()[1] == f"{copy.run_id} is removed; `starwheel gc --yes` deletes what nothing else uses"
    assert read_history(copy.store, copy.run_id).state == "removed"
    assert "no run is named last" in called(capsys, "resume", "last", *store)[2]
    code, _, told = called(capsys, "resume", copy.run_id, *store)
    assert code == 2
    assert "was removed; start a new run" in told
    code, out, told = called(capsys, "rm", copy.run_id, "--yes", "--keep", "last", *store)
    assert (code, out) == (2, "")
    assert "was removed already" in told

    dry = json.loads(called(capsys, "gc", "--json", *store)[1])
    assert {one["state"] for one in dry} == {"waiting"}
    assert called(capsys, "gc", *store)[1].rstrip().endswith("this was a dry run, nothing was written or deleted")
    called(capsys, "gc", "--yes", *store)
    assert "0 deleted" in called(capsys, "gc", "--yes", *store)[1]
    done = json.loads(called(capsys, "gc", "--yes", "--grace", "0", "--json", *store)[1])
    assert {one["state"] for one in done} == {"deleted"}
    assert copy.store.runs() == []
    assert copy.store.fetch_checkpoint(model).is_dir()
    called(capsys, "unpin", "judge", *store)
    left = json.loads(called(capsys, "gc", "--json", *store)[1])
    best = copy.store.backend.folders("refs/")
    assert set(best) == {"judge", f"{copy.run_id}-best"}
    assert len(left) <= 2


def test_a_run_with_a_damaged_log_can_be_removed(copy: Copy, capsys: pytest.CaptureFixture[str]) -> None:
    """It stops the collector until then; afterwards nothing takes it for the last run, or to compare with."""
    store = ("--store", copy.url)
    other = copy.store.create_run("other", {}, code_version="test")
    flip(copy.folder / "store" / layout.log(copy.run_id, 1))
    code, _, told = called(capsys, "gc", "--yes", *store)
    assert code == 2
    assert f"gc deletes nothing before, or until `starwheel rm {copy.run_id}`" in told
    assert called(capsys, "rm", copy.run_id, "--yes", *store)[0] == 0
    for _ in range(2):
        code, _, _ = called(capsys, "gc", "--yes", "--grace", "0", *store)
        assert code == 0
    assert copy.store.runs() == [other]


def test_a_removed_run_is_not_the_last_one_and_nothing_is_compared_with_it(copy: Copy) -> None:
    other = copy.store.create_run("zzz", {}, code_version="test")
    assert readable(copy.store, [copy.run_id])[0].run_id == copy.run_id
    remove(copy.store, copy.run_id, tell=lambda _: None)
    assert readable(copy.store, [copy.run_id]) == []
    assert find_run(copy.store, "last") == other
    remove(copy.store, other, tell=lambda _: None)
    with pytest.raises(click.UsageError, match="no run is named last"):
        find_run(copy.store, "last")


def test_a_run_that_is_held_is_neither_resumed_nor_removed(
    first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Copy(first, tmp_path)
    run = open_run(copy.store, copy.run_id, lambda _: small.InlineLauncher(), kind=Run, listen=lambda event: None)
    with run:
        for command in (("resume", "last"), ("rm", "last", "--yes")):
            code, out, told = called(capsys, *command, "--store", copy.url)
            assert (code, out) == (2, "")
            assert "is held by process" in told
            assert "which is alive" in told
    assert called(capsys, "rm", "last", "--yes", "--store", copy.url)[0] == 0
