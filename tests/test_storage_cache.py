"""Check that the cache hands out nothing but verified bytes and keeps its limit."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import pytest
from test_storage_store import in_children

from storage import cache as cache_module
from storage.cache import ObjectCache
from storage.digest import digest_bytes
from storage.errors import CorruptArtifactError, StoreError
from storage.local import LocalBackend

if TYPE_CHECKING:
    from pathlib import Path

DATA = os.urandom(50_000)
SHA = digest_bytes(DATA)
KEY = "steps/k/0/judgments/part"


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "FETCH_PAUSE_S", 0)


@pytest.fixture
def backend(tmp_path: Path) -> LocalBackend:
    backend = LocalBackend(tmp_path / "store")
    backend.put_new(KEY, DATA)
    return backend


def fetch(cache: ObjectCache, backend: Any, key: str = KEY, data: bytes = DATA) -> Path:
    return cache.fetch(backend, key, sha256=digest_bytes(data), size=len(data))


def test_an_object_is_fetched_once(backend: LocalBackend, tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path / "cache")
    path = fetch(cache, backend)
    assert path.read_bytes() == DATA
    backend.delete(KEY)
    assert fetch(cache, backend) == path
    assert fetch(ObjectCache(tmp_path / "cache"), backend) == path


@pytest.mark.parametrize(
    "planted", [DATA[:-1] + bytes([DATA[-1] ^ 1]), DATA[:100], b""], ids=["flipped byte", "cut short", "empty"]
)
def test_a_bad_planted_file_is_evicted(backend: LocalBackend, tmp_path: Path, planted: bytes) -> None:
    (tmp_path / "cache" / "objects").mkdir(parents=True)
    (tmp_path / "cache" / "objects" / SHA).write_bytes(planted)
    assert fetch(ObjectCache(tmp_path / "cache"), backend).read_bytes() == DATA


def test_a_planted_link_is_not_followed(backend: LocalBackend, tmp_path: Path) -> None:
    (tmp_path / "cache" / "objects").mkdir(parents=True)
    (tmp_path / "elsewhere").write_bytes(DATA)
    (tmp_path / "cache" / "objects" / SHA).symlink_to(tmp_path / "elsewhere")
    path = fetch(ObjectCache(tmp_path / "cache"), backend)
    assert path.read_bytes() == DATA
    assert not path.is_symlink()


def test_damage_on_the_way_is_mended_and_damage_in_the_store_is_named(backend: LocalBackend, tmp_path: Path) -> None:
    class Flaky:
        tries = 0

        def get_file(self, key: str, path: Path) -> None:
            self.tries += 1
            path.write_bytes(DATA if self.tries == 3 else DATA[:1000])

        def address(self, key: str) -> str:
            return f"s3://somewhere/{key}"

    flaky = Flaky()
    assert fetch(ObjectCache(tmp_path / "one"), flaky).read_bytes() == DATA
    assert flaky.tries == 3
    with pytest.raises(CorruptArtifactError, match=f"s3://somewhere/{KEY} holds 1000 bytes of digest"):
        fetch(ObjectCache(tmp_path / "two"), flaky)
    assert flaky.tries == 3 + cache_module.FETCH_TRIES
    assert [path for path in (tmp_path / "two").rglob("*") if path.is_file()] == []
    with pytest.raises(CorruptArtifactError, match="is missing"):
        fetch(ObjectCache(tmp_path / "two"), backend, "steps/none")


def test_least_recently_used_objects_go_first(backend: LocalBackend, tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path / "cache", limit_bytes=25_000, keep_s=0)
    paths = []
    for number in range(3):
        data = bytes([number]) * 10_000
        backend.put_new(f"k{number}", data)
        paths.append(fetch(cache, backend, f"k{number}", data))
        os.utime(paths[-1], (time.time() - 100 + number,) * 2)
        if number == 1:
            fetch(cache, backend, "k0", bytes([0]) * 10_000)  # used again, so k1 is the older one now
    assert [path.exists() for path in paths] == [True, False, True]


def test_what_was_just_used_outlives_the_limit(backend: LocalBackend, tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path / "cache", limit_bytes=1)
    assert fetch(cache, backend).exists()


def test_processes_filling_one_entry_all_get_it(backend: LocalBackend, tmp_path: Path) -> None:
    def fill() -> None:
        for number in range(20):
            path = fetch(ObjectCache(tmp_path / "cache" / str(number)), backend)
            assert digest_bytes(path.read_bytes()) == SHA

    assert in_children([fill, fill, fill]) == [0, 0, 0]
    assert list((tmp_path / "cache").rglob("tmp/*")) == []


def test_digests_from_outside_name_no_other_place(backend: LocalBackend, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="not a SHA-256"):
        ObjectCache(tmp_path / "cache").fetch(backend, KEY, sha256="../../x", size=1)
