"""Explain a run's steps: why each is reused, stale or missing, against the steps that earlier runs used.

A step that is stale is stood in for by the one that the earlier run used in its place, so that the walk goes on and
every later step is compared too: its settings for themselves, its inputs as they were.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.differences import Known, differences
from tasks.earlier import Earlier, Place, learn_outputs, learn_wording
from tasks.plan import Walk, outline
from tasks.step import Context, DryContext, NotCommittedError, Step, software

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from configs.run import RunConfig
    from storage.manifest import Manifest
    from storage.store import Store


@dataclass(frozen=True)
class Explained:
    """Say of one step what would happen to it and why.

    state: reused (committed under its key) · stale (its key parts differ from `against`) · missing (nothing committed
    to compare with, or what was is void) · follows (only what it is made from is made again; it is reused where that
    comes out the same) · waits (can't be named before its inputs are there).
    """

    iteration: int
    step: str
    label: str
    state: str
    key: str | None
    against: str | None
    why: tuple[str, ...]


@dataclass(frozen=True)
class Explanation:
    """Hold the steps in order, and the library versions that differ: recorded in manifests, in no key."""

    against: tuple[str, ...]
    steps: tuple[Explained, ...]
    warnings: tuple[str, ...]


def explain(store: Store, config: RunConfig, walk: Any, earlier: Earlier) -> Explanation:
    """Walk the loop `walk` (flows/iteration.py) as it would be done now and compare each step with the earlier one."""
    learn_wording(earlier.known, config)
    run = _Explaining(Context(store, config, Path(config.work)), earlier)
    with contextlib.suppress(NotCommittedError):
        walk(run)
    found = run.comparing.found
    split = run.comparing.seen.get(Place(0, "split", ""))
    sizes = split.facts["certificate"]["pairs"] if split else {}
    waiting = "its inputs are still to be made"
    places = [Place(*one[:3]) for one in outline(config, sizes)]
    places += [place for place in found if place not in places]
    steps = [found.get(place) or Explained(*place, "waits", None, None, (waiting,)) for place in places]
    return Explanation(earlier.runs, tuple(steps), tuple(_versions(run.comparing.reused)))


@dataclass(frozen=True)
class _Comparing(DryContext):
    """Look steps up; where one is not committed, give the earlier one in its place, if there is one."""

    earlier: Earlier = field(default_factory=Earlier)
    found: dict[Place, Explained] = field(default_factory=dict)
    seen: dict[Place, Manifest] = field(default_factory=dict)
    reused: dict[Place, Manifest] = field(default_factory=dict)
    again: dict[str, Place] = field(default_factory=dict)  # digest of what is made again -> its step

    def committed(self, step: Step, *, iteration: int) -> Manifest | None:
        """Look up the step, compare it where it is not done, and give its stand-in."""
        place = Place(iteration, step.name, step.label)
        manifest = super().committed(step, iteration=iteration)
        remade = sorted({str(self.again[one]) for one in step.inputs.values() if one in self.again})
        if manifest is not None and not remade:
            self.found[place] = self._reused(step, place)
            self.seen[place] = self.reused[place] = manifest
            learn_outputs(self.earlier.known, place, manifest)
            return manifest
        self.found[place] = self._compared(step, place, remade, same=manifest is not None)
        stand_in = manifest or self.earlier.manifests.get(place)
        if stand_in is not None:
            self.seen[place] = stand_in
            outputs = Known()
            learn_outputs(outputs, place, stand_in)
            self.again.update(dict.fromkeys(outputs.names, place))
        return stand_in

    def _reused(self, step: Step, place: Place) -> Explained:
        """Say under which key; and what differs from the earlier run's step in its place, where that is another."""
        why = f"committed as {step.key[:12]}"
        if (other := self.earlier.manifests.get(place)) is None or other.key == step.key:
            return Explained(*place, "reused", step.key, None, (why,))
        lines = differences(step.key_parts, other.key_parts, self.earlier.known)
        return Explained(*place, "reused", step.key, f"{place} ({other.key[:12]})", (why, *lines))

    def _compared(self, step: Step, place: Place, remade: Sequence[str], *, same: bool) -> Explained:
        inputs = [f"made again before it: {', '.join(remade)}"] if remade else []
        if same:
            return Explained(*place, "follows", None, None, tuple(inputs))
        against, lines = self.earlier.compare(step, place.iteration)
        state = "stale" if against else "missing"
        return Explained(*place, state, None if remade else step.key, against, (*lines, *inputs))


class _Explaining(Walk):
    """Walk over what is committed and over the stand-ins of what is not."""

    def __init__(self, context: Context, earlier: Earlier) -> None:
        super().__init__(context, lambda event: None)
        self.comparing = _Comparing(context.store, context.config, context.work, earlier=earlier)
        self._context = self.comparing


def _versions(reused: Mapping[Place, Manifest]) -> Iterator[str]:
    """Say which libraries made reused steps in other versions than are installed here."""
    here = software()["versions"]
    places: dict[str, list[str]] = defaultdict(list)
    for place, manifest in reused.items():
        for package, then in manifest.facts.get("versions", {}).items():
            if package in here and here[package] != then:
                places[f"{package} {then} → {here[package]}"].append(str(place))
    for change, made in places.items():
        more = f" and {len(made) - 3} more" if len(made) > 3 else ""
        yield f"{change} since {', '.join(made[:3])}{more} ran; versions are in no key"
