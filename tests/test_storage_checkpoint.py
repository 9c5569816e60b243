"""Let only whole, safe files into checkpoints and only the bytes of their digest out."""

from __future__ import annotations

import json
import os
import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from storage import layout, record
from storage.digest import canonical_json, digest_bytes
from storage.errors import CorruptArtifactError, StoreError
from storage.store import Store, open_store

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Raw


@pytest.fixture
def store(store_url: str, tmp_path: Path) -> Store:
    return open_store(store_url, cache=tmp_path / "cache")


@pytest.fixture
def local(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "local"), cache=tmp_path / "cache")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make what `save_pretrained` leaves, small."""
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"w": np.arange(6.0).reshape(2, 3), "b": np.zeros(0)}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text('{"hidden_size": 3}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "merges.txt").write_text("a b")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def elsewhere(store: Store, tmp_path: Path) -> Store:
    return open_store(store.url, cache=tmp_path / f"cache-{os.urandom(4).hex()}")


def test_a_checkpoint_comes_back_whole(store: Store, folder: Path, tmp_path: Path) -> None:
    ref = store.put_checkpoint(folder)
    got = elsewhere(store, tmp_path).fetch_checkpoint(ref.digest)
    assert {path.name: path.read_bytes() for path in got.iterdir()} == {
        path.name: path.read_bytes() for path in folder.iterdir()
    }
    assert load_file(got / "model.safetensors")["w"].sum() == 15
    assert ref.bytes == sum(path.stat().st_size for path in folder.iterdir())


def test_equal_files_are_one_checkpoint_and_other_weights_another(store: Store, raw: Raw, folder: Path) -> None:
    """Trap 2: a model trained again at the same path is another checkpoint."""
    first = store.put_checkpoint(folder)
    keys = raw.listing()
    assert store.put_checkpoint(folder) == first
    assert raw.listing() == keys
    save_file({"w": np.ones((2, 3))}, folder / "model.safetensors")
    assert store.put_checkpoint(folder).digest != first.digest


@pytest.mark.parametrize("name", ["training_args.bin", "optimizer.pt", "rng_state.pth", "model.pkl", ".hidden.json"])
def test_pickles_and_strangers_are_refused(local: Store, folder: Path, name: str) -> None:
    """Trap 33: trainers drop pickles beside the weights; none gets into the store."""
    (folder / name).write_bytes(pickle.dumps({"lr": 1}))
    with pytest.raises(StoreError, match=name.replace(".", r"\.")):
        local.put_checkpoint(folder)
    assert list(local.backend.folders("checkpoints/")) == []


def test_a_pickle_under_the_name_of_weights_is_refused(local: Store, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(pickle.dumps({"lr": list(range(100))}))
    with pytest.raises(StoreError, match="not a whole safetensors file"):
        local.put_checkpoint(folder)


def test_cut_weights_broken_json_links_folders_and_nothing_are_refused(local: Store, folder: Path) -> None:
    """Trap 6: a half-written checkpoint is none."""
    whole = (folder / "model.safetensors").read_bytes()
    for data in (whole[:-1], whole + b"x", whole[:20], b""):
        (folder / "model.safetensors").write_bytes(data)
        with pytest.raises(StoreError, match="not a whole safetensors file"):
            local.put_checkpoint(folder)
    (folder / "model.safetensors").write_bytes(whole)
    (folder / "config.json").write_text('{"hidden')
    with pytest.raises(StoreError, match=r"config.json is not JSON"):
        local.put_checkpoint(folder)
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("/etc/hostname")
    with pytest.raises(StoreError, match="not a plain file"):
        local.put_checkpoint(folder)
    (folder / "config.json").unlink()
    (folder / "sub.json").mkdir()
    with pytest.raises(StoreError, match="not a plain file"):
        local.put_checkpoint(folder)
    (folder / "sub.json").rmdir()
    (folder / "model.safetensors").unlink()
    with pytest.raises(StoreError, match=r"no .safetensors file"):
        local.put_checkpoint(folder)


def test_a_flipped_byte_and_a_missing_file_are_refused(store: Store, raw: Raw, folder: Path, tmp_path: Path) -> None:
    ref = store.put_checkpoint(folder)
    key = layout.checkpoint(ref.digest, "model.safetensors")
    whole = raw.read(key)
    raw.write(key, whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CorruptArtifactError, match=store.backend.address(key)):
        elsewhere(store, tmp_path).fetch_checkpoint(ref.digest)
    raw.delete(key)
    with pytest.raises(CorruptArtifactError, match=r"model.safetensors is missing"):
        elsewhere(store, tmp_path).fetch_checkpoint(ref.digest)
    store.put_checkpoint(folder)  # the same weights again mend it
    elsewhere(store, tmp_path).fetch_checkpoint(ref.digest)


def test_a_changed_index_is_refused(store: Store, raw: Raw, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "READ_PAUSE_S", 0)
    ref = store.put_checkpoint(folder)
    key = layout.checkpoint_index(ref.digest)
    raw.write(key, raw.read(key).replace(b"config", b"konfig"))
    with pytest.raises(CorruptArtifactError, match=r"index.json has digest"):
        store.fetch_checkpoint(ref.digest)
    with pytest.raises(StoreError, match=r"checkpoints/0{64}/index.json is missing"):
        store.fetch_checkpoint("0" * 64)


@pytest.mark.parametrize("name", ["run.pkl", "../model.safetensors", "/etc/passwd", "index.json"])
def test_a_poisoned_index_writes_nothing(local: Store, tmp_path: Path, name: str) -> None:
    poison: dict[str, Any] = {"files": [{"name": name, "bytes": 1, "sha256": digest_bytes(b"x")}]}
    index = canonical_json(poison)
    digest = digest_bytes(index)
    local.backend.put_new(layout.checkpoint_index(digest), index)
    with pytest.raises(StoreError, match=r"no place in a checkpoint|can't be a name"):
        local.fetch_checkpoint(digest)
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []


def test_a_planted_pickle_with_a_right_digest_is_refused(store: Store, raw: Raw) -> None:
    data = pickle.dumps(print)
    poison = {"files": [{"name": "model.safetensors", "bytes": len(data), "sha256": digest_bytes(data)}]}
    index = canonical_json(poison)
    digest = digest_bytes(index)
    raw.write(layout.checkpoint_index(digest), index)
    raw.write(layout.checkpoint(digest, "model.safetensors"), data)
    with pytest.raises(StoreError, match="not a whole safetensors file"):
        store.fetch_checkpoint(digest)


def test_changed_files_of_the_cached_folder_are_fetched_again(store: Store, folder: Path, tmp_path: Path) -> None:
    ref = store.put_checkpoint(folder)
    got = store.fetch_checkpoint(ref.digest)
    assert store.fetch_checkpoint(ref.digest) == got
    (got / "config.json").write_text(json.dumps({"hidden_size": 4}))
    (got / "evil.json").write_text("{}")
    again = open_store(store.url, cache=tmp_path / "cache").fetch_checkpoint(ref.digest)
    assert again == got
    assert (again / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    assert not (again / "evil.json").exists()
