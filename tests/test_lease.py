"""Hold a run, die, stand still, come back: one holder at a time, and no wall clock that matters (trap 31)."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from auditor import audit
from orchestrators import QUICK, Orchestrator

from storage import layout, lease
from storage.errors import HeldError
from storage.hold import take_run, wait_until_free
from storage.holder import is_gone, this_process
from storage.lease import Lease, Life, Watch
from storage.local import LocalBackend
from storage.store import Store, open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from conftest import Raw

Start = Any  # Callable[..., Orchestrator]
HOUR = 3600.0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "PACE", QUICK)


@pytest.fixture
def store(store_url: str, tmp_path: Path) -> Store:
    return open_store(store_url, cache=tmp_path / "cache")


@pytest.fixture
def start(store: Store, tmp_path: Path) -> Iterator[Start]:
    """Start orchestrators of the run `r`; all are killed at the end."""
    made: list[Orchestrator] = []

    def begin(**options: Any) -> Orchestrator:
        made.append(Orchestrator(store.url, "r", tmp_path / "cache", **options))
        return made[-1]

    yield begin
    for one in made:
        one.kill()


def refused(store: Store) -> str:
    with pytest.raises(HeldError) as told:
        wait_until_free(store, "r", tell=lambda message: None)
    return str(told.value)


def follow(store: Store) -> tuple[int | None, list[str], float]:
    """Take the run over; give the epoch, what was told meanwhile, and the seconds it took."""
    told: list[str] = []
    started = time.monotonic()
    log = take_run(store, "r", tell=told.append)
    return log.epoch, told, time.monotonic() - started


@pytest.mark.parametrize("skew", [-HOUR, 0.0, HOUR])
def test_a_live_run_is_refused_and_its_holder_named(store: Store, start: Start, skew: float) -> None:
    holder = start(skew=skew)
    assert holder.ask("take") == {"epoch": 1, "told": []}
    told = refused(store)
    since = store.run_log("r").records()[0]["time"]
    assert told.startswith(
        f"run r in {store.url} is held by process {holder.pid} on {this_process().host} since {since}"
    )
    assert "\n" not in told
    assert "starwheel resume r" in told
    assert holder.ask("append", "k") == {}
    assert [one["epoch"] for one in store.run_log("r").records()] == [1, 1]


def test_a_killed_process_of_this_machine_is_not_waited_for(store: Store, start: Start) -> None:
    holder = start()
    holder.ask("take")
    holder.kill()
    epoch, told, _ = follow(store)
    assert (epoch, told) == (2, [])


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENOENT, errno.EACCES])
def test_a_live_process_that_cannot_be_looked_at_is_not_gone(
    start: Start, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """No descriptor is left, or `/proc` hides the processes of others."""
    process = start()
    holder = replace(this_process(), pid=process.pid, started=_started(process.pid))
    read = Path.read_text

    def refuse(path: Path, *options: Any, **more: Any) -> str:
        if str(path) == f"/proc/{process.pid}/stat":
            raise OSError(error, os.strerror(error))
        return read(path, *options, **more)

    monkeypatch.setattr(Path, "read_text", refuse)
    assert not is_gone(holder)
    process.kill()
    assert is_gone(holder)


def test_a_process_whose_id_another_has_now_is_gone(start: Start) -> None:
    process = start()
    holder = replace(this_process(), pid=process.pid, started=_started(process.pid))
    assert not is_gone(holder)
    assert is_gone(replace(holder, started="1"))


def _started(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


@pytest.mark.parametrize("skew", [-HOUR, 0.0, HOUR])
def test_a_holder_elsewhere_is_followed_when_its_beat_stood_still(
    store: Store, start: Start, raw: Raw, skew: float
) -> None:
    """Of another machine's process nothing is known but its beat; its clock, an hour off, changes nothing."""
    holder = start(elsewhere=True, skew=skew)
    holder.ask("take")
    refused(store)
    holder.kill()
    epoch, told, seconds = follow(store)
    assert epoch == 2
    assert seconds >= QUICK.timeout_s
    (sentence,) = told
    assert f"was last held by process {holder.pid} on" in sentence
    assert f"going on after {QUICK.timeout_s:g} s without one" in sentence
    assert audit(raw).log_records == 2


def test_a_stopped_holder_comes_back_and_stops_itself(store: Store, start: Start, raw: Raw) -> None:
    """What it committed stays valid by its content, also what it commits before it notices."""
    stale = start()
    stale.ask("take")
    first = stale.ask("commit", "one")
    stale.stop()
    fresh = start()
    answer = fresh.ask("take")
    assert answer["epoch"] == 2
    assert f"process {stale.pid} on" in answer["told"][0]
    assert fresh.ask("append", "one") == {}
    stale.go_on()
    second = stale.ask("commit", "two")
    fenced = stale.ask("append", "two")
    assert fenced["error"] == "FencedError"
    assert fenced["code"] == 3
    assert f"run r was taken over by process {fresh.pid} on" in fenced["message"]
    assert stale.ask("append", "two")["error"] == "FencedError"
    assert fresh.ask("append", "two") == {}
    assert [(one["kind"], one["epoch"]) for one in store.run_log("r").records()] == [
        ("opened", 1),
        ("opened", 2),
        ("step", 2),
        ("step", 2),
    ]
    for key, made in (("one", first), ("two", second)):
        manifest = store.manifest(key)
        assert manifest is not None
        assert manifest.nonce == made["nonce"]
        assert store.read(manifest.artifact("judgments")).num_rows == 3
    assert len(audit(raw).manifests) == 2


