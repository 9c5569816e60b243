"""Collect what nothing names, while others reuse, compute, store weights and pin: nothing in use is ever lost."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from auditor import audit
from conftest import Raw
from orchestrators import QUICK, Orchestrator
from samples import judgments
from turns import LOOKS, Side, interleave, length, orders

from storage import failpoint, layout, lease, record
from storage.claim import Claims
from storage.collect import collect
from storage.errors import CorruptArtifactError, StoreError, TransientError
from storage.hold import CLOSED, REMOVED, take_run
from storage.integrity import checkpoint_objects, damaged, manifest_objects
from storage.lease import Lease, Pace
from storage.refs import Pin, get_ref, pin_down, set_ref
from storage.store import Store, open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from storage.manifest import Manifest

pytestmark = pytest.mark.usefixtures("no_fsync")

KEY, OTHER = "a" * 64, "b" * 64


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "PACE", QUICK)
    monkeypatch.setattr("storage.store.LOCAL_RACES", {"rounds": 1, "threads": 2})


@pytest.fixture
def store(store_url: str, tmp_path: Path) -> Store:
    return open_store(store_url, cache=tmp_path / "cache")


def weights(folder: Path, number: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    header = json.dumps({"w": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + struct.pack("<I", number))
    (folder / "config.json").write_text("{}")
    return folder


def commit(store: Store, key: str, checkpoint: str = "") -> Manifest:
    facts = {"model": {"base": checkpoint, "adapter": None}} if checkpoint else {}
    parts: dict[str, Any] = {"inputs": {}, "key_parts": {}, "counts": {}, "facts": facts}
    return store.attempt(key).commit(step="s", version=1, tables={"judgments": judgments(3)}, **parts)


def run_that_used(store: Store, name: str, *keys: str) -> str:
    run_id = store.create_run(name, {}, code_version="test")
    log = store.run_log(run_id)
    log.open()
    for key in keys:
        assert store.use(log, key=key, attempt=store.attempt(key).number)
    log.append(CLOSED, outcome="done")
    return run_id


def remove(store: Store, run_id: str) -> None:
    take_run(store, run_id, tell=lambda _: None).append(CLOSED, outcome=REMOVED)


def whole(store: Store, key: str, number: int) -> bool:
    """Say whether an attempt counts and is whole to its last byte, its checkpoint too."""
    manifest = store.manifest_of(key, number)
    if manifest is None or not store.counts(key, number):
        return False
    objects = manifest_objects(manifest)
    for digest in manifest.checkpoints:
        try:
            objects += checkpoint_objects(store, digest)
        except StoreError:
            return False
    return not damaged(store, objects, deep=True)


def test_what_no_run_and_no_pin_uses_goes_in_the_second_pass(store: Store, raw: Raw, tmp_path: Path) -> None:
    kept = store.put_checkpoint(weights(tmp_path / "one", 1)).digest
    lost = store.put_checkpoint(weights(tmp_path / "two", 2)).digest
    commit(store, KEY, kept)
    commit(store, OTHER, lost)
    stays, goes = run_that_used(store, "stays", KEY), run_that_used(store, "goes", KEY, OTHER)
    everything = raw.listing()
    assert collect(store, delete=True, grace_s=0).waiting == []
    assert raw.listing() == everything

    remove(store, goes)
    dry = collect(store, delete=False, grace_s=0)
    names = {f"steps/{OTHER}/0", f"checkpoints/{lost}", f"runs/{goes}"}
    assert {one.name for one in dry.waiting} == names
    assert all(dry.bytes[name] > 0 for name in names)
    removed = raw.listing()
    first = collect(store, delete=True, grace_s=3600)
    assert (len(first.waiting), first.due, first.deleted) == (3, [], [])
    assert [key for key in raw.listing() if key not in removed] == [key for key in raw.listing() if "gc/" in key]
    again = collect(store, delete=True, grace_s=3600)
    assert (len(again.waiting), again.deleted) == (3, []), "the grace isn't over"
    assert len([key for key in raw.listing() if "gc/" in key]) == 1, "what is written down is not written again"

    second = collect(store, delete=True, grace_s=0)
    assert {one.name for one in second.deleted} == names
    assert second.spared == {}
    left = set(raw.listing())
    assert {key for key in left if OTHER in key} == {f"steps/{OTHER}/0/void.json"}
    assert not {key for key in left if lost in key or goes in key or key.startswith("gc/")}
    assert whole(store, KEY, 0)
    assert store.runs() == [stays]
    audit(raw)
    assert collect(store, delete=False, grace_s=0).waiting == []
    assert commit(store, OTHER).attempt == 1, "the void mark outlives what it was put on"


def test_what_changed_between_the_passes_waits_again(store: Store) -> None:
    """Its age alone doesn't tell whether somebody works on it."""
    attempt = store.attempt(KEY)
    plan = attempt.plan([f"p{number:06d}" for number in range(6)], 3)
    attempt.commit_shard(0, {"judgments": judgments(3)}, {})
    assert [one.why for one in collect(store, delete=True, grace_s=0).waiting] == ["begun, never committed"]
    attempt.commit_shard(1, {"judgments": judgments(3, start=3)}, {})
    second = collect(store, delete=True, grace_s=0)
    assert (len(second.waiting), second.due) == (1, [])
    assert len(attempt.shards(plan)) == 2
    assert len(collect(store, delete=True, grace_s=0).deleted) == 1
    assert attempt.shards(plan) == {}


