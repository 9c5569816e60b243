"""Try the commit protocol of steps on both backends: first writer wins, payload first, damage is named."""

from __future__ import annotations

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from samples import judgments

from storage import layout, record
from storage.digest import digest_table
from storage.errors import CorruptArtifactError, StepFailedError, StoreError
from storage.schema import empty
from storage.store import Store, open_store

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import Raw

    from storage.attempt import Attempt
    from storage.manifest import Manifest

KEY = "a1" * 32


@pytest.fixture
def store(store_url: str, tmp_path: Path) -> Store:
    return open_store(store_url, cache=tmp_path / "cache")


def again(store: Store, tmp_path: Path) -> Store:
    """Open the store as another machine would: with nothing in its cache."""
    return open_store(store.url, cache=tmp_path / f"cache-{os.urandom(4).hex()}")


def commit(attempt: Attempt, **changed: Any) -> Manifest:
    given: dict[str, Any] = {"step": "select", "version": 1, "inputs": {"completions": "d" * 64}, "key_parts": {"n": 4}}
    given |= {"counts": {"in": 100, "kept": 98, "dropped": {"tie": 2}}, "facts": {"host": "here"}}
    if "shards" not in changed:
        given["tables"] = {"judgments": judgments(98)}
    return attempt.commit(**(given | changed))


def test_a_committed_step_is_found_and_read_elsewhere(store: Store, tmp_path: Path) -> None:
    assert store.manifest(KEY) is None
    made = commit(store.attempt(KEY))
    other = again(store, tmp_path)
    found = other.manifest(KEY)
    assert found == made
    assert other.read(found.artifact("judgments")).equals(judgments(98))
    assert other.read(found.artifact("judgments"), ["status"]).column_names == ["status"]
    assert found.artifact("judgments").digest == digest_table(judgments(98))
    assert [path.stat().st_size for path in other.fetch(found.artifact("judgments"))] == [
        file.bytes for file in found.artifact("judgments").files
    ]
    with pytest.raises(StoreError, match="has no artifact 'sft', only judgments"):
        found.artifact("sft")


def test_format_is_made_once(store: Store, raw: Raw, tmp_path: Path) -> None:
    assert again(store, tmp_path).store_id == store.store_id
    assert json.loads(raw.read("FORMAT.json"))["probe"]["exclusive_create"] is True
    assert raw.listing() == ["FORMAT.json"]


def test_absent_stores_and_foreign_schemes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"there is no store at .*/none"):
        open_store(str(tmp_path / "none"), create=False)
    assert not (tmp_path / "none").exists()
    with pytest.raises(StoreError, match="gs://"):
        open_store("gs://bucket/x")


@pytest.mark.parametrize("key", ["FORMAT.json", layout.manifest(KEY, 0)])
def test_a_newer_format_is_refused_in_one_sentence(store: Store, raw: Raw, key: str, tmp_path: Path) -> None:
    commit(store.attempt(KEY))
    fields = json.loads(raw.read(key))
    fields["format"] = record.FORMAT_VERSION + 1
    fields.pop("sha256")
    raw.write(key, json.dumps({**fields, "sha256": record.digest_json(fields)}).encode())
    with pytest.raises(StoreError, match="install a newer starwheel") as caught:
        again(store, tmp_path).manifest(KEY)
    assert not isinstance(caught.value, CorruptArtifactError)


@pytest.mark.parametrize("counts", [{"in": 10, "kept": 8, "dropped": {"tie": 1}}, {"in": 10, "kept": 11}])
def test_rows_that_vanish_are_refused(store: Store, counts: dict[str, Any]) -> None:
    attempt = store.attempt(KEY)
    with pytest.raises(StepFailedError, match="10 rows came in"):
        commit(attempt, counts=counts)
    with pytest.raises(StepFailedError, match="mend the step"):
        commit(attempt, counts={"rows": 10})
    assert store.manifest(KEY) is None
    assert commit(attempt, counts={}).counts == {}


def test_facts_that_json_can_not_hold_are_refused(store: Store) -> None:
    with pytest.raises(StepFailedError, match="finite"):
        commit(store.attempt(KEY), facts={"loss": float("nan")})
    assert store.manifest(KEY) is None


def test_the_loser_adopts_what_the_winner_committed(store: Store, tmp_path: Path) -> None:
    first = commit(store.attempt(KEY))
    second = commit(again(store, tmp_path).attempt(KEY), tables={"judgments": judgments(98, verdict=None)})
    assert second == first
    assert store.read(second.artifact("judgments")).equals(judgments(98))


def test_racing_threads_agree_on_one_manifest(store: Store) -> None:
    start = threading.Barrier(6)

    def race(number: int) -> Manifest:
        start.wait()
        return commit(store.attempt(KEY), tables={"judgments": judgments(98, start=number)})

    with ThreadPoolExecutor(6) as pool:
        manifests = list(pool.map(race, range(6)))
    assert len({found.nonce for found in manifests}) == 1
    assert store.manifest(KEY) == manifests[0]


