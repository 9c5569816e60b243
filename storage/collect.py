"""Delete what nothing names any more: steps that no log or pin uses, weights that no step names, removed runs.

Two passes, at least a grace period apart: the first writes down what it would delete, the second deletes what is still
unnamed and has not changed since. The grace rests on clocks and spares work that someone may still want; that nothing
in use is lost doesn't rest on it:

- Who begins to use a step logs it first and looks for the collector's mark, the void mark and the manifest then
  (`Store.use`). The collector marks first and reads all logs then; what it finds named it spares and unmarks, what it
  does not it voids, and deletes. At least one of the two sees the other, and a user that meets a mark waits for the
  decision (`storage/marks.py`). A void mark is never taken back and outlives what it was put on, so no manifest that
  comes late can name files that are gone.
- An attempt without manifest may be in the making: it is voided under the step's claim, and not while that is held.
- Weights that a manifest names which isn't void stay, whether a log names it or not: a new run may reuse that step.
- Who makes a checkpoint holds a claim, looks for the mark then, and stores files and index. The collector marks first
  and looks for live claims and then for names. That rests on a beat, so it only spares work: whoever logs a step looks
  for the marks and the files of its weights too (`Store.stays`), and a step whose weights are gone is voided.

A log, pin or manifest that can't be read might name anything: then the pass stops. Of a run that is removed only the
last record is read, so that removing a run whose log is damaged mends it.
"""

from __future__ import annotations

import re
import secrets
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from storage import layout, record
from storage.attempt import Attempt
from storage.backend import NotFoundError
from storage.claim import Claims, is_held, read_claim
from storage.digest import canonical_json, digest_json
from storage.errors import CorruptArtifactError, StarwheelError
from storage.lease import Lease
from storage.marks import clear, mark
from storage.refs import all_refs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from storage.backend import Backend
    from storage.store import Store