def test_a_step_that_is_computed_is_spared(store: Store, tmp_path: Path) -> None:
    """Also where the clock is a month ahead: a claim that beats counts."""
    worker = Orchestrator(store.url, "working", tmp_path / "cache")
    try:
        worker.ask("take")
        store.attempt(KEY).plan(["p1", "p2"], 1)
        lost = store.put_checkpoint(weights(tmp_path / "one", 1)).digest
        worker.ask("claim", KEY)
        collect(store, delete=True, grace_s=0)
        found = collect(store, delete=True, grace_s=0)
        assert found.deleted == []
        assert f"run working (process {worker.pid} on" in found.spared[f"steps/{KEY}/0"]
        assert f"run working (process {worker.pid} on" in found.spared[f"checkpoints/{lost}"]
        assert worker.ask("commit", KEY)["nonce"]
        assert worker.ask("append", KEY) == {}
    finally:
        worker.kill()
    assert whole(store, KEY, 0)
    gone = collect(store, delete=True, grace_s=0)
    assert [one.name for one in gone.deleted] == [f"checkpoints/{lost}"], "its maker is dead"
    assert whole(store, KEY, 0)


def test_a_pin_keeps_what_its_run_no_longer_keeps(store: Store, tmp_path: Path) -> None:
    digest = store.put_checkpoint(weights(tmp_path / "one", 1)).digest
    commit(store, KEY, digest)
    run_id = run_that_used(store, "run", KEY)
    pin_down(store, "best", Pin(KEY, 0, (digest,), "checkpoint 1 of run"))
    remove(store, run_id)
    for _ in range(2):
        found = collect(store, delete=True, grace_s=0)
    assert [one.name for one in found.deleted] == [f"runs/{run_id}"]
    assert whole(store, KEY, 0)
    assert get_ref(store.backend, "best") == Pin(KEY, 0, (digest,), "checkpoint 1 of run")
    set_ref(store.backend, "best", None)
    for _ in range(2):
        found = collect(store, delete=True, grace_s=0)
    assert {one.name for one in found.deleted} == {f"steps/{KEY}/0", f"checkpoints/{digest}"}


def test_a_log_or_pin_that_can_not_be_read_might_name_anything(
    store: Store, raw: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "READ_PAUSE_S", 0)
    commit(store, KEY)
    commit(store, OTHER)
    run_id = run_that_used(store, "run", KEY)
    pin_down(store, "best", Pin(KEY, 0, (), "words"))
    collect(store, delete=True, grace_s=0)
    for key in (layout.log(run_id, 1), layout.ref("best", 0), layout.manifest(KEY, 0)):
        good = raw.read(key)
        raw.write(key, good[:-9] + b"x" + good[-8:])
        with pytest.raises(CorruptArtifactError, match=key.rpartition("/")[2]):
            collect(store, delete=True, grace_s=0)
        raw.write(key, good)
    assert whole(store, OTHER, 0)
    raw.write("steps/readme.txt", b"not ours")
    raw.write("checkpoints/notes/x.txt", b"not ours")
    assert len(collect(store, delete=True, grace_s=0).deleted) == 1
    assert raw.read("steps/readme.txt") == raw.read("checkpoints/notes/x.txt") == b"not ours"


def test_a_removal_of_a_run_that_was_cut_short_goes_on(store: Store, raw: Raw) -> None:
    run_id = run_that_used(store, "run", KEY) if commit(store, KEY) else ""
    remove(store, run_id)
    collect(store, delete=True, grace_s=0)
    for key in (layout.run(run_id), layout.log(run_id, 0), layout.log(run_id, 1)):
        raw.delete(key)
    for _ in range(2):
        collect(store, delete=True, grace_s=0)
    assert store.runs() == []
    with pytest.raises(StoreError, match="there is no run"):
        store.run(run_id)