def test_racing_processes_agree_on_one_manifest(store: Store, tmp_path: Path) -> None:
    def race(number: int) -> None:
        mine = again(store, tmp_path)
        made = commit(mine.attempt(KEY), tables={"judgments": judgments(98, start=number)})
        rows = mine.read(made.artifact("judgments"))
        (tmp_path / f"nonce-{number}").write_text(f"{made.nonce} {digest_table(rows)}")

    assert in_children([lambda number=number: race(number) for number in range(3)]) == [0, 0, 0]
    assert len({(tmp_path / f"nonce-{number}").read_text() for number in range(3)}) == 1


def test_void_opens_the_next_attempt(store: Store, tmp_path: Path) -> None:
    first = commit(store.attempt(KEY))
    assert store.void(KEY, "lost", "tester") == 0
    assert store.manifest(KEY) is None
    attempt = again(store, tmp_path).attempt(KEY)
    assert attempt.number == 1
    second = commit(attempt)
    assert (first.attempt, second.attempt) == (0, 1)
    assert store.manifest(KEY) == second
    assert store.void(KEY, "again", "tester") == 1
    assert store.attempt(KEY).number == 2


def test_a_step_is_found_by_the_beginning_of_its_key(store: Store) -> None:
    twin = f"{KEY[:20]}{'0' * 44}"
    for key in (KEY, twin):
        commit(store.attempt(key))
    assert store.find_step(KEY[:21]) == KEY
    assert store.find_step(twin) == twin
    for beginning, words in (
        (KEY[:20], "2 steps begin with"),
        ("", "no step"),
        ("abc/../x", "no step"),
        ("zz", "no step"),
    ):
        with pytest.raises(StoreError, match=words):
            store.find_step(beginning)


def test_a_commit_into_a_voided_attempt_counts_for_nothing(store: Store) -> None:
    attempt = store.attempt(KEY)
    store.void(KEY, "stop it", "tester")
    with pytest.raises(StepFailedError, match="voided meanwhile"):
        commit(attempt)
    assert store.manifest(KEY) is None


def test_shards_join_to_what_one_table_would_be(store: Store, tmp_path: Path) -> None:
    attempt = store.attempt(KEY)
    ids = [f"p{number:06d}" for number in range(98)]
    plan = attempt.plan(ids[::-1], 30)
    assert [(shard.start, shard.stop) for shard in plan] == [(0, 30), (30, 60), (60, 90), (90, 98)]
    for shard in plan[:2]:
        attempt.commit_shard(shard.index, {"judgments": judgments(shard.stop - shard.start, start=shard.start)}, {})
    with pytest.raises(StepFailedError, match="has 2 of 4 shards"):
        commit(attempt, shards=list(attempt.shards(plan).values()))
    resumed = again(store, tmp_path).attempt(KEY)
    plan = resumed.plan(ids, 7)  # a later shard size is ignored
    done = resumed.shards(plan)
    assert sorted(done) == [0, 1]
    with ThreadPoolExecutor(4) as pool:
        rest = pool.map(lambda shard: resumed.commit_shard(shard.index, _rows(shard.start, shard.stop), {}), plan[2:])
    made = commit(resumed, shards=[*rest, *done.values()])
    whole = pa.concat_tables([_rows(shard.start, shard.stop)["judgments"] for shard in plan])
    assert made.artifact("judgments").digest == digest_table(whole)
    assert again(store, tmp_path).read(made.artifact("judgments")).equals(whole)


def _rows(start: int, stop: int) -> dict[str, pa.Table]:
    return {"judgments": judgments(stop - start, start=start)}


def test_a_shard_that_lacks_an_artifact_is_refused(store: Store) -> None:
    attempt = store.attempt(KEY)
    attempt.plan(["a", "b"], 1)
    whole = attempt.commit_shard(0, {"judgments": judgments(1), "metrics": empty("metrics")}, {})
    part = attempt.commit_shard(1, {"judgments": judgments(1)}, {})
    with pytest.raises(StepFailedError, match=r"lack some of \['judgments', 'metrics'\]"):
        commit(attempt, shards=[whole, part])


def test_a_shard_is_committed_once(store: Store, tmp_path: Path) -> None:
    attempt = store.attempt(KEY)
    attempt.plan(["a", "b"], 1)
    first = attempt.commit_shard(0, {"judgments": judgments(1)}, {"in": 1, "kept": 1})
    second = again(store, tmp_path).attempt(KEY).commit_shard(0, {"judgments": judgments(1, verdict=None)}, {})
    assert second == first
    with pytest.raises(StepFailedError, match="shard 1 of step"):
        attempt.commit_shard(1, {"judgments": judgments(1)}, {"in": 2, "kept": 1})


