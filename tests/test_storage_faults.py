"""Run the commit protocol through a proxy that breaks things: nothing acknowledged is lost, nothing wrong is read."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from auditor import audit
from conftest import Raw
from faultproxy import Action, Fault, FaultProxy
from samples import judgments
from test_storage_kill import checkpoint

from storage import cache, layout, record, s3
from storage.cache import ObjectCache
from storage.digest import digest_bytes, digest_table
from storage.errors import CommitUnknownError, CorruptArtifactError, StoreError
from storage.s3_calls import Patience
from storage.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from conftest import S3Server

    from storage.manifest import Manifest

SEED = int(os.environ.get("FAULT_SEED", "7"))
KEY = "a1" * 32
PATIENT = Patience(deadline=20.0, contact=20.0, first_pause=0.002, longest_pause=0.02, silence=1.0)
IMPATIENT = Patience(deadline=0.5, contact=0.5, first_pause=0.01, longest_pause=0.1, silence=0.3)

STORMS = {
    "503 before": Fault(Action.REFUSE, chance=0.4),
    "500 before": Fault(Action.REFUSE, chance=0.4, status=500, code="InternalError"),
    "429 before": Fault(Action.REFUSE, chance=0.4, status=429, code="TooManyRequests"),
    "409 on writes": Fault(Action.REFUSE, "PUT", chance=0.5, status=409, code="ConditionalRequestConflict"),
    "400 on writes": Fault(Action.REFUSE, "PUT", chance=0.4, status=400, code="BadDigest"),
    "reset before": Fault(Action.RESET_BEFORE, chance=0.3),
    "reset after": Fault(Action.RESET_AFTER, "PUT|POST", chance=0.4),
    "applied but 500": Fault(Action.APPLY_THEN_REFUSE, "PUT|POST", chance=0.4, status=500, code="InternalError"),
    "reset midway": Fault(Action.RESET_MIDWAY, "GET", chance=0.4),
    "cut short": Fault(Action.CUT_SHORT, "GET", chance=0.4),
    "cut, told so": Fault(Action.CUT_TOLD, "GET", chance=0.2),
    "flipped answers": Fault(Action.FLIP_ANSWER, "GET", chance=0.2),
    "flipped uploads": Fault(Action.FLIP_REQUEST, "PUT", chance=0.4),
    "cut uploads": Fault(Action.CUT_REQUEST, "PUT", chance=0.4),
    "sent twice": Fault(Action.DUPLICATE, "PUT", chance=0.5),
    "late": Fault(Action.DELAY, chance=0.5),
    "stalled": Fault(Action.STALL, "GET", chance=1.0, skip=3, times=1, seconds=2.0),
}


@pytest.fixture
def proxy(ministack: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    monkeypatch.setattr(record, "READ_PAUSE_S", 0.001)
    monkeypatch.setattr(cache, "FETCH_PAUSE_S", 0.001)
    proxy = FaultProxy(ministack.port, SEED)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    print(f"FAULT_SEED={SEED}")
    yield proxy
    proxy.shutdown()
    proxy.server_close()


@pytest.fixture
def raw(ministack: S3Server, bucket: str) -> Raw:
    return Raw(None, ministack.client, bucket, "p")


def connect(bucket: str, folder: Path, patience: Patience = PATIENT) -> Store:
    """Reach the store with short pauses and an empty cache."""
    return elsewhere(Store(s3.S3Backend(f"s3://{bucket}/p", patience=patience), ObjectCache(folder / "cache")), folder)


def elsewhere(store: Store, folder: Path) -> Store:
    """Reach the store with nothing in the cache, as another machine would."""
    return Store(store.backend, ObjectCache(folder / f"cache-{os.urandom(4).hex()}"))


def commit(store: Store, who: str) -> Manifest:
    """Plan, commit two shards, join them."""
    attempt = store.attempt(KEY)
    plan = attempt.plan([f"p{number}" for number in range(30)], 15)
    shards = [attempt.commit_shard(part.index, {"judgments": judgments(15, start=part.start)}, {}) for part in plan]
    parts: dict[str, Any] = {"inputs": {}, "key_parts": {}, "counts": {"in": 30, "kept": 30}, "facts": {"who": who}}
    return attempt.commit(step="sample", version=1, shards=shards, **parts)


@pytest.mark.parametrize("name", STORMS)
def test_storm(proxy: FaultProxy, bucket: str, raw: Raw, tmp_path: Path, name: str) -> None:
    store = connect(bucket, tmp_path)
    proxy.set(STORMS[name])
    log = store.run_log("r")
    log.open()
    made = commit(store, "me")
    log.append("step", key=KEY)
    weights = store.put_checkpoint(checkpoint(tmp_path / "weights", 5))
    other = elsewhere(store, tmp_path)
    found = other.manifest(KEY)
    assert found == made
    assert other.read(found.artifact("judgments")).equals(judgments(30))
    assert digest_table(judgments(30)) == found.artifact("judgments").digest
    other.fetch_checkpoint(weights.digest)
    assert [entry["kind"] for entry in other.run_log("r").records()] == ["opened", "step"]
    fired = sum(proxy.fired.values())
    proxy.set()
    whole = audit(raw)
    assert made.facts == {"who": "me"}, "a commit whose answer was lost is won all the same"
    assert (len(whole.manifests), whole.files, whole.log_records, whole.checkpoints) == (1, 2, 2, 1)
    print(f"{name}: {fired} faults fired")
    assert fired > 0


@pytest.mark.parametrize("name", ["applied but 500", "reset after", "503 before", "sent twice"])
def test_racers_in_a_storm_agree_on_one_manifest(
    proxy: FaultProxy, bucket: str, raw: Raw, tmp_path: Path, name: str
) -> None:
    stores = [connect(bucket, tmp_path) for _ in range(3)]
    proxy.set(STORMS[name])
    start = threading.Barrier(3)

    def race(number: int) -> Manifest:
        start.wait()
        return commit(stores[number], f"racer {number}")

    with ThreadPoolExecutor(3) as pool:
        made = list(pool.map(race, range(3)))
    proxy.set()
    assert len({found.nonce for found in made}) == 1
    assert len(audit(raw).manifests) == 1


def test_flipped_data_in_the_way_is_never_read(proxy: FaultProxy, bucket: str, tmp_path: Path) -> None:
    store = connect(bucket, tmp_path)
    made = commit(store, "me")
    for action in (Action.FLIP_ANSWER, Action.CUT_TOLD):
        proxy.set(Fault(action, "GET", r"\.parquet"))
        reader = elsewhere(store, tmp_path)
        with pytest.raises(CorruptArtifactError, match=f"s3://{bucket}/p/{made.artifact('judgments').files[0].path}"):
            reader.read(made.artifact("judgments"))
        proxy.set(Fault(action, "GET", r"manifest\.json"))
        with pytest.raises(CorruptArtifactError, match=r"manifest\.json"):
            reader.manifest(KEY)
    assert [path for path in tmp_path.glob("cache-*/objects/*") if path.stat().st_size < 100] == []


def test_damage_that_the_server_lets_in_is_mended_or_said(
    proxy: FaultProxy, bucket: str, raw: Raw, tmp_path: Path
) -> None:
    """Do without the server's check of Content-MD5: payloads and records are read back before anyone goes on."""
    store = connect(bucket, tmp_path)
    unchecked = Fault(Action.FLIP_UNCHECKED, "PUT", r"\.parquet|safetensors", times=3)
    proxy.set(unchecked)
    commit(store, "me")
    store.put_checkpoint(checkpoint(tmp_path / "weights", 5))
    assert proxy.fired[unchecked] == 3
    assert audit(raw).checkpoints == 1
    proxy.set(Fault(Action.FLIP_UNCHECKED, "PUT", r"manifest\.json"))
    with pytest.raises(CorruptArtifactError, match=r"k2/0/manifest\.json"):
        store.attempt("k2").commit(step="x", version=1, inputs={}, key_parts={}, counts={}, facts={})