# Every pair of operations of the collector and of somebody else, in both orders.


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Path]:
    """Give a folder in memory where there is one: each order is tried on a copy of the store."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    folder = memory / f"starwheel-collect-{os.getpid()}"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def place(room: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a store with a step, a begun step and weights that nothing names, written down by a first pass."""
    monkeypatch.setattr(lease, "PACE", Pace(beat_s=0.002, timeout_s=2.0))  # who waits looks often
    store = open_store(str(room / "made"), cache=room / "cache")
    digest = store.put_checkpoint(weights(room / "one", 1)).digest
    commit(store, KEY, digest)
    store.attempt(OTHER).plan(["p1"], 1)
    collect(store, delete=True, grace_s=0)
    store.create_run("new", {}, code_version="test")
    return room


def stops_of_collector(operation: str, key: str) -> bool:
    """Leave out what only it writes, and the files of a step, which go one after the other behind their manifest."""
    if key.startswith(("gc/lease", "gc/plan")) or (operation == "delete" and key.endswith((".parquet", "plan.json"))):
        return False
    return operation in ("put_new", "put", "delete", "folders") or key.endswith("claim.json")


MET = Counter[str]()  # how often the collector spared something at its second look, and somebody waited for it


def try_all(
    place: Path, work: Callable[[Store], Any], stops: Callable[[str, str], bool], check: Callable[[Store, Any], str]
) -> Counter[str]:
    """Interleave the collector with somebody's work in every order; count what `check` says of each end."""

    def sides(folder: Path) -> tuple[Side, Side]:
        shutil.copytree(place / "made", folder, ignore=shutil.ignore_patterns(".cache"))
        somebody = Side(folder, place / "cache", work, stops)
        collector = Side(
            folder, place / "cache", lambda store: collect(store, delete=True, grace_s=0), stops_of_collector
        )
        return somebody, collector

    one, other = sides(place / "alone-1"), sides(place / "alone-2")
    lengths = length(lambda: one[0]), length(lambda: other[1])
    assert 3 <= min(lengths) <= max(lengths) < LOOKS
    ends = Counter[str]()
    MET.clear()
    for number, order in enumerate(orders(*lengths)):
        folder = place / f"try-{number}"
        somebody, collector = sides(folder)
        interleave(somebody, collector, order)
        assert collector.error is None, (order, collector.error, collector.passed)
        store = open_store(str(folder), cache=place / f"cache-{number}")
        if somebody.error is not None and not isinstance(somebody.error, TransientError):
            raise AssertionError((order, somebody.passed)) from somebody.error
        end = check(store, somebody.error or somebody.result)
        assert not end.startswith("LOST"), (end, order, somebody.passed, collector.passed)
        audit(Raw(folder))
        ends[end] += 1
        MET["spared"] += any(
            "meanwhile" in why or "may be making it" in why for why in collector.result.spared.values()
        )
        MET["waited"] += any(somebody.passed.count(one) > 2 for one in somebody.passed if " gc/" in one)
        shutil.rmtree(folder)
        shutil.rmtree(place / f"cache-{number}")
    print(lengths, dict(ends), dict(MET))
    return ends


def reuse(store: Store, *, look_first: bool = False) -> int:
    """Use the step as a run does: reuse it where it counts, else compute the next attempt."""
    (run_id,) = store.runs()
    log = store.run_log(run_id)
    log.open()
    manifest = store.manifest(KEY)
    if manifest is not None:
        if look_first:
            if store.counts(KEY, manifest.attempt):
                log.append("step", key=KEY, attempt=manifest.attempt)
                return manifest.attempt
        elif store.use(log, key=KEY, attempt=manifest.attempt):
            return manifest.attempt
    made = commit(store, KEY)
    assert store.use(log, key=KEY, attempt=made.attempt)
    return made.attempt


def stops_of_user(operation: str, key: str) -> bool:
    return operation == "put_new" or key.startswith("gc/") or key.endswith(("manifest.json", "index.json"))


def check_reuse(store: Store, attempt: int) -> str:
    if not whole(store, KEY, attempt):
        return "LOST"
    return f"attempt {attempt}, the first {'stays' if store.manifest_of(KEY, 0) else 'is collected'}"


def test_reuse_against_the_collector(place: Path) -> None:
    ends = try_all(place, reuse, stops_of_user, check_reuse)
    assert set(ends) == {"attempt 0, the first stays", "attempt 1, the first is collected"}
    assert MET["spared"] > 0, "the collector saw the user"
    assert MET["waited"] > 0, "the user saw the collector"


def test_the_other_order_would_lose(place: Path) -> None:
    """Who looks before it logs is collected under its hands: the test above sees what it is for."""
    with pytest.raises(AssertionError, match="LOST"):
        try_all(place, lambda store: reuse(store, look_first=True), stops_of_user, check_reuse)


def stops_of_worker(operation: str, key: str) -> bool:
    return operation == "put_new" or key.startswith("gc/") or key.endswith(("claim.json", "void.json"))


