"""Train through a store and a job, without a run around it: committed rows in, committed checkpoints out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import small

from storage.store import open_store
from tasks.models import Model

if TYPE_CHECKING:
    from pathlib import Path

    import pyarrow as pa

    from configs.run import RunConfig
    from storage.manifest import Manifest
    from storage.store import Store

ADAPTER = {"r": 4, "alpha": 8, "dropout": 0.0}


def described(folder: Path, *, store: str = "", **train: Any) -> RunConfig:
    """Describe trainings of a small model by DPO; `train` is laid over small settings."""
    given = {"kind": "trl", "lora": ADAPTER, "learning_rate": 1e-2, "per_device_batch": 4}
    return small.config(
        folder,
        method="star-dpo",
        bootstrap=None,
        split={"bootstrap": 0},
        model={"max_len": 128},
        train=given | train,
        store=store or str(folder / "store"),
    )


def put_base(store: Store, folder: Path) -> Model:
    """Put a model folder into the store."""
    return Model(store.put_checkpoint(folder).digest)


def put_rows(store: Store, artifact: str, table: pa.Table) -> Manifest:
    """Commit training rows as a step `pairs` would."""
    counts = {"in": table.num_rows, "kept": table.num_rows, "dropped": {}}
    return store.attempt(artifact * 20).commit(
        step="pairs", version=1, inputs={}, key_parts={}, counts=counts, facts={}, tables={artifact: table}
    )


def train(config: RunConfig, rows: Manifest, base: Model, previous: Model, *, listen: Any = None) -> Manifest:
    """Train one checkpoint in this process and give its manifest; the rows say by which method."""
    _, run = small.start(config, listen=listen)
    checkpoint = run.train(int("dpo" in rows.artifacts), rows, base, previous)
    manifest = open_store(config.store).manifest(str(checkpoint.train))
    assert manifest is not None
    return manifest