def test_an_unknown_commit_is_said_and_resolved_by_the_next_start(
    proxy: FaultProxy, bucket: str, raw: Raw, tmp_path: Path
) -> None:
    store = connect(bucket, tmp_path, IMPATIENT)
    proxy.set(
        Fault(Action.RESET_AFTER, "PUT", r"manifest\.json", times=1),
        Fault(Action.RESET_BEFORE, "PUT|GET", r"manifest\.json"),
    )
    with pytest.raises(CommitUnknownError, match=r"manifest.json within .*nothing was deleted"):
        commit(store, "first")
    assert layout.manifest(KEY, 0) in raw.listing()
    proxy.set()
    assert commit(connect(bucket, tmp_path), "second").facts == {"who": "first"}


def test_a_commit_that_never_arrived_is_unknown_too_and_made_by_the_next_start(
    proxy: FaultProxy, bucket: str, raw: Raw, tmp_path: Path
) -> None:
    proxy.set(Fault(Action.REFUSE, "PUT", r"manifest\.json"))
    with pytest.raises(CommitUnknownError, match="503 SlowDown"):
        commit(connect(bucket, tmp_path, IMPATIENT), "first")
    proxy.set()
    assert connect(bucket, tmp_path).manifest(KEY) is None
    assert commit(connect(bucket, tmp_path), "second").facts == {"who": "second"}
    assert len(audit(raw).manifests) == 1