def compute(store: Store) -> int:
    """Compute the step that is begun, under a claim, as a run does."""
    (run_id,) = store.runs()
    log = store.run_log(run_id)
    epoch = log.open()
    held = Lease(store.backend, layout.lease(run_id, epoch))
    claims = Claims(store.backend, run_id, epoch)
    held.start()
    try:
        while (other := claims.claim([OTHER])) is not None:
            claims.wait(other)
        attempt = store.attempt(OTHER)
        attempt.plan(["p1"], 1)
        shard = attempt.commit_shard(0, {"judgments": judgments(1)}, {})
        parts: dict[str, Any] = {"inputs": {}, "key_parts": {}, "counts": {}, "facts": {}}
        made = attempt.commit(step="s", version=1, shards=[shard], **parts)
        if not store.use(log, key=OTHER, attempt=made.attempt):
            raise TransientError("voided")
        return made.attempt
    finally:
        claims.release()
        held.release()


def test_computing_a_begun_step_against_the_collector(place: Path) -> None:
    def check(store: Store, end: Any) -> str:
        if isinstance(end, TransientError):
            return "told"
        return f"attempt {end}" if whole(store, OTHER, end) else "LOST"

    ends = try_all(place, compute, stops_of_worker, check)
    assert set(ends) == {"attempt 0", "attempt 1"}, "no work is ever for nothing where both claim"


def test_storing_weights_against_the_collector(place: Path) -> None:
    """A training that makes the very checkpoint that is being collected."""

    def train(store: Store) -> str:
        (run_id,) = store.runs()
        log = store.run_log(run_id)
        epoch = log.open()
        held = Lease(store.backend, layout.lease(run_id, epoch))
        claims = Claims(store.backend, run_id, epoch)
        held.start()
        try:
            assert claims.claim(["c" * 64]) is None
            digest = store.put_checkpoint(place / "one").digest
            made = commit(store, "c" * 64, digest)
            assert store.use(log, key="c" * 64, attempt=made.attempt)
            return digest
        finally:
            claims.release()
            held.release()

    def stops(operation: str, key: str) -> bool:
        return operation in ("put_new", "put_file") or key.startswith("gc/") or key.endswith("claim.json")

    def check(store: Store, end: Any) -> str:
        return "stored" if whole(store, "c" * 64, 0) else "LOST"

    assert set(try_all(place, train, stops, check)) == {"stored"}
    assert MET["spared"] > 0
    assert MET["waited"] > 0


def test_pinning_against_the_collector(place: Path) -> None:
    (digest,) = [path.name for path in (place / "made" / "checkpoints").iterdir()]
    target = Pin(KEY, 0, (digest,), "checkpoint 1")

    def pin(store: Store) -> bool:
        try:
            pin_down(store, "best", target)
        except StoreError:
            return False
        return True

    def check(store: Store, pinned: bool) -> str:
        assert (get_ref(store.backend, "best") == target) is pinned
        if not pinned:
            return "told"
        return "pinned" if whole(store, KEY, 0) else "LOST"

    ends = try_all(place, pin, stops_of_user, check)
    assert ends["pinned"] > 0
    assert ends["told"] > 0


def test_a_collector_that_is_killed_anywhere_harms_nothing(place: Path) -> None:
    """K1, amid gc: whoever uses the step next gets it whole, and the next collector ends what is left."""
    points: list[str] = []
    shutil.copytree(place / "made", place / "alone", ignore=shutil.ignore_patterns(".cache"))
    failpoint.install(points.append)
    collect(open_store(str(place / "alone"), cache=place / "cache"), delete=True, grace_s=0)
    failpoint.install(None)
    points = [one for one in points if "gc/lease" not in one]
    assert len(points) > 30
    ends = Counter[int]()
    for number, point in enumerate(points):
        folder = place / f"killed-{number}"
        shutil.copytree(place / "made", folder, ignore=shutil.ignore_patterns(".cache"))
        assert killed(folder, place / "cache", number), point
        store = open_store(str(folder), cache=place / f"cache-{number}")
        attempt = reuse(store)
        assert whole(store, KEY, attempt), point
        ends[attempt] += 1
        for _ in range(2):
            collect(store, delete=True, grace_s=0)
        assert whole(store, KEY, attempt), point
        assert not [key for key in Raw(folder).listing() if key.startswith(("gc/step-", "gc/checkpoint-"))], point
        audit(Raw(folder))
        shutil.rmtree(folder)
    print(f"killed at {len(points)} points, attempts used then: {dict(ends)}")
    assert min(ends[0], ends[1]) > 0


def killed(folder: Path, cache: Path, point: int) -> bool:
    """Collect in a child that dies at a point; say whether it did."""
    child = os.fork()
    if child == 0:
        left = point

        def hook(name: str) -> None:
            nonlocal left
            if "gc/lease" not in name:
                left -= 1
            if left < 0:
                os._exit(42)

        failpoint.install(hook)
        try:
            collect(open_store(str(folder), cache=cache), delete=True, grace_s=0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
