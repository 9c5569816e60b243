"""Weights outlive the steps that name them, and a collector that ends badly harms nobody who comes after it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from orchestrators import QUICK
from test_collect import KEY, OTHER, remove, run_that_used, weights

from storage import layout, lease
from storage.collect import Collection, collect
from storage.store import Store, open_store

if TYPE_CHECKING:
    from pathlib import Path

    from storage.manifest import Manifest

pytestmark = pytest.mark.usefixtures("no_fsync")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(lease, "PACE", QUICK)
    monkeypatch.setattr("storage.store.LOCAL_RACES", {"rounds": 1, "threads": 2})
    return open_store(str(tmp_path / "store"), cache=tmp_path / "cache")


def base(store: Store, key: str, digest: str) -> Manifest:
    """Commit a step that made a model."""
    parts: dict[str, Any] = {"inputs": {}, "key_parts": {}, "counts": {}}
    facts = {"model": {"base": digest, "adapter": None}}
    return store.attempt(key).commit(step="base", version=1, facts=facts, **parts)


def gc(store: Store) -> Collection:
    return collect(store, delete=True, grace_s=0)


def names(found: Collection) -> tuple[set[str], set[str]]:
    return {one.name for one in found.waiting}, {one.name for one in found.deleted}


def test_weights_written_down_before_their_step_was_there_stay_as_long_as_it(store: Store, tmp_path: Path) -> None:
    """The job is killed behind its weights; a collector writes them down; the resumed job commits; the run goes."""
    folder = weights(tmp_path / "weights", 1)
    digest = store.put_checkpoint(folder).digest
    assert names(gc(store)) == ({f"checkpoints/{digest}"}, set())
    assert store.put_checkpoint(folder).digest == digest
    base(store, KEY, digest)
    remove(store, run := run_that_used(store, "run", KEY))

    second = gc(store)
    assert names(second) == ({f"steps/{KEY}/0", f"runs/{run}"}, set())
    assert second.spared == {f"checkpoints/{digest}": f"step {KEY[:12]}, which counts, names it"}
    reused = run_that_used(store, "reused", KEY)
    assert store.fetch_checkpoint(digest).is_dir()

    remove(store, reused)
    for _ in range(3):
        gc(store)
    assert list(store.backend.list(layout.CHECKPOINTS)) == list(store.backend.list(layout.COLLECTOR)) == []


def test_weights_that_two_steps_made_stay_as_long_as_one_counts(store: Store, tmp_path: Path) -> None:
    digest = store.put_checkpoint(weights(tmp_path / "weights", 1)).digest
    base(store, KEY, digest)
    gc(store)
    base(store, OTHER, digest)
    assert names(gc(store)) == ({f"steps/{OTHER}/0"}, {f"steps/{KEY}/0"})
    run_that_used(store, "run", OTHER)
    assert store.fetch_checkpoint(digest).is_dir()


def test_what_was_used_in_between_waits_anew(store: Store, tmp_path: Path) -> None:
    """What one pass wrote down and the next found in use is written down again when it is let go."""
    kept = store.put_checkpoint(weights(tmp_path / "one", 1)).digest
    lost = store.put_checkpoint(weights(tmp_path / "two", 2)).digest
    base(store, KEY, kept)
    both = {f"steps/{KEY}/0", f"checkpoints/{kept}"}
    assert names(gc(store)) == (both | {f"checkpoints/{lost}"}, set())
    run = run_that_used(store, "run", KEY)
    collect(store, delete=True, grace_s=3600)
    remove(store, run)
    assert names(gc(store)) == (both | {f"runs/{run}"}, {f"checkpoints/{lost}"})
    assert names(gc(store)) == (set(), both | {f"runs/{run}"})
    assert list(store.backend.list(layout.COLLECTOR)) == []
