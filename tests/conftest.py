"""Start a real S3 server for the tests that need one and keep the machine's own settings out of all tests."""

from __future__ import annotations

import functools
import os
import socket
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import botocore.session
import pytest
from botocore.config import Config

if TYPE_CHECKING:
    from collections.abc import Iterator

# One thread a process: the suite runs in several, and threads of OpenMP that wait for each other spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")

_FOREIGN = ("AWS_", "FSSPEC_", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "STARWHEEL_")
_PREFIX = "some/prefix"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put slow files first: the last file to end decides how long the suite takes."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(scope="session", autouse=True)
def _own_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Take away proxies, AWS settings and caches of the machine; give test credentials by the usual variables."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.upper().startswith(_FOREIGN):
                patch.delenv(name)
        patch.setenv("AWS_ACCESS_KEY_ID", "testing")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "testing-secret")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_CONFIG_FILE", str(home / "no-config"))
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(home / "no-credentials"))
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.setenv("XDG_CACHE_HOME", str(home / "cache"))
        # Every new client reads the description of S3 again, 0.2 s each time; one reading does for all tests.
        patch.setattr(botocore.session, "create_loader", functools.cache(botocore.session.create_loader))
        yield


@dataclass(frozen=True)
class S3Server:
    """A running ministack and a client of the tests' own, which uses nothing of the store under test."""

    url: str
    client: Any

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])


@pytest.fixture(scope="session")
def ministack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """Run ministack on a free port of 127.0.0.1 and end it by its process id."""
    folder = tmp_path_factory.mktemp("ministack")
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "ministack"],
        env=os.environ | _ministack_settings(folder, port),
        cwd=folder,
        stdout=(folder / "log").open("wb"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        _wait_for(port, process, folder / "log")
        url = f"http://127.0.0.1:{port}"
        yield S3Server(url, _client(url))
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture
def bucket(ministack: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make a bucket of this test alone and point the AWS variables at its server."""
    name = f"test-{uuid.uuid4().hex[:12]}"
    ministack.client.create_bucket(Bucket=name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", ministack.url)
    monkeypatch.setattr("storage.store.S3_RACES", {"rounds": 1, "threads": 4})  # one test runs the whole race
    return name


@pytest.fixture(params=["local", "s3"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Name an empty place for a store: a folder, then a bucket."""
    if request.param == "local":
        return str(tmp_path / "store")
    return f"s3://{request.getfixturevalue('bucket')}/{_PREFIX}"


@dataclass(frozen=True)
class Raw:
    """Read, change and list stored objects behind the back of the store under test."""

    folder: Path | None
    client: Any = None
    bucket: str = ""
    prefix: str = _PREFIX

    def read(self, key: str) -> bytes:
        if self.folder is not None:
            return (self.folder / key).read_bytes()
        return bytes(self.client.get_object(Bucket=self.bucket, Key=f"{self.prefix}/{key}")["Body"].read())

    def write(self, key: str, data: bytes) -> None:
        if self.folder is not None:
            (self.folder / key).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / key).write_bytes(data)
        else:
            self.client.put_object(Bucket=self.bucket, Key=f"{self.prefix}/{key}", Body=data)

    def delete(self, key: str) -> None:
        if self.folder is not None:
            (self.folder / key).unlink()
        else:
            self.client.delete_object(Bucket=self.bucket, Key=f"{self.prefix}/{key}")

    def listing(self) -> list[str]:
        if self.folder is not None:
            return sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file())
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=f"{self.prefix}/")
        return sorted(
            item["Key"].removeprefix(f"{self.prefix}/") for page in pages for item in page.get("Contents", [])
        )


@pytest.fixture
def raw(store_url: str, request: pytest.FixtureRequest) -> Raw:
    """Give access to the place of `store_url` that uses nothing of the store."""
    if store_url.startswith("s3://"):
        return Raw(None, request.getfixturevalue("ministack").client, request.getfixturevalue("bucket"))
    return Raw(Path(store_url))


def free_port() -> int:
    """Find a port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _ministack_settings(folder: Path, port: int) -> dict[str, str]:
    return {
        "BIND_HOST": "127.0.0.1",  # its default is every interface
        "GATEWAY_PORT": str(port),
        "SERVICES": "s3",
        "S3_PERSIST": "1",
        "S3_DATA_DIR": str(folder / "data"),
        "PERSIST_STATE": "1",
        "STATE_DIR": str(folder / "state"),
        "TMPDIR": str(folder),
        "LOG_LEVEL": "WARNING",
    }


def _wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise RuntimeError(f"ministack did not start: {log.read_text(errors='replace')[-2000:]}")


def _client(url: str) -> Any:
    config = Config(retries={"total_max_attempts": 1}, s3={"addressing_style": "path"}, max_pool_connections=32)
    return botocore.session.get_session().create_client("s3", endpoint_url=url, config=config)


@pytest.fixture(scope="module")
def no_fsync() -> Iterator[None]:
    """Leave out what guards against power cuts, for tests that make none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield
