"""Try the log of a run: one chain, one holder, and a fence for those who were taken over."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from storage import layout, record
from storage.errors import CommitUnknownError, CorruptArtifactError, FencedError, StoreError
from storage.store import Store, open_store

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Raw


@pytest.fixture
def store(store_url: str, tmp_path: Path) -> Store:
    return open_store(store_url, cache=tmp_path / "cache")


def test_records_come_back_in_order(store: Store) -> None:
    log = store.run_log("r")
    assert log.open(reason="test") == 1
    log.append("step", name="split", key="k1", attempt=0, reused=False)
    log.append("closed")
    records = store.run_log("r").records()
    assert [entry["kind"] for entry in records] == ["opened", "step", "closed"]
    assert records[1]["key"] == "k1"
    assert [entry["seq"] for entry in records] == [0, 1, 2]
    assert records[0]["reason"] == "test"


def test_a_log_must_be_opened_to_be_written(store: Store) -> None:
    with pytest.raises(StoreError, match="not open for writing"):
        store.run_log("r").append("step")
    assert store.run_log("r").records() == []


def test_a_stale_holder_is_fenced_at_its_next_append(store: Store) -> None:
    """Trap 31: whoever continues a run takes the next epoch; the holder before it can't write any more."""
    stale = store.run_log("r")
    stale.open()
    stale.append("step", name="one")
    fresh = store.run_log("r")
    assert fresh.open() == 2
    with pytest.raises(FencedError, match="run r was taken over by process"):
        stale.append("step", name="two")
    fresh.append("step", name="two")
    with pytest.raises(FencedError):
        stale.append("step", name="three")
    assert [entry["epoch"] for entry in fresh.records()] == [1, 1, 2, 2]


def test_a_stale_holder_that_has_read_on_is_fenced_too(store: Store) -> None:
    """Its next place is behind the newer epoch, where nothing collides: a record there would break the chain."""
    stale = store.run_log("r")
    stale.open()
    fresh = store.run_log("r")
    fresh.open()
    fresh.append("step", name="one")
    assert stale.taken_over()
    assert len(stale.records()) == 3
    with pytest.raises(FencedError):
        stale.append("step", name="two")
    fresh.append("step", name="two")
    assert [entry["epoch"] for entry in store.run_log("r").records()] == [1, 2, 2, 2]


def test_racing_holders_leave_one_chain_and_one_holder(store: Store) -> None:
    start = threading.Barrier(5)

    def hold(number: int) -> bool:
        log = store.run_log("r")
        start.wait()
        log.open(number=number)
        try:
            for _ in range(4):
                log.append("beat", number=number)
        except FencedError:
            return False
        return True

    with ThreadPoolExecutor(5) as pool:
        finished = list(pool.map(hold, range(5)))
    records = store.run_log("r").records()
    assert [entry["epoch"] for entry in records if entry["kind"] == "opened"] == [1, 2, 3, 4, 5]
    assert finished.count(True) >= 1
    last = next(entry["number"] for entry in records if entry["epoch"] == 5)
    assert finished[last]
    assert [entry["number"] for entry in records if entry["kind"] == "beat" and entry["epoch"] == 5] == [last] * 4


def test_threads_of_one_holder_share_the_log(store: Store) -> None:
    log = store.run_log("r")
    log.open()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: log.append("step", number=number), range(12)))
    assert sorted(entry["number"] for entry in store.run_log("r").records()[1:]) == list(range(12))


def test_an_append_of_unknown_outcome_is_resolved_by_the_next(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    log = store.run_log("r")
    log.open()
    put_new = type(store.backend).put_new

    def applied_but_silent(self: object, key: str, data: bytes) -> bool:
        put_new(self, key, data)  # type: ignore[arg-type]
        raise CommitUnknownError(key)

    with monkeypatch.context() as patch:
        patch.setattr(type(store.backend), "put_new", applied_but_silent)
        with pytest.raises(CommitUnknownError):
            log.append("step", name="one")
    log.append("step", name="two")
    assert [entry.get("name") for entry in store.run_log("r").records()] == [None, "one", "two"]


def test_an_own_append_reported_as_lost_is_known_by_its_nonce(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    log = store.run_log("r")
    log.open()
    put_new = type(store.backend).put_new
    monkeypatch.setattr(type(store.backend), "put_new", lambda self, key, data: put_new(self, key, data) and False)
    log.append("step", name="one")
    assert [entry["kind"] for entry in store.run_log("r").records()] == ["opened", "step"]


def test_a_changed_a_swapped_and_a_removed_record_are_named(
    store: Store, raw: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "READ_PAUSE_S", 0)
    log = store.run_log("r")
    log.open()
    for name in ("one", "two", "three"):
        log.append("step", name=name)
    keys = [layout.log("r", seq) for seq in range(4)]
    whole = {key: raw.read(key) for key in keys}
    raw.write(keys[1], whole[keys[1]].replace(b'"one"', b'"ONE"'))
    with pytest.raises(CorruptArtifactError, match=r"log/00000001.json has digest"):
        store.run_log("r").records()
    raw.write(keys[1], whole[keys[2]])
    with pytest.raises(CorruptArtifactError, match=r"log/00000001.json doesn't follow"):
        store.run_log("r").records()
    raw.delete(keys[1])
    with pytest.raises(CorruptArtifactError, match=r"log/00000001.json is missing"):
        store.run_log("r").records()
    raw.write(keys[1], whole[keys[1]])
    assert len(store.run_log("r").records()) == 4


def test_a_record_rewritten_with_a_right_digest_breaks_the_chain(store: Store, raw: Raw) -> None:
    log = store.run_log("r")
    log.open()
    log.append("gate", decision="stop")
    log.append("closed")
    key = layout.log("r", 1)
    raw.write(key, record.encode(record.decode(raw.read(key), key) | {"decision": "go"}))
    with pytest.raises(CorruptArtifactError, match=r"log/00000002.json doesn't follow"):
        store.run_log("r").records()
