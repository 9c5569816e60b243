"""A small run of the scripted engine and trainer: the whole loop in about a second, no model and no server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from configs.run import RunConfig
from storage.store import Store, open_store
from tasks.jobs.launch import InlineLauncher
from tasks.run import Run, create_run, open_run

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SECTIONS: Mapping[str, Mapping[str, Any]] = {
    "model": {"base": "unset", "max_len": 1024},
    "data": {
        "sources": [{"name": "made", "generator": {"categories": ["capitals", "question"], "count": 120}}],
        "suites": [{"name": "ood", "generator": {"categories": ["quotes"], "count": 12}}],
    },
    "split": {"dev": 0.1, "test": 0.1, "bootstrap": 12},
    "prompt": {"system": "Judge.", "user": "{prompt}\nA: {response_a}\nB: {response_b}"},
    "bootstrap": {"rationales": "generator"},
    "engine": {"kind": "scripted"},
    "sample": {"n": 4, "max_tokens": 64, "shard_pairs": 10},
    "train": {"kind": "scripted", "lora": {}, "learning_rate": 1e-4, "batch_size": 8},
    "evaluate": {"votes": 2, "dev_votes": 2, "shard_pairs": 10},
}


def base_folder(folder: Path) -> Path:
    """Write something that looks like a model to everything but an engine or a trainer."""
    import numpy as np
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file({"weight": np.arange(16, dtype=np.float32)}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "scripted"}')
    return folder


def config(folder: Path, **changes: Any) -> RunConfig:
    """Describe the run; changes are sections or keys laid over, one level deep."""
    values: dict[str, Any] = {
        "name": "small",
        "iterations": 3,
        "store": str(folder / "store"),
        "work": str(folder / "work"),
    }
    values |= {name: dict(section) for name, section in SECTIONS.items()}
    values["model"]["base"] = str(base_folder(folder / "base"))
    for name, change in changes.items():
        values[name] = {**values[name], **change} if isinstance(change, dict) and name in values else change
    return RunConfig.model_validate(values)


def start(described: RunConfig, *, run_id: str = "", listen: Any = None) -> tuple[Store, Run]:
    """Make a run, or open the one named, in this process."""
    store = open_store(described.store)
    run_id = run_id or create_run(store, described)
    return store, open_run(
        store, run_id, lambda work: InlineLauncher(), kind=Run, listen=listen or (lambda event: None)
    )
