"""Data sets of the hub are loaded by `datasets` from folders laid out like them, pinned to a commit, offline."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_formats import check, winner
from test_layouts import LAYOUTS

from storage.errors import DataError
from tasks.data import hub
from tasks.data.formats import read_pairs

ROOT = Path(__file__).resolve().parents[1]
CARD = """---
configs:
- config_name: default
  data_files:
  - {split: train_prefs, path: data/train_prefs-*}
  - {split: test_prefs, path: data/test_prefs-*}
- config_name: small
  data_files:
  - {split: train, path: small/*}
---
"""
MADE = ("ultrafeedback_binarized", "reward-bench", "hh-rlhf", "ultrainteract_pair", "pku-saferlhf")


def folder(where: Path, row: dict[str, Any], *files: str, card: str = "") -> str:
    for number, file in enumerate(files):
        (where / file).parent.mkdir(parents=True, exist_ok=True)
        rows = [row, row | {"id": str(number)} if "id" in row else row]
        pq.write_table(pa.Table.from_pylist([{**one, "id": str(one.get("id"))} for one in rows]), where / file)
    if card:
        (where / "README.md").write_text(card)
    return str(where)


@pytest.mark.parametrize("name", MADE)
def test_rows_of_the_hub_become_pairs(name: str, tmp_path: Path) -> None:
    row, layout = LAYOUTS[name]
    table = hub.load(folder(tmp_path / "set", row, "data/train-00000-of-00001.parquet"), revision=None)
    reading = check(read_pairs(table, name="x"))
    assert reading.layout == f"{layout} (table)"
    assert reading.counts == {"in": 2, "kept": 1, "dropped": {"duplicate": 1}}
    assert winner(reading.pairs.to_pylist()[0]) == "good"


def test_configs_and_splits(tmp_path: Path) -> None:
    row = LAYOUTS["ultrafeedback_binarized"][0]
    files = [f"data/{split}-00000-of-00001.parquet" for split in ("train_prefs", "test_prefs")]
    made = folder(tmp_path / "set", row, *files, "small/rows.parquet", card=CARD)
    assert hub.load(made, revision=None, config="default", split="test_prefs").num_rows == 2
    assert hub.load(made, revision=None, config="small").num_rows == 2
    for config, split, words in (
        ("default", None, "has the splits train_prefs, test_prefs: name one by `split`"),
        ("default", "train", "can't be loaded .*train.*: check config and split"),
        ("large", None, "can't be loaded .*large.*: check config and split"),
    ):
        with pytest.raises(DataError, match=words) as error:
            hub.load(made, revision=None, config=config, split=split)
        assert "\n" not in str(error.value)


LOAD = """
import sys
from tasks.data import hub
try:
    print(hub.load("who/what", revision=sys.argv[1]).num_rows)
except Exception as error:
    print(type(error).__name__, error)
print([name for name in ("torch", "transformers", "vllm") if name in sys.modules])
"""


def offline(home: Path, revision: str) -> list[str]:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(home)}
    call = [sys.executable, "-c", LOAD, revision]
    done = subprocess.run(call, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_another_commit_in_the_cache_is_never_taken_for_the_pinned_one(tmp_path: Path) -> None:
    """Where the hub can't be reached, `datasets` takes the latest copy of whatever commit its cache holds."""
    import datasets

    pinned, other = "1" * 40, "2" * 40
    made = folder(tmp_path / "what", LAYOUTS["reward-bench"][0], "data/train-00000-of-00001.parquet")
    datasets.load_dataset(made, cache_dir=str(tmp_path / "made"))
    cached = tmp_path / "home" / "datasets" / "at" / pinned / "-" / "who___what"
    shutil.copytree(next(path for path in (tmp_path / "made").iterdir() if path.name == "what"), cached)
    assert offline(tmp_path / "home", pinned) == ["2", "[]"]
    told, loaded = offline(tmp_path / "home", other)
    assert told.startswith(f"StoreError https://huggingface.co/datasets/who/what at {other} can't be reached")
    assert loaded == "[]"
