"""Weights outlive the steps that name them, and a collector that ends badly harms nobody who comes after it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from orchestrators import QUICK
from test_collect import KEY, OTHER, remove, run_that_used, weights
from turns import Side

from storage import holder, layout, lease, record
from storage.collect import Collection, collect
from storage.errors import StoreError, TransientError
from storage.local import LocalBackend
from storage.store import Store, open_store

if TYPE_CHECKING:
    from collections.abc import Iterator
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


# A maker whose claim fell silent, so that the collector doesn't see it: what it stored is looked at once it is logged.


@pytest.mark.parametrize(
    ("stop", "collected"),
    [
        ("put_file config.json", False),
        ("put_file model.safetensors", True),
        ("put_new index.json", True),
        ("put_new manifest.json", True),
    ],
)
def test_weights_that_were_collected_under_their_makers_hands_are_made_again(
    store: Store, tmp_path: Path, stop: str, collected: bool
) -> None:
    """Its files were found in their place, or its index was stored, before the collector deleted them."""
    folder = weights(tmp_path / "weights", 1)
    digest = store.put_checkpoint(folder).digest
    gc(store)

    def make(store: Store) -> tuple[int, bool]:
        log = store.run_log(store.create_run("run", {}, code_version="test"))
        log.open()
        made = base(store, KEY, store.put_checkpoint(folder).digest)
        return made.attempt, store.use(log, key=KEY, attempt=made.attempt)

    def stops(operation: str, key: str) -> bool:
        return stop == f"{operation} {key.rpartition('/')[2]}"

    maker = Side(tmp_path / "store", tmp_path / "other", make, stops)
    assert names(gc(store))[1] == {f"checkpoints/{digest}"}
    maker.advance()
    assert (maker.error, maker.result) == (None, (0, not collected))
    assert (store.manifest(KEY) is None) is collected

    again = Side(tmp_path / "store", tmp_path / "other", make, lambda *_: False)
    assert again.result == (int(collected), True)
    assert store.fetch_checkpoint(digest).is_dir()


def test_who_uses_weights_waits_for_the_collector_that_marked_them(store: Store, tmp_path: Path) -> None:
    """Of one that fell silent it is told what to end, before and after the run is resumed; no step is given up."""
    digest = store.put_checkpoint(weights(tmp_path / "weights", 1)).digest
    base(store, KEY, digest)
    log = store.run_log(store.create_run("run", {}, code_version="test"))
    log.open()
    elsewhere = {"host": "other", "pid": 1, "machine": "other", "started": "1"}
    store.backend.put(layout.collecting(digest), record.encode({**elsewhere, "lease": layout.collector("x")}))
    told = f"a collector that fell silent .* remove .*{digest}.json and resume"
    with pytest.raises(TransientError, match=told):
        store.use(log, key=KEY, attempt=0)
    with pytest.raises(TransientError, match=told):
        store.stays(KEY, 0)
    store.backend.delete(layout.collecting(digest))
    assert store.stays(KEY, 0)


def test_marks_of_a_collector_that_could_not_take_them_back_hold_nobody_up(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deletes of marks fail; then the machine is another one, where nobody can look for the collector's process."""
    folders = [weights(tmp_path / str(number), number) for number in range(2)]
    digests = [store.put_checkpoint(folder).digest for folder in folders]
    for key, digest in zip((KEY, OTHER), digests, strict=True):
        base(store, key, digest)
    gc(store)
    for key in (KEY, OTHER):  # used just now: marked, spared and unmarked
        run_that_used(store, "run", key)
    stuck = {layout.collecting_step(KEY, 0), layout.collecting(digests[0])}

    class Stuck(LocalBackend):
        """A store that refuses to delete some objects, and shows no log at the first look."""

        blind = True

        def delete(self, key: str) -> None:
            if key in stuck:
                raise StoreError(f"{key} is denied")
            super().delete(key)

        def folders(self, prefix: str) -> Iterator[str]:
            blind, self.blind = self.blind, False
            return iter(()) if blind else super().folders(prefix)

    found = gc(Store(Stuck(tmp_path / "store"), store.cache))
    assert len(found.spared) == 4
    left = set(store.backend.list(layout.COLLECTOR))
    assert {one for one in left if "lease" not in one and "plan" not in one} == stuck

    monkeypatch.setattr("storage.holder._machine", lambda: "another boot")
    holder._name.cache_clear()
    try:
        assert store.settled(KEY, 0)
        stuck.discard(layout.collecting_step(KEY, 0))
        assert stuck < {one for one in store.backend.list(layout.COLLECTOR) if "plan" not in one}
        gc(store)
        assert not [one for one in store.backend.list(layout.COLLECTOR) if "plan" not in one]
    finally:
        holder._name.cache_clear()
