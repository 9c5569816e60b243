"""A training that was killed goes on from the store where nothing of it is on the disk."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trained
from tiny_model import tiny_model
from training_rows import dpo_rows, sft_rows

from storage.store import Store, open_store

if TYPE_CHECKING:
    import pyarrow as pa
    from conftest import Raw

    from configs.run import RunConfig
    from storage.manifest import Manifest
    from tasks.models import Model

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_fsync")]

KILLED_AT, SAVE_EVERY = 5, 2


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("base"))


def config(folder: Path, store: str, artifact: str) -> RunConfig:
    """Train an adapter with dropout (random numbers go on) by SFT, and all weights by DPO."""
    own: dict[str, Any] = {"lora": trained.ADAPTER | {"dropout": 0.2}}
    if artifact == "dpo":
        own = {"lora": None, "learning_rate": 1e-3}
    return trained.described(folder, store=store, **own, batch_size=8, epochs=3, save_every=SAVE_EVERY, resume="store")


class Killed:
    """Hold what a training left in the store that died at train step 5, its work folder deleted."""

    def __init__(self, base: Path, folder: Path, url: str, artifact: str) -> None:
        self.folder, self.url, self.artifact = folder, url, artifact
        self.store: Store = open_store(url, cache=folder / "cache")
        self.base = trained.put_base(self.store, base)
        self.rows = trained.put_rows(self.store, artifact, sft_rows(21) if artifact == "sft" else dpo_rows(21))
        code = (
            "import os, sys; from pathlib import Path; import test_resume_store; from tasks.models import Model; "
            "test_resume_store.go(Path(sys.argv[1]), sys.argv[2], sys.argv[3], Model(sys.argv[4]), "
            f"lambda told: os._exit(77) if told.get('done') == {KILLED_AT} else None)"
        )
        tests = Path(__file__).parent
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent)])}
        command = [sys.executable, "-c", code, str(folder), url, artifact, self.base.base]
        assert subprocess.run(command, env=environment, check=False).returncode == 77
        shutil.rmtree(folder / "work")

    def resume(self) -> tuple[Manifest, list[dict[str, Any]]]:
        heard: list[dict[str, Any]] = []
        manifest = go(self.folder, self.url, self.artifact, self.base, lambda event: heard.append(dict(event)))
        return manifest, heard

    def log(self, manifest: Manifest) -> pa.Table:
        return self.store.read(manifest.artifact("train_log"))


def go(folder: Path, url: str, artifact: str, base: Model, listen: Any) -> Manifest:
    store = open_store(url, cache=folder / "cache")
    rows = store.manifest(artifact * 20)
    assert rows is not None
    return trained.train(config(folder, url, artifact), rows, base, base, listen=listen)


def undisturbed(base: Path, folder: Path, artifact: str) -> pa.Table:
    store = open_store(str(folder / "store"))
    rows = trained.put_rows(store, artifact, sft_rows(21) if artifact == "sft" else dpo_rows(21))
    model = trained.put_base(store, base)
    return store.read(trained.train(config(folder, store.url, artifact), rows, model, model).artifact("train_log"))


def state(raw: Raw) -> list[str]:
    """List what is stored of unfinished steps; a folder may also hold the torn beginning of the killed write."""
    return [key for key in raw.listing() if "/state" in key and "/.tmp-" not in key]


@pytest.mark.parametrize("artifact", ["sft", "dpo"])
def test_a_killed_training_goes_on_from_the_store(
    base: Path, tmp_path: Path, store_url: str, raw: Raw, artifact: str
) -> None:
    """Traps 5 and 33: losses, rates and rows as undisturbed; one generation; no pickle, and nothing at the end."""
    killed = Killed(base, tmp_path / "killed", store_url, artifact)
    left = state(raw)
    assert len({key.split("/")[4] for key in left if "/state/" in key}) <= 2, "at most one is being replaced"
    assert all(key.endswith((".safetensors", ".json")) for key in left)
    for key in left:
        assert raw.read(key)[:2] not in (b"PK", b"\x80\x02", b"\x80\x04"), f"{key} is a pickle or a zip of pickles"
    record = json.loads(raw.read(next(key for key in left if key.endswith("/state.json"))))
    assert "trainer.safetensors" in {file["name"] for file in record["files"]}

    manifest, heard = killed.resume()
    assert manifest.facts["resumed_at"] == record["fields"]["train_step"] in (2, 4)
    assert not [event for event in heard if event["event"] == "warning"]
    assert next(event["done"] for event in heard if event["event"] == "progress") == manifest.facts["resumed_at"] + 1
    assert not state(raw)

    log, other = killed.log(manifest), undisturbed(base, tmp_path / "whole", artifact)
    for column in ("train_step", "epoch", "rows", "learning_rate"):
        assert log[column].to_pylist() == other[column].to_pylist()
    assert log["loss"].to_pylist() == pytest.approx(other["loss"].to_pylist(), abs=1e-6)


@pytest.mark.parametrize("damage", ["byte", "record", "file"])
def test_damaged_state_is_told_and_not_used(base: Path, tmp_path: Path, damage: str) -> None:
    url = str(tmp_path / "store")
    killed = Killed(base, tmp_path / "killed", url, "sft")
    (record,) = Path(url).rglob("state.json")
    (tensors,) = Path(url).rglob(f"{json.loads(record.read_text())['generation']}/trainer.safetensors")
    if damage == "file":
        tensors.unlink()
    else:
        path = tensors if damage == "byte" else record
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    manifest, heard = killed.resume()
    (warning,) = [event["message"] for event in heard if event["event"] == "warning"]
    assert warning.startswith(f"train: the state in the store can't be used ({url}/steps/")
    assert warning.endswith("; the step starts from its first train step")
    assert "\n" not in warning
    assert manifest.facts["resumed_at"] == 0
    assert manifest.facts["rows_seen"] == 63
    assert not list(Path(url).rglob("state.json"))
    assert not list(Path(url).rglob("state/*/[!.]*"))


def test_a_disk_that_is_full_costs_the_copy_and_not_the_training(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tasks.training.portable.save_file", full)
    store = open_store(str(tmp_path / "store"))
    rows, model = trained.put_rows(store, "sft", sft_rows(21)), trained.put_base(store, base)
    heard: list[dict[str, Any]] = []
    described = config(tmp_path, store.url, "sft")
    manifest = trained.train(described, rows, model, model, listen=lambda event: heard.append(dict(event)))
    assert manifest.artifact("train_log").rows == 8
    told = [event["message"] for event in heard if event["event"] == "warning"]
    assert told
    assert all("No space left" in one and "goes on" in one for one in told)


def test_what_a_job_left_that_was_killed_behind_its_commit_goes_at_the_next_look(base: Path, tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    killed = Killed(base, tmp_path / "killed", url, "sft")
    (attempt,) = {path.parent for path in Path(url).rglob("state.json")}
    shutil.copytree(attempt / "state", tmp_path / "kept")
    manifest, _ = killed.resume()
    shutil.copytree(tmp_path / "kept", attempt / "state", dirs_exist_ok=True)
    again, heard = killed.resume()
    assert again.key == manifest.key
    assert [event["reused"] for event in heard if event["event"] == "step"] == [True]
    assert not list(Path(url).rglob("state/*/[!.]*"))
