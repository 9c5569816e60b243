"""Look whether all that a run names is there and whole, and say which of its steps count no more."""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from storage import layout
from storage.errors import CorruptArtifactError, StoreError
from storage.integrity import Object, checkpoint_objects, damaged, manifest_objects
from tasks.differences import Known
from tasks.earlier import Place, learn_outputs
from tasks.history import read_history
from tasks.models import Model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from storage.manifest import Manifest
    from storage.store import Store
    from tasks.history import History, Used

_READERS = 8


@dataclass(frozen=True)
class Fault:
    """Say what is wrong with something that a run names, by its full address; step and key are what made it."""

    step: str
    key: str
    what: str
    follows: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verified:
    """Count what was looked at, and hold what is wrong."""

    run_id: str
    deep: bool
    steps: int
    objects: int
    bytes: int
    faults: tuple[Fault, ...]

    def to_json(self) -> dict[str, Any]:
        """Give the JSON form."""
        return asdict(self)


def verify(store: Store, run_id: str, *, deep: bool) -> Verified:
    """Look at the log, the manifests, the files and the checkpoints that a run names; `deep` hashes every byte."""
    try:
        history = read_history(store, run_id)
    except CorruptArtifactError as error:  # what the run used is not known then
        return Verified(run_id, deep, 0, 0, 0, (Fault("log", "", str(error)),))
    faults, manifests = _manifests(store, history)
    owners, lost = _objects(store, manifests)
    found = damaged(store, owners, deep=deep)
    faults += lost
    faults += [_fault(owners[one], what) for one, what in found.items()]
    after = _followers(manifests)
    told = [Fault(one.step, one.key, one.what, after.get(one.key, ())) for one in faults]
    return Verified(run_id, deep, len(history.used), len(owners), sum(one.bytes for one in owners), tuple(told))


def not_counting(store: Store, history: History) -> list[Used]:
    """Give the steps that a run used and that were voided or lost their manifest since."""
    with ThreadPoolExecutor(_READERS) as pool:
        counting = pool.map(lambda one: store.counts(one.key, one.attempt), history.used)
        return [one for one, counts in zip(history.used, counting, strict=True) if not counts]


def _place(used: Used) -> str:
    return str(Place(used.iteration, used.step, used.label))


def _fault(used: Used, what: str) -> Fault:
    return Fault(_place(used), used.key, what)


def _manifests(store: Store, history: History) -> tuple[list[Fault], dict[Used, Manifest]]:
    """Read the manifest of each attempt that the run used."""

    def read(used: Used) -> Manifest | Fault:
        try:
            manifest = store.manifest_of(used.key, used.attempt)
        except StoreError as error:
            return _fault(used, str(error).partition("; ")[0])
        if manifest is None:
            return _fault(used, f"{store.backend.address(layout.manifest(used.key, used.attempt))} is missing")
        if not store.counts(used.key, used.attempt):
            where = store.backend.address(layout.void(used.key, used.attempt))
            return _fault(used, f"{where} says that this attempt counts no more")
        return manifest

    with ThreadPoolExecutor(_READERS) as pool:
        found = dict(zip(history.used, pool.map(read, history.used), strict=True))
    faults = [one for one in found.values() if isinstance(one, Fault)]
    return faults, {used: one for used, one in found.items() if not isinstance(one, Fault)}


def _objects(store: Store, manifests: dict[Used, Manifest]) -> tuple[dict[Object, Used], list[Fault]]:
    """Give all objects with the step that made them, and the checkpoints whose index is lost."""
    owners: dict[Object, Used] = {}
    faults, seen = [], set()
    for used, manifest in manifests.items():
        owners |= dict.fromkeys(manifest_objects(manifest), used)
        if "model" not in manifest.facts:
            continue
        model = Model(**manifest.facts["model"])
        for digest in (model.base, model.adapter):
            if digest is None or digest in seen:
                continue
            seen.add(digest)
            try:
                owners |= dict.fromkeys(checkpoint_objects(store, digest), used)
            except StoreError as error:
                faults.append(_fault(used, str(error).partition("; ")[0]))
    return owners, faults


def _followers(manifests: dict[Used, Manifest]) -> dict[str, tuple[str, ...]]:
    """Name for each step what was made from it, at however many removes: by the digests among the inputs."""
    users = defaultdict(list)
    for used, manifest in manifests.items():
        for digest in manifest.inputs.values():
            users[digest].append(used)
    outputs = {used: _outputs(used, manifest) for used, manifest in manifests.items()}

    def after(used: Used, seen: dict[Used, None]) -> dict[Used, None]:
        for digest in outputs.get(used, ()):
            for one in users.get(digest, ()):
                if one not in seen and one != used:
                    seen[one] = None
                    after(one, seen)
        return seen

    return {used.key: tuple(_place(one) for one in after(used, {})) for used in manifests}


def _outputs(used: Used, manifest: Manifest) -> Sequence[str]:
    known = Known()
    learn_outputs(known, Place(used.iteration, used.step, used.label), manifest)
    return list(known.names)