REFUSALS = {
    "AccessDenied": (403, "allow these credentials to get, put, list and delete"),
    "InvalidAccessKeyId": (403, "doesn't accept the credentials"),
    "SignatureDoesNotMatch": (403, "doesn't accept the credentials"),
    "RequestTimeTooSkewed": (403, "clock is off by .* set the clock"),
    "NoSuchBucket": (404, "doesn't exist at .* make it"),
    "ExpiredToken": (400, "have expired; renew them"),
    "AuthorizationHeaderMalformed": (400, "another region; set AWS_DEFAULT_REGION"),
    "NotImplemented": (400, "check that it speaks S3"),
}


@pytest.mark.parametrize("code", REFUSALS)
def test_what_no_retry_mends_is_said_at_once(proxy: FaultProxy, bucket: str, code: str) -> None:
    status, sentence = REFUSALS[code]
    backend = s3.S3Backend(f"s3://{bucket}/p", patience=PATIENT)
    proxy.set(Fault(Action.REFUSE, status=status, code=code))
    start = time.monotonic()
    for call in (lambda: backend.put_new("a", b"x"), lambda: backend.get("a")):
        with pytest.raises(StoreError, match=sentence) as caught:
            call()
        assert f"s3://{bucket}/p/a" in str(caught.value)
        assert "testing" not in str(caught.value)
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    "fault",
    [
        Fault(Action.REFUSE, "PUT", "partNumber", chance=0.4),
        Fault(Action.FLIP_REQUEST, "PUT", "partNumber", times=2),
        Fault(Action.RESET_AFTER, "PUT", "partNumber", times=2),
        Fault(Action.RESET_AFTER, "POST", "uploadId", times=1),
        Fault(Action.APPLY_THEN_REFUSE, "POST", "uploadId", times=1, status=500),
        Fault(Action.APPLY_THEN_REFUSE, "POST", "uploadId", times=1, status=200, code="InternalError"),
        Fault(Action.FLIP_ANSWER, "GET", times=1),
    ],
    ids=lambda fault: f"{fault.action} {fault.status}",
)
def test_multipart_through_faults(
    proxy: FaultProxy, bucket: str, raw: Raw, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    source = big_file(tmp_path, monkeypatch)
    backend = s3.S3Backend(f"s3://{bucket}/p", patience=PATIENT)
    proxy.set(fault)
    backend.put_file("x/big", source, sha256=digest_bytes(source.read_bytes()), read_back=True)
    assert proxy.fired[fault] > 0
    assert raw.read("x/big") == source.read_bytes()
    assert "Uploads" not in raw.client.list_multipart_uploads(Bucket=bucket)


def test_a_multipart_upload_that_fails_is_aborted(
    proxy: FaultProxy, bucket: str, raw: Raw, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = big_file(tmp_path, monkeypatch)
    backend = s3.S3Backend(f"s3://{bucket}/p", patience=IMPATIENT)
    proxy.set(Fault(Action.REFUSE, "PUT", "partNumber=2", status=500))
    with pytest.raises(CommitUnknownError):
        backend.put_file("x/big", source, sha256=digest_bytes(source.read_bytes()), read_back=True)
    assert "Uploads" not in raw.client.list_multipart_uploads(Bucket=bucket)
    assert raw.listing() == []


def big_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(s3, "SINGLE_BYTES", 1 << 20)
    monkeypatch.setattr(s3, "PART_BYTES", 5 << 20)
    source = folder / "big"
    source.write_bytes(os.urandom((11 << 20) + 3))
    return source
