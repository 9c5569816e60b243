"""Inputs are fetched whole, hashed once, and refused in one sentence with the full address."""

from __future__ import annotations

import hashlib
import os
import time
from typing import TYPE_CHECKING

import pytest

import storage.inputs as inputs
from storage.errors import DataError, StoreError
from storage.inputs import fetch_input

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CONTENT = b'{"prompt": "x"}\n'
DIGEST = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """List the files that were really hashed."""
    files: list[str] = []
    real = inputs._hash
    monkeypatch.setattr(inputs, "_hash", lambda path: files.append(path.name) or real(path))
    return files


def old(path: Path, content: bytes = CONTENT, age: float = 100) -> Path:
    path.write_bytes(content)
    os.utime(path, (time.time() - age,) * 2)
    return path


def test_local_file_stays_where_it_is_and_is_hashed_once(tmp_path: Path, hashed: list[str]) -> None:
    file = old(tmp_path / "pairs.jsonl")
    first = fetch_input(str(file), tmp_path / "cache")
    assert first == inputs.InputFile(str(file), file, DIGEST, len(CONTENT))
    assert fetch_input(str(file), tmp_path / "cache") == first
    assert hashed == ["pairs.jsonl"]


def test_changed_file_is_hashed_again(tmp_path: Path, hashed: list[str]) -> None:
    file = old(tmp_path / "pairs.jsonl")
    fetch_input(str(file), tmp_path / "cache")
    old(file, CONTENT.replace(b"x", b"y"), age=50)
    assert fetch_input(str(file), tmp_path / "cache").sha256 != DIGEST
    old(tmp_path / "other", CONTENT.replace(b"x", b"z"), age=0)
    os.utime(tmp_path / "other", ns=(file.stat().st_mtime_ns,) * 2)  # same path, size and mtime, another inode
    os.replace(tmp_path / "other", file)
    assert fetch_input(str(file), tmp_path / "cache").sha256 == hashlib.sha256(b'{"prompt": "z"}\n').hexdigest()


def test_fresh_file_is_not_remembered(tmp_path: Path, hashed: list[str]) -> None:
    file = old(tmp_path / "pairs.jsonl", age=0)
    fetch_input(str(file), tmp_path / "cache")
    fetch_input(str(file), tmp_path / "cache")
    assert len(hashed) == 2


@pytest.mark.parametrize("junk", [b"", b"\xff", b"[]", b'{"x": 1', b"null"])
def test_damaged_memory_only_costs_a_hashing(tmp_path: Path, junk: bytes) -> None:
    file = old(tmp_path / "pairs.jsonl")
    (tmp_path / "inputs.json").write_bytes(junk)
    assert fetch_input(str(file), tmp_path).sha256 == DIGEST
    assert fetch_input(str(file), tmp_path).sha256 == DIGEST


def test_relative_path_is_told_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=f"{tmp_path}/none.jsonl does not exist"):
        fetch_input("none.jsonl", tmp_path / "cache")


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for url, words in {
        str(tmp_path): "is a folder",
        str(tmp_path / "pipe"): "is a pipe",
        str(tmp_path / "dangling"): "does not exist",
        "a\0b": "does not exist",
        "x" * 5000: "does not exist",
        "https://example.org/pairs.jsonl": "local path or s3://",
    }.items():
        with pytest.raises(DataError, match=words):
            fetch_input(url, tmp_path / "cache")


def test_forbidden_file_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = old(tmp_path / "pairs.jsonl")

    def refuse(path: str) -> os.stat_result:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(inputs.os, "stat", refuse)  # root may read everything: the refusal is played
    with pytest.raises(DataError, match=f"{file} may not be read"):
        fetch_input(str(file), tmp_path / "cache")


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    pytest.importorskip("moto", reason="needs moto of the dev extra")
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(s3: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[object]:
    import s3fs

    for name, value in {
        "AWS_ENDPOINT_URL": s3,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    files = s3fs.S3FileSystem(endpoint_url=s3, use_listings_cache=False, skip_instance_cache=True)
    if not files.exists("data"):
        files.mkdir("data")
    return files


def test_object_is_fetched_whole_once_while_its_etag_stays(
    bucket: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.pipe_file("data/set/pairs.jsonl", CONTENT)
    downloads: list[str] = []
    real = inputs._download
    monkeypatch.setattr(inputs, "_download", lambda files, url, cache: downloads.append(url) or real(files, url, cache))
    url = "s3://data/set/pairs.jsonl"
    found = fetch_input(url, tmp_path)
    assert found == inputs.InputFile(url, tmp_path / DIGEST, DIGEST, len(CONTENT))
    assert found.path.read_bytes() == CONTENT
    assert fetch_input(url, tmp_path) == found
    assert downloads == [url]
    found.path.write_bytes(CONTENT.replace(b"x", b"y"))  # a damaged copy is not believed
    assert fetch_input(url, tmp_path) == found
    assert found.path.read_bytes() == CONTENT
    bucket.pipe_file("data/set/pairs.jsonl", CONTENT * 2)
    assert fetch_input(url, tmp_path).bytes == 2 * len(CONTENT)
    assert not list(tmp_path.glob("fetch-*"))


def test_object_cut_on_its_way_is_refused(bucket: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket.pipe_file("data/cut.jsonl", CONTENT)
    real = inputs._download

    def cut(files: object, url: str, cache: Path) -> Path:
        path = real(files, url, cache)
        path.write_bytes(CONTENT[:5])
        return path

    monkeypatch.setattr(inputs, "_download", cut)
    with pytest.raises(StoreError, match="5 of 16 bytes"):
        fetch_input("s3://data/cut.jsonl", tmp_path)
    assert not list(tmp_path.glob("fetch-*"))


def test_missing_objects_buckets_and_folders_are_told_apart(bucket: object, tmp_path: Path, s3: str) -> None:
    bucket.pipe_file("data/folder/pairs.jsonl", CONTENT)
    with pytest.raises(DataError, match=rf"s3://data/none\.jsonl does not exist at {s3}"):
        fetch_input("s3://data/none.jsonl", tmp_path)
    with pytest.raises(StoreError, match=rf"s3://nobucket/x\.jsonl: there is no bucket 'nobucket' at {s3}"):
        fetch_input("s3://nobucket/x.jsonl", tmp_path)
    for url in ("s3://data/folder", "s3://data/folder/", "s3://data", "s3://"):
        with pytest.raises(DataError, match=r"folder|names no object"):
            fetch_input(url, tmp_path)


def test_closed_endpoint_is_one_sentence(bucket: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StoreError, match=r"s3://data/x\.jsonl can't be read"):
        fetch_input("s3://data/x.jsonl", tmp_path)


def test_missing_credentials_are_told(bucket: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    with pytest.raises(StoreError, match="needs credentials"):
        fetch_input("s3://data/x.jsonl", tmp_path)


def test_forbidden_object_is_told(bucket: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("Forbidden")

    monkeypatch.setattr(inputs, "_info", refuse)
    with pytest.raises(StoreError, match=r"s3://data/x\.jsonl may not be read: allow s3:GetObject"):
        fetch_input("s3://data/x.jsonl", tmp_path)
