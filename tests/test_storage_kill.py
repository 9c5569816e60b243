"""Kill a small job at every point of the protocol in turn, resume it, and find the same work as undisturbed."""

from __future__ import annotations

import json
import os
import re
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

from auditor import audit
from conftest import Raw
from samples import judgments

from storage import failpoint
from storage.digest import digest_json
from storage.store import open_store

if TYPE_CHECKING:
    import pytest
    from conftest import S3Server

    from storage.store import Store

IDS = [f"p{number:06d}" for number in range(40)]
KILLED = 42
_TELLING = re.compile(r"manifest\.json (before|after)|(index|plan|shards/00001|run-1/log/00000000)\.json after")


def sample(store: Store, key: str, computed: list[str]) -> dict[str, Any]:
    """Compute three shards and join them, as a GPU step does."""
    if (found := store.manifest(key)) is None:
        attempt = store.attempt(key)
        plan = attempt.plan(IDS, 15)
        done = attempt.shards(plan)
        for shard in plan:
            if shard.index not in done:
                computed.append(f"sample {shard.index}")
                rows = judgments(shard.stop - shard.start, start=shard.start)
                done[shard.index] = attempt.commit_shard(shard.index, {"judgments": rows}, {})
        counts = {"in": 40, "kept": 40, "dropped": {}}
        parts: dict[str, Any] = {"inputs": {}, "key_parts": {}, "facts": {}}
        found = attempt.commit(step="sample", version=1, counts=counts, shards=list(done.values()), **parts)
    return {"rows": found.artifact("judgments").digest}


def train(store: Store, key: str, computed: list[str], folder: Path) -> dict[str, Any]:
    """Read the samples, store a checkpoint made of them and name it in the manifest."""
    if (found := store.manifest(key)) is None:
        computed.append("train")
        sampled = store.manifest(digest_json("sample"))
        assert sampled is not None
        rows = store.read(sampled.artifact("judgments"))
        weights = checkpoint(folder, rows.num_rows)
        facts = {"checkpoint": store.put_checkpoint(weights).digest}
        table = rows.filter(rows["hinted"])
        counts = {"in": 40, "kept": table.num_rows, "dropped": {"not hinted": 40 - table.num_rows}}
        parts: dict[str, Any] = {"inputs": {}, "key_parts": {}, "facts": facts, "tables": {"judgments": table}}
        found = store.attempt(key).commit(step="train", version=1, counts=counts, **parts)
    return {"rows": found.artifact("judgments").digest, "checkpoint": found.facts["checkpoint"]}


def checkpoint(folder: Path, number: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    header = json.dumps({"w": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + struct.pack("<I", number))
    (folder / "config.json").write_text("{}")
    return folder


def job(url: str, work: Path) -> dict[str, Any]:
    """Run or resume the job; return the results, what was computed this time, and all points reached."""
    computed: list[str] = []
    store = open_store(url, cache=work / f"cache-{os.urandom(4).hex()}")
    log = store.run_log("run-1")
    log.open()
    result: dict[str, Any] = {"sample": sample(store, digest_json("sample"), computed)}
    log.append("step", name="sample")
    result["train"] = train(store, digest_json("train"), computed, work / "weights")
    log.append("step", name="train")
    return {"result": result, "computed": computed}


def killed_at(point: int, url: str, work: Path) -> bool:
    """Run the job in a child that dies at the given point; say whether it did."""
    child = os.fork()
    if child == 0:
        left = point

        def hook(_: str) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                os._exit(KILLED)

        failpoint.install(hook)
        try:
            job(url, work)
        except BaseException:
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in {0, KILLED}
    return code == KILLED


def undisturbed(url: str, work: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the results of a run that nobody kills, and the points it passes."""
    reached: list[str] = []
    failpoint.install(reached.append)
    try:
        return job(url, work)["result"], reached
    finally:
        failpoint.install(None)


def check_resumed(raw: Raw, url: str, work: Path, *, golden: dict[str, Any]) -> None:
    """Resume after a kill: same results, committed work untouched and not repeated, a whole store, a chained log."""
    before = {key: raw.read(key) for key in raw.listing() if key.endswith(".json") and not key.startswith(".")}
    shards = [int(key[-10:-5]) for key in before if "/shards/" in key]
    to_do = [f"sample {index}" for index in range(3) if index not in shards]
    if f"steps/{digest_json('train')}/0/manifest.json" not in before:
        to_do.append("train")
    resumed = job(url, work)
    assert resumed["computed"] == to_do
    assert resumed["result"] == golden
    assert {key: raw.read(key) for key in before} == before
    found = audit(raw)
    assert (len(found.manifests), found.files, found.checkpoints) == (2, 4, 1)


def test_kill_at_every_point_on_local_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap 1: resume is tested by killing at every store operation."""
    monkeypatch.setattr(os, "fsync", lambda _: None)  # it guards against power cuts, which no test here makes
    monkeypatch.setattr("storage.store.LOCAL_RACES", {"rounds": 1, "threads": 2})
    golden, points = undisturbed(str(tmp_path / "golden"), tmp_path / "work")
    assert len(points) > 50
    for number, point in enumerate(points):
        url = str(tmp_path / f"store-{number}")
        assert killed_at(number, url, tmp_path / "work"), point
        check_resumed(Raw(Path(url)), url, tmp_path / "work", golden=golden)


def test_kill_at_commit_points_on_s3(ministack: S3Server, bucket: str, tmp_path: Path) -> None:
    golden, points = undisturbed(f"s3://{bucket}/golden", tmp_path / "work")
    telling = [number for number, point in enumerate(points) if _TELLING.search(point)]
    assert len(telling) == 8
    for number in telling:
        raw = Raw(None, ministack.client, bucket, f"killed-{number}")
        url = f"s3://{bucket}/{raw.prefix}"
        assert killed_at(number, url, tmp_path / "work"), points[number]
        check_resumed(raw, url, tmp_path / "work", golden=golden)