GRACE_S = 7 * 86400.0
_READERS = 8
_DIGEST = re.compile(rb"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Candidate:
    """Name something that nothing names: `steps/<key>/<attempt>`, `checkpoints/<digest>` or `runs/<run>`."""

    name: str
    why: str
    keys: tuple[str, ...]

    @property
    def kind(self) -> str:
        """Give its folder: steps, checkpoints or runs."""
        return self.name.split("/")[0]

    @property
    def fingerprint(self) -> str:
        """Tell whether objects came or went since an earlier pass."""
        return digest_json(sorted(self.keys))


@dataclass(frozen=True, slots=True)
class Names:
    """Hold what logs and pins name, and which runs are removed."""

    attempts: frozenset[tuple[str, int]]
    checkpoints: frozenset[str]
    removed: tuple[str, ...]


@dataclass
class Collection:
    """Say what a pass found: what waits for the grace period, what is due, deleted and spared, with the reason."""

    waiting: list[Candidate] = field(default_factory=list)
    due: list[Candidate] = field(default_factory=list)
    deleted: list[Candidate] = field(default_factory=list)
    named: list[Candidate] = field(default_factory=list)  # of the due ones, found named at the second look
    spared: dict[str, str] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Plan:
    """Hold what an earlier pass wrote down: names with their fingerprints; `age_s` is by both clocks."""

    time: str
    age_s: float
    planned: dict[str, str]


def collect(store: Store, *, delete: bool, grace_s: float = GRACE_S) -> Collection:
    """Look for what nothing names; with `delete` write it down, and delete what an earlier pass wrote down."""
    backend = store.backend
    found = candidates(backend, read_names(store))
    plans = dict(_plans(backend))
    made = Collection(bytes=_sizes(backend, found))
    known = {pair for plan in plans.values() for pair in plan.planned.items()}
    ripe = {pair for plan in plans.values() if plan.age_s >= grace_s for pair in plan.planned.items()}
    for one in found:
        (made.due if (one.name, one.fingerprint) in ripe else made.waiting).append(one)
    if not delete:
        return made
    if new := {one.name: one.fingerprint for one in made.waiting if (one.name, one.fingerprint) not in known}:
        backend.put_new(layout.collection(secrets.token_hex(8)), record.encode({"time": _now(), "planned": new}))
    clear(backend)
    if made.due:
        _delete_all(store, made)
    gone = {one.name for one in (*made.deleted, *made.named)}
    _forget(backend, plans, [one for one in found if one.name not in gone])
    return made


def read_names(store: Store) -> Names:
    """Read every log and every pin, and the checkpoints that the manifests named there name; lists the runs."""
    backend = store.backend
    attempts: set[tuple[str, int]] = set()
    removed = []
    for run_id in store.runs():
        try:
            if store.is_removed(run_id):
                removed.append(run_id)
                continue
            records = store.run_log(run_id).records()
        except CorruptArtifactError as error:
            raise CorruptArtifactError(
                f"{error}; gc deletes nothing before, or until `starwheel rm {run_id}`"
            ) from None
        attempts |= {(one["key"], one["attempt"]) for one in records if one["kind"] == "step"}
    pins = all_refs(backend).values()
    attempts |= {(pin.key, pin.attempt) for pin in pins}
    checkpoints = {digest for pin in pins for digest in pin.checkpoints}
    with ThreadPoolExecutor(_READERS) as pool:
        for digests in pool.map(lambda one: _digests(backend, layout.manifest(*one)), sorted(attempts)):
            checkpoints |= digests
    return Names(frozenset(attempts), frozenset(checkpoints), tuple(removed))


def candidates(backend: Backend, names: Names) -> list[Candidate]:
    """List what is in the store and not named; what the store's layout doesn't know is left alone."""
    found = []
    for (key, number), keys in _attempts(backend).items():
        left = [one for one in keys if one != layout.void(key, number)]
        if left and (key, number) not in names.attempts:
            committed = layout.manifest(key, number) in left
            why = "no run or pin uses it" if committed else "begun, never committed"
            found.append(Candidate(layout.attempt(key, number).rstrip("/"), why, tuple(left)))
    weights = defaultdict(list)
    for one in backend.list(layout.CHECKPOINTS):
        weights[one.split("/")[1]].append(one)
    for digest, keys in weights.items():
        if _DIGEST.fullmatch(digest.encode()) and digest not in names.checkpoints:
            found.append(Candidate(f"{layout.CHECKPOINTS}{digest}", "no step in use names it", tuple(keys)))
    for run_id in names.removed:
        folder = layout.run_folder(run_id)
        found.append(Candidate(folder.rstrip("/"), "removed", tuple(backend.list(folder))))
    return found


def _attempts(backend: Backend) -> dict[tuple[str, int], list[str]]:
    found = defaultdict(list)
    for one in backend.list(layout.STEPS):
        _, key, number, *rest = [*one.split("/"), "", ""]
        if number.isdecimal() and rest[0]:
            found[key, int(number)].append(one)
    return found


def _digests(backend: Backend, key: str) -> set[str]:
    """Give everything in a manifest that could be a checkpoint's digest, whatever the step means by it."""
    try:
        fields, _ = record.read(backend, key)
    except NotFoundError:
        return set()
    return {one.decode() for one in _DIGEST.findall(canonical_json(fields))}


def _plans(backend: Backend) -> Iterator[tuple[str, _Plan]]:
    """Give the plans of earlier passes; damaged ones are as none."""
    for key in backend.list(layout.COLLECTOR):
        if not key.startswith(f"{layout.COLLECTOR}plan-"):
            continue
        try:
            fields, _ = record.read(backend, key)
            age = (datetime.now(UTC) - datetime.fromisoformat(fields["time"])).total_seconds()
            yield key, _Plan(fields["time"], age, dict(fields["planned"]))
        except (CorruptArtifactError, NotFoundError, KeyError, TypeError, ValueError):
            continue


def _forget(backend: Backend, plans: Mapping[str, _Plan], left: Sequence[Candidate]) -> None:
    """Take out of earlier plans what isn't left as it was: what is used meanwhile waits anew when it is let go."""
    pairs = {(one.name, one.fingerprint) for one in left}
    for key, plan in plans.items():
        planned = {name: print_ for name, print_ in plan.planned.items() if (name, print_) in pairs}
        if not planned:
            backend.delete(key)
        elif planned != plan.planned:
            backend.put(key, record.encode({"time": plan.time, "planned": planned}))


def _sizes(backend: Backend, found: Iterable[Candidate]) -> dict[str, int]:
    with ThreadPoolExecutor(_READERS) as pool:
        return {one.name: sum(size or 0 for size in pool.map(backend.size, one.keys)) for one in found}


def _delete_all(store: Store, made: Collection) -> None:
    """Delete what is due and found unnamed once more, under a lease that those who wait for a decision watch."""
    backend = store.backend
    where = layout.collector(secrets.token_hex(8))
    held = Lease(backend, where)
    held.start()
    marks: set[str] = set()
    try:
        _delete_attempts(store, [one for one in made.due if one.kind == "steps"], made, where, marks)
        _delete_checkpoints(store, [one for one in made.due if one.kind == "checkpoints"], made, where, marks)
        for one in made.due:
            if one.kind == "runs":
                _delete_run(backend, one)
                made.deleted.append(one)
    finally:
        held.release()
        if not marks:  # else it tells that the marks left are nobody's, until `clear` takes them away
            backend.delete(where)


def _unmark(backend: Backend, marks: set[str]) -> None:
    """Take marks back; one that can't be stays in the set and keeps no other from being taken back."""
    for one in sorted(marks):
        with suppress(OSError, StarwheelError):
            backend.delete(one)
            marks.discard(one)


def _delete_attempts(store: Store, due: Sequence[Candidate], made: Collection, where: str, marks: set[str]) -> None:
    """Mark them, read the logs again, void what no log names, then delete it: the manifest first."""
    backend = store.backend
    claims: list[Claims] = []
    try:
        for one in due:
            key, number = _attempt(one)
            if layout.manifest(key, number) not in one.keys:
                claims.append(Claims(backend, "gc", 0, where))
                if (other := _claim(backend, claims[-1], key)) is not None:
                    made.spared[one.name] = f"{other} computes it"
                    continue
            marks.add(layout.collecting_step(key, number))
            mark(backend, layout.collecting_step(key, number), holder_lease=where)
        marked = [one for one in due if one.name not in made.spared]
        named = read_names(store).attempts if marked else frozenset()
        for one in marked:
            key, number = _attempt(one)
            if (key, number) in named:
                made.spared[one.name] = "a run or pin began to use it meanwhile"
                made.named.append(one)
                continue
            Attempt(key, number, backend, store.cache).void("nothing named it", "gc")
            _delete(backend, sorted(one.keys, key=lambda name: (not name.endswith("/manifest.json"), name)))
            made.deleted.append(one)
    finally:
        _unmark(backend, marks)
        for claim in claims:
            claim.release()


def _attempt(one: Candidate) -> tuple[str, int]:
    _, key, number = one.name.split("/")
    return key, int(number)


def _claim(backend: Backend, claims: Claims, key: str) -> str | None:
    """Claim a step of which nobody is computing; else say who is. A claim of the dead is taken away."""
    while (other := claims.claim([key])) is not None:
        if is_held(backend, other):
            return str(other)
        claims.wait(other)
    return None


def _delete_checkpoints(store: Store, due: Sequence[Candidate], made: Collection, where: str, marks: set[str]) -> None:
    """Mark them, look for names and for work in progress again, delete the index first."""
    backend = store.backend
    digests = {one: one.name.split("/")[1] for one in due}
    try:
        for digest in digests.values():
            marks.add(layout.collecting(digest))
            mark(backend, layout.collecting(digest), holder_lease=where)
        # In this order: who held a claim and let go of it before the first look has logged what it made by the second.
        working = _working(backend) if due else None
        names = read_names(store) if due else Names(frozenset(), frozenset(), ())
        unused = _named_unused(store, names.attempts) if due else {}
        for one, digest in digests.items():
            if digest in names.checkpoints:
                made.spared[one.name] = "a step names it meanwhile"
                made.named.append(one)
                continue
            if working is not None or digest in unused:
                made.spared[one.name] = f"{working} may be making it" if working else unused[digest]
                continue
            first = layout.checkpoint_index(digest)
            _delete(backend, sorted(one.keys, key=lambda name: (name != first, name)))
            made.deleted.append(one)
    finally:
        _unmark(backend, marks)


def _named_unused(store: Store, used: frozenset[tuple[str, int]]) -> dict[str, str]:
    """Give what the manifests name that count though nothing uses them, with the reason to keep it.

    A run may reuse such a step until it is void; its weights go with it, not before.
    """
    backend = store.backend
    several = [
        (key, number)
        for (key, number), keys in _attempts(backend).items()
        if (key, number) not in used and layout.manifest(key, number) in keys and layout.void(key, number) not in keys
    ]
    with ThreadPoolExecutor(_READERS) as pool:
        found = pool.map(lambda one: _digests(backend, layout.manifest(*one)), several)
        return {
            digest: f"step {key[:12]}, which counts, names it"
            for (key, _), digests in zip(several, found, strict=True)
            for digest in digests
        }


def _working(backend: Backend) -> str | None:
    """Give one who holds a claim on any step; None where nobody does."""
    keys = [one.split("/")[1] for one in backend.list(layout.STEPS) if one.endswith("/claim.json")]
    claims = [claim for key in keys if (claim := read_claim(backend, key)) is not None]
    with ThreadPoolExecutor(max(len(claims), 1)) as pool:
        held = pool.map(lambda claim: is_held(backend, claim), claims)
        return next((str(claim) for claim, is_one in zip(claims, held, strict=True) if is_one), None)


def _delete_run(backend: Backend, one: Candidate) -> None:
    """Delete the config first, so that nobody resumes it, and the log's last record, which tells all this, last."""
    run_id = one.name.split("/")[1]
    last = max(key for key in one.keys if "/log/" in key)
    order = {layout.run(run_id): 0, last: 2}
    _delete(backend, sorted(one.keys, key=lambda name: (order.get(name, 1), name)))


def _delete(backend: Backend, keys: Iterable[str]) -> None:
    for key in keys:
        backend.delete(key)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
