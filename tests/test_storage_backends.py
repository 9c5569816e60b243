"""Hold every backend to one conformance suite."""

from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from storage import s3
from storage.backend import NotFoundError
from storage.digest import digest_bytes
from storage.errors import CorruptArtifactError, StoreError
from storage.local import LocalBackend
from storage.probe import probe
from storage.s3_calls import Patience

if TYPE_CHECKING:
    from conftest import Raw, S3Server

    from storage.backend import Backend

PATIENCE = Patience(deadline=10.0, contact=3.0, first_pause=0.01, longest_pause=0.2, silence=5.0)


@pytest.fixture
def backend(store_url: str) -> Backend:
    return s3.S3Backend(store_url, patience=PATIENCE) if store_url.startswith("s3://") else LocalBackend(store_url)


def test_get_returns_what_was_put(backend: Backend) -> None:
    assert backend.put_new("steps/a/0/manifest.json", b"one")
    assert backend.get("steps/a/0/manifest.json") == b"one"
    assert backend.size("steps/a/0/manifest.json") == 3
    assert backend.url in backend.address("steps/a/0/manifest.json")


def test_missing_object_is_a_key_error_that_names_the_address(backend: Backend, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="steps/none") as caught:
        backend.get("steps/none")
    assert isinstance(caught.value, KeyError)
    with pytest.raises(NotFoundError):
        backend.get_file("steps/none", tmp_path / "out")
    assert backend.size("steps/none") is None


def test_second_create_loses_and_changes_nothing(backend: Backend) -> None:
    assert backend.put_new("a", b"first")
    assert not backend.put_new("a", b"second")
    assert backend.get("a") == b"first"


def test_repeating_an_own_create_counts_as_won(backend: Backend) -> None:
    assert backend.put_new("a", b"mine, nonce 1")
    assert backend.put_new("a", b"mine, nonce 1")


def test_one_of_many_racing_creates_wins(backend: Backend) -> None:
    for number in range(5):
        start = threading.Barrier(8)

        def create(racer: int, key: str = f"race/{number}", start: threading.Barrier = start) -> bool:
            start.wait()
            return backend.put_new(key, b"racer %d" % racer)

        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(create, range(8)))
        assert won.count(True) == 1
        assert backend.get(f"race/{number}") == b"racer %d" % won.index(True)


def test_put_replaces(backend: Backend) -> None:
    backend.put("runs/r/lease/1.json", b"beat 1")
    backend.put("runs/r/lease/1.json", b"beat 2")
    assert backend.get("runs/r/lease/1.json") == b"beat 2"


@pytest.mark.parametrize("size", [0, 1, 5_000_000])
def test_files_come_back_as_they_went(backend: Backend, tmp_path: Path, size: int) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(os.urandom(size))
    for _ in range(2):  # storing the same again is a no-op
        backend.put_file("p/part", source, sha256=digest_bytes(source.read_bytes()), read_back=True)
    backend.get_file("p/part", target)
    assert target.read_bytes() == source.read_bytes()


def test_damaged_payload_under_its_name_is_replaced(backend: Backend, raw: Raw, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"payload")
    raw.write("p/part", b"pay")
    backend.put_file("p/part", source, sha256=digest_bytes(b"payload"), read_back=True)
    assert raw.read("p/part") == b"payload"


def test_file_that_is_not_what_its_digest_says_is_not_stored(backend: Backend, raw: Raw, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"changed after hashing")
    with pytest.raises(CorruptArtifactError, match="source"):
        backend.put_file("p/part", source, sha256=digest_bytes(b"before"), read_back=True)
    assert raw.listing() == []


def test_delete_is_idempotent(backend: Backend) -> None:
    backend.put_new("a/b", b"x")
    backend.delete("a/b")
    backend.delete("a/b")
    assert backend.size("a/b") is None


@pytest.mark.parametrize("seam", ["stat", "lstat", "unlink"])
def test_an_error_of_the_disk_is_one_of_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seam: str) -> None:
    """A shared folder loses its files for a while; who waits for the store to come back waits for this too."""
    backend = LocalBackend(tmp_path / "store")
    backend.put_new("a", b"x")

    def fail(path: Path, *_: object, follow_symlinks: bool = True, **__: object) -> os.stat_result:
        if seam == "stat" and not follow_symlinks:  # as `lstat` calls it
            return os.lstat(path)
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(Path, seam, fail)
    call = backend.delete if seam == "unlink" else backend.size
    with pytest.raises(StoreError, match=r"can't (look at|delete) .*/a: Stale file handle"):
        call("a")


def test_a_temporary_file_that_cannot_be_deleted_fails_no_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = LocalBackend(tmp_path / "store")

    def fail(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Path, "unlink", fail)
    assert backend.put_new("a", b"x")
    backend.put("b", b"y")
    assert sorted(backend.list("")) == ["a", "b"]


def test_list_and_folders_see_the_prefix_only(backend: Backend) -> None:
    for key in ("runs/r2/run.json", "runs/r1/run.json", "runs/r1/log/00000000.json", "steps/k/0/plan.json"):
        backend.put_new(key, b"x")
    assert sorted(backend.list("runs/r1/")) == ["runs/r1/log/00000000.json", "runs/r1/run.json"]
    assert len(list(backend.list(""))) == 4
    assert list(backend.folders("runs/")) == ["r1", "r2"]
    assert list(backend.folders("refs/")) == []


