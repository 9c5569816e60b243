"""Know the committed steps of earlier runs: what a step that is to do is compared with and estimated by."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from configs.run import RunConfig, key_part
from storage.errors import DataError, StoreError
from storage.hold import REMOVED
from tasks.differences import Known, differences
from tasks.history import History, Used, manifest_of, read_history
from tasks.judge import prompts
from tasks.models import Model

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from storage.manifest import Manifest
    from storage.store import Store
    from tasks.step import Step

_READERS = 8


class Place(NamedTuple):
    """Say where a run used a step."""

    iteration: int
    step: str
    label: str

    def __str__(self) -> str:
        return " ".join(str(part) for part in (self.step, self.iteration, self.label) if part != "")


class Comparison(NamedTuple):
    """Hold the step that another is compared with, None where there is none, and one line for each difference."""

    against: str | None
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Earlier:
    """Hold the committed steps of earlier runs by their place, what their digests are of, and the keys they used."""

    runs: tuple[str, ...] = ()
    manifests: Mapping[Place, Manifest] = field(default_factory=dict)
    known: Known = field(default_factory=Known)
    used: Mapping[str, int] = field(default_factory=dict)  # key -> attempt

    def nearest(self, step: Step, iteration: int) -> tuple[Place, Manifest] | None:
        """Give the step in the same place, else the one of the same name that differs in the fewest parts."""
        here = Place(iteration, step.name, step.label)
        if here in self.manifests:
            return here, self.manifests[here]
        of_name = [(place, one) for place, one in self.manifests.items() if place.step == step.name]

        def distance(found: tuple[Place, Manifest]) -> tuple[int, int]:
            place, one = found
            return len(self._differences(step, one)), abs(place.iteration - iteration)

        return min(of_name, key=distance, default=None)

    def compare(self, step: Step, iteration: int) -> Comparison:
        """Say why a step that is not committed is not: what it is compared with, and the parts that differ."""
        if step.key in self.used:
            return Comparison(None, (f"attempt {self.used[step.key]}, which an earlier run used, is void or lost",))
        nearest = self.nearest(step, iteration)
        if nearest is None:
            return Comparison(None, (f"no earlier step `{step.name}` is known to compare with",))
        place, manifest = nearest
        return Comparison(f"{place} ({manifest.key[:12]})", tuple(self._differences(step, manifest)))

    def _differences(self, step: Step, manifest: Manifest) -> list[str]:
        return differences(step.key_parts, manifest.key_parts, self.known)


def read_earlier(store: Store, histories: Sequence[History]) -> Earlier:
    """Read the manifests that runs used, as their logs name them; of two runs in one place the first counts.

    A manifest that can't be read is left out: it is nothing to compare with, and no run that is to be made needs it.
    """
    used: dict[Place, Used] = {}
    for history in histories:
        for one in history.used:
            used.setdefault(Place(one.iteration, one.step, one.label), one)
    with ThreadPoolExecutor(_READERS) as pool:
        found = pool.map(lambda one: _manifest(store, one), used.values())
    manifests = {place: one for place, one in zip(used, found, strict=True) if one is not None}
    known = Known()
    for history in histories:
        learn_wording(known, history.config)
    for place, manifest in manifests.items():
        learn_outputs(known, place, manifest)
    return Earlier(
        tuple(history.run_id for history in histories),
        manifests,
        known,
        {one.key: one.attempt for one in used.values()},
    )


def _manifest(store: Store, used: Used) -> Manifest | None:
    try:
        return manifest_of(store, used)
    except StoreError:
        return None


def learn_wording(known: Known, config: RunConfig) -> None:
    """Remember what the digest of a run's prompt was made from."""
    for prompt in (config.prompt, prompts.worded(config)):
        known.sections[prompts.prompt_digest(prompt)] = key_part(prompt)


def learn_outputs(known: Known, place: Place, manifest: Manifest) -> None:
    """Remember the digests of what a step made."""
    for name, artifact in manifest.artifacts.items():
        known.names.setdefault(artifact.digest, f"{name} of {place}")
    for name, digest in manifest.facts.get("certificate", {}).get("digests", {}).items():
        known.names.setdefault(digest, f"{name} of the split")
    if "model" in manifest.facts:
        made = "the base model" if place.step == "base" else f"checkpoint {place.iteration}"
        known.names.setdefault(Model(**manifest.facts["model"]).digest, made)


def earlier_runs(store: Store, name: str | None = None, *, before: str | None = None) -> list[str]:
    """Give the ids of the runs of a name, or of all, latest first; with `before` those made before that run.

    Lists the runs: it chooses what a step is compared with and estimated by, never what is done.
    """
    runs = [one for one in store.runs() if name is None or one.rsplit("-", 2)[0] == name]
    made = sorted(runs, key=lambda run_id: run_id.rsplit("-", 2)[1:], reverse=True)
    if before in made:
        return made[made.index(before) + 1 :]
    return made


def named_run(store: Store, run_id: str) -> list[History]:
    """Read the run that the user compares with; DataError where it used no step, StoreError where it can't be read."""
    history = read_history(store, run_id)
    if not history.used:
        raise DataError(f"{run_id} used no step yet, so nothing can be compared with it; name another run")
    return [history]


def readable(store: Store, runs: Iterable[str]) -> list[History]:
    """Give the first of some runs, not removed, that used a step and that this version can read; none if none did."""
    for run_id in runs:
        try:
            history = read_history(store, run_id)
        except StoreError:
            continue
        if history.used and history.state != REMOVED:
            return [history]
    return []