def test_a_holder_that_appends_nothing_notices_by_its_beat(store: Store, start: Start) -> None:
    """Else a long job would go on for hours before its next append."""
    stale = start()
    stale.ask("take")
    stale.stop()
    assert follow(store)[0] == 2
    stale.go_on()
    deadline = time.monotonic() + 60
    while not stale.ask("is_lost")["lost"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_of_three_who_follow_at_once_one_does(store: Store, start: Start, raw: Raw) -> None:
    dead = start()
    dead.ask("take")
    dead.kill()
    several = [start() for _ in range(3)]
    for one in several:
        one.tell("take")
    answers = [one.answer() for one in several]
    (winner,) = [one for one, answer in zip(several, answers, strict=True) if answer.get("epoch") == 2]
    others = [answer for answer in answers if "error" in answer]
    assert [one["error"] for one in others] == ["HeldError", "HeldError"]
    assert all(f"is held by process {winner.pid} on" in one["message"] for one in others)
    assert winner.ask("append", "k") == {}
    assert [one["epoch"] for one in store.run_log("r").records()] == [1, 2, 2]
    assert audit(raw).log_records == 3


def test_a_holder_that_let_go_is_not_waited_for(store: Store, start: Start) -> None:
    holder = start(elsewhere=True)
    holder.ask("take")
    holder.ask("release")
    assert follow(store)[:2] == (2, [])


def test_a_closed_run_is_held_by_nobody(store: Store) -> None:
    log = store.run_log("r")
    log.open()
    log.append("closed", outcome="done")
    assert follow(store)[:2] == (2, [])


@pytest.mark.parametrize("damage", ["deleted", "garbage", "torn", "from the future"])
def test_a_damaged_lease_endangers_nothing(store: Store, start: Start, raw: Raw, damage: str) -> None:
    """F4: the holder writes it again; while it does so it lives."""
    holder = start(elsewhere=True)
    holder.ask("take")
    key = layout.lease("r", 1)
    end = threading.Event()

    def harm() -> None:
        while not end.wait(0.02):
            data = raw.read(key) if damage in ("torn", "from the future") else b""
            if damage == "deleted":
                _delete(raw, key)
            elif damage == "garbage":
                raw.write(key, b"\x00\xff")
            elif damage == "torn":
                raw.write(key, data[: len(data) // 2])
            else:
                raw.write(key, json.dumps({"beat": 10**9, "released": True, "time": "2999-01-01"}).encode())

    thread = threading.Thread(target=harm)
    thread.start()
    try:
        watch = Watch(store.backend, layout.lease("r", 1), _somebody())
        seen = set()
        deadline = time.monotonic() + 60
        while Life.LIVES not in seen and time.monotonic() < deadline:
            seen.add(watch.look())
            time.sleep(0.005)
        assert Life.LIVES in seen
        assert Life.GONE not in seen
    finally:
        end.set()
        thread.join()
    assert holder.ask("append", "k") == {}


def _somebody() -> Any:
    from storage.holder import Holder

    return Holder("elsewhere", 1, "another boot", "1")


def _delete(raw: Raw, key: str) -> None:
    try:
        raw.delete(key)
    except FileNotFoundError:
        return


def test_an_observer_that_stood_still_itself_has_not_watched(store: Store) -> None:
    store.backend.put(layout.lease("r", 1), b"beat")
    watch = Watch(store.backend, layout.lease("r", 1), _somebody())
    assert watch.look() is Life.UNKNOWN
    time.sleep(QUICK.timeout_s + QUICK.beat_s)
    assert watch.look() is Life.UNKNOWN
    assert watch.silent_s <= QUICK.beat_s


def test_of_this_very_process_it_is_known_whether_it_holds(store: Store) -> None:
    log = store.run_log("r")
    epoch = log.open()
    mine = Watch(store.backend, layout.lease("r", epoch), this_process())
    assert mine.look() is Life.GONE
    held = Lease(store.backend, layout.lease("r", epoch))
    held.start()
    assert mine.look() is Life.LIVES
    refused(store)
    held.release()
    assert follow(store)[:2] == (2, [])


class Failing(LocalBackend):
    """A shared folder that loses its files for a while."""

    fails = 0

    def put(self, key: str, data: bytes) -> None:
        if self.fails:
            self.fails -= 1
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        super().put(key, data)


def test_a_holder_beats_on_after_an_error_of_the_disk(tmp_path: Path) -> None:
    backend = Failing(tmp_path / "store")
    held = Lease(backend, "lease")
    held.start()
    try:
        backend.fails = 3
        until(lambda: backend.fails == 0)
        before = backend.get("lease")
        until(lambda: backend.get("lease") != before)
    finally:
        held.release()


class Hanging(LocalBackend):
    """A store that holds a beat up until it is told to go on."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.patience: dict[str, float] = {}
        self.go_on, self.hangs = threading.Event(), threading.Event()
        self.go_on.set()

    def hasty(self, *, silence: float, deadline: float) -> LocalBackend:
        self.patience = {"silence": silence, "deadline": deadline}
        return self

    def put(self, key: str, data: bytes) -> None:
        if not json.loads(data)["released"] and not self.go_on.is_set():
            self.hangs.set()
            self.go_on.wait(60)
        super().put(key, data)


def test_a_beat_that_hangs_does_not_undo_the_last_word(tmp_path: Path) -> None:
    backend = Hanging(tmp_path / "store")
    held = Lease(backend, "lease")
    assert backend.patience["silence"] <= QUICK.beat_s
    assert backend.patience["deadline"] < QUICK.timeout_s / 2
    held.start()
    backend.go_on.clear()
    assert backend.hangs.wait(30)
    held.release()
    backend.go_on.set()
    assert held._thread is not None
    held._thread.join(30)
    assert json.loads(backend.get("lease"))["released"] is True


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)