def test_the_plan_in_force_is_for_the_same_ids(store: Store) -> None:
    attempt = store.attempt(KEY)
    assert attempt.plan([], 10) == []
    with pytest.raises(StepFailedError, match="plans other ids than the 1 given"):
        attempt.plan(["a"], 10)
    with pytest.raises(StepFailedError, match="repeat"):
        attempt.plan(["a", "a"], 10)


def test_a_step_of_no_rows_and_no_shards_commits(store: Store) -> None:
    attempt = store.attempt(KEY)
    attempt.plan([], 10)
    assert commit(attempt, shards=[]).artifacts == {}
    assert commit(store.attempt("other"), tables={"judgments": judgments(0)}).artifact("judgments").rows == 0


def test_a_flipped_byte_is_named_with_its_address(store: Store, raw: Raw, tmp_path: Path) -> None:
    artifact = commit(store.attempt(KEY)).artifact("judgments")
    data = bytearray(raw.read(artifact.files[0].path))
    data[len(data) // 2] ^= 1
    raw.write(artifact.files[0].path, bytes(data))
    with pytest.raises(CorruptArtifactError, match=store.backend.address(artifact.files[0].path)):
        again(store, tmp_path).read(artifact)


def test_a_cut_and_a_missing_file_are_named(store: Store, raw: Raw, tmp_path: Path) -> None:
    artifact = commit(store.attempt(KEY)).artifact("judgments")
    raw.write(artifact.files[0].path, raw.read(artifact.files[0].path)[:-10])
    with pytest.raises(CorruptArtifactError, match=r"part-00000.* instead of"):
        again(store, tmp_path).read(artifact)
    raw.delete(artifact.files[0].path)
    with pytest.raises(CorruptArtifactError, match=r"part-00000.* is missing"):
        again(store, tmp_path).read(artifact)


def test_any_changed_byte_of_a_manifest_is_noticed(store: Store, raw: Raw, monkeypatch: pytest.MonkeyPatch) -> None:
    made = commit(store.attempt(KEY))
    key = layout.manifest(KEY, 0)
    data = raw.read(key)
    monkeypatch.setattr(record, "READ_PAUSE_S", 0)
    for place in range(0, len(data), len(data) // 12):
        raw.write(key, data[:place] + bytes([data[place] ^ 2]) + data[place + 1 :])
        with pytest.raises(StoreError, match=store.backend.address(key)):
            store.manifest(KEY)
    raw.write(key, data)
    assert store.manifest(KEY) == made


def test_a_manifest_in_the_wrong_place_is_refused(store: Store, raw: Raw) -> None:
    commit(store.attempt(KEY))
    raw.write(layout.manifest("other", 0), raw.read(layout.manifest(KEY, 0)))
    with pytest.raises(CorruptArtifactError, match="outside its attempt"):
        store.manifest("other")


@pytest.mark.parametrize("path", ["../../etc/passwd", "/etc/passwd", "runs/r/run.json"])
def test_paths_of_a_poisoned_manifest_lead_nowhere(store: Store, raw: Raw, path: str) -> None:
    commit(store.attempt(KEY))
    fields = record.decode(raw.read(layout.manifest(KEY, 0)), "x")
    fields["artifacts"]["judgments"]["files"][0]["path"] = path
    raw.write(layout.manifest(KEY, 0), record.encode(fields))
    with pytest.raises(StoreError, match=r"outside its attempt|can't be a name"):
        store.manifest(KEY)


def test_nothing_is_decided_by_a_listing_and_little_is_asked(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("get", "size", "put_new", "put_file", "get_file", "list", "folders"):
        inner = getattr(type(store.backend), name)

        def counted(self: Any, *args: Any, name: str = name, inner: Any = inner, **options: Any) -> Any:
            calls.append(name)
            return inner(self, *args, **options)

        monkeypatch.setattr(type(store.backend), name, counted)
    assert store.manifest(KEY) is None
    assert calls == ["get", "size"]
    made = commit(store.attempt(KEY))
    calls.clear()
    store.manifest(KEY)
    assert calls == ["get", "size"]
    calls.clear()
    store.read(made.artifact("judgments"))  # written by this process: no download
    assert calls == []


def test_runs_keep_their_config(store: Store) -> None:
    run_id = store.create_run("demo", {"model": {"max_len": 512}}, code_version="0.1.0+abc")
    assert run_id.startswith("demo-20")
    assert store.run_config(run_id) == {"model": {"max_len": 512}}
    assert store.run(run_id).code_version == "0.1.0+abc"
    other = store.create_run("demo", {}, code_version="x")
    assert store.runs() == sorted([run_id, other])
    with pytest.raises(StoreError, match=f"no run none.*{other}"):
        store.run("none")
    with pytest.raises(StoreError, match="can't be a name"):
        store.create_run("../x", {}, code_version="x")


def in_children(jobs: list[Callable[[], None]]) -> list[int]:
    """Run jobs in forked children at once and return their exit codes."""
    children = []
    for job in jobs:
        child = os.fork()
        if child == 0:
            try:
                job()
            except BaseException:
                os._exit(1)
            os._exit(0)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