@pytest.mark.parametrize("key", ["../a", "a/../b", "/a", "a//b", "", "a/.hidden", "a\nb", "ü", "a/" + "x" * 201])
def test_keys_that_could_leave_their_place_are_refused(backend: Backend, key: str) -> None:
    for call in (backend.get, backend.size, backend.delete):
        with pytest.raises(StoreError, match="can't be a name"):
            call(key)
    with pytest.raises(StoreError, match="can't be a name"):
        backend.put_new(key, b"x")


def test_probe_accepts_a_safe_place_and_leaves_nothing(backend: Backend, raw: Raw) -> None:
    assert probe(backend)["races"] == 10
    assert raw.listing() == []


def test_probe_refuses_a_place_that_overwrites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = LocalBackend(tmp_path)
    monkeypatch.setattr(LocalBackend, "put_new", lambda self, key, data: self.put(key, data) or True)
    with pytest.raises(StoreError, match="a second create overwrote the first"):
        probe(backend)


def test_probe_refuses_a_create_that_is_exclusive_one_at_a_time_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Do what OpenStack Swift does: look first, then write."""

    def look_then_write(self: LocalBackend, key: str, data: bytes) -> bool:
        if (size := self.size(key)) is not None:
            return size == len(data) and self.get(key) == data
        threading.Event().wait(0.005)
        self.put(key, data)
        return True

    monkeypatch.setattr(LocalBackend, "put_new", look_then_write)
    with pytest.raises(StoreError, match="races had"):
        probe(LocalBackend(tmp_path), rounds=3, threads=6)


def test_symbolic_links_in_a_local_store_are_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "run.json").write_bytes(b"private")
    (tmp_path / "store" / "runs").mkdir(parents=True)
    (tmp_path / "store" / "runs" / "r").symlink_to(tmp_path / "secret")
    backend = LocalBackend(tmp_path / "store")
    for call in (backend.get, backend.size, backend.delete):
        with pytest.raises(StoreError, match="symbolic link"):
            call("runs/r/run.json")
    assert list(backend.folders("runs/")) == []


def test_local_write_failures_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "steps").write_text("a file where a folder should be")
    with pytest.raises(StoreError, match=r"can't .*steps/a"):
        LocalBackend(tmp_path).put_new("steps/a/plan.json", b"x")


def test_a_crash_between_write_and_link_leaves_no_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    backend = LocalBackend(tmp_path)
    monkeypatch.setattr(os, "link", crash)
    with pytest.raises(KeyboardInterrupt):
        backend.put_new("a", b"x")
    assert backend.size("a") is None
    assert list(backend.list("")) == []


@pytest.mark.parametrize(
    "url", ["s3://", "s3://UPPER/x", "s3://user:secret@bucket/x", "s3://b/x?y", "s3://bucket/../x"]
)
def test_addresses_that_are_none_are_refused_without_repeating_them(url: str) -> None:
    with pytest.raises(StoreError) as caught:
        s3.S3Backend(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("extra", [-1, 0, 1, 5 << 20])
def test_multipart_at_its_bounds(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ministack: S3Server, extra: int
) -> None:
    monkeypatch.setattr(s3, "SINGLE_BYTES", 1 << 20)
    monkeypatch.setattr(s3, "PART_BYTES", 5 << 20)
    backend = s3.S3Backend(f"s3://{bucket}", patience=PATIENCE)
    source = tmp_path / "source"
    source.write_bytes(os.urandom((5 << 20) + extra))
    backend.put_file("p/big", source, sha256=digest_bytes(source.read_bytes()), read_back=True)
    backend.get_file("p/big", tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == source.read_bytes()
    assert "Uploads" not in ministack.client.list_multipart_uploads(Bucket=bucket)


def test_list_reads_all_pages(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "PAGE_KEYS", 10)
    backend = s3.S3Backend(f"s3://{bucket}/p", patience=PATIENCE)
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda number: backend.put_new(f"x/{number:02d}", b""), range(25)))
    assert sorted(backend.list("x/")) == [f"x/{number:02d}" for number in range(25)]


def test_absent_bucket_and_endpoint_are_named(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoreError, match="bucket of s3://none-such/x doesn't exist"):
        s3.S3Backend("s3://none-such", patience=PATIENCE).get("x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StoreError, match=r"can't reach s3://none-such/x at 127.0.0.1:9"):
        s3.S3Backend("s3://none-such", patience=Patience(contact=0.3)).get("x")


def test_absent_credentials_are_named(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(StoreError, match="no credentials for"):
        s3.S3Backend(f"s3://{bucket}", patience=PATIENCE).get("x")


def test_no_secret_in_reprs_and_errors(store_url: str, backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotFoundError) as caught:
        backend.get("none")
    texts = [repr(backend), str(backend), repr(caught.value), repr(vars(caught.value)), backend.url]
    assert not [text for text in texts if "testing-secret" in text]


def test_backend_works_in_a_forked_child(backend: Backend) -> None:
    backend.put_new("a", b"parent")
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if backend.get("a") == b"parent" and backend.put_new("b", b"child") else 1)
        except BaseException:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert backend.get("b") == b"child"
