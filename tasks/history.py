"""Read what a run used, from its log alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import ValidationError

from configs.run import RunConfig
from storage.errors import StoreError
from storage.hold import last_holder
from storage.manifest import Manifest, manifest_fields
from storage.schema import Status

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from storage.store import Store

_READERS = 8


@dataclass(frozen=True)
class Used:
    """Name a step that a run used; `reused` tells that another run or an earlier attempt had computed it."""

    iteration: int
    step: str
    label: str
    key: str
    attempt: int
    reused: bool


@dataclass(frozen=True)
class History:
    """Hold a run's config, its log and the steps it used, in the order of their first use."""

    run_id: str
    config: RunConfig
    records: Sequence[Mapping[str, Any]]
    used: Sequence[Used]

    @property
    def state(self) -> str:
        """Give how the run ended, or open: running, or interrupted."""
        closed = [one for one in self.records if one["kind"] in {"opened", "closed"}]
        if not closed:
            return "new"
        return str(closed[-1]["outcome"]) if closed[-1]["kind"] == "closed" else "open"

    def of(self, step: str, iteration: int | None = None) -> Iterator[Used]:
        """Give the used steps of a name, in one iteration or in all."""
        return (one for one in self.used if one.step == step and iteration in (None, one.iteration))


def read_history(store: Store, run_id: str) -> History:
    """Read a run; the last use of a step in an iteration counts."""
    frozen = store.run(run_id)
    try:
        config = RunConfig.model_validate(frozen.config)
    except ValidationError:
        raise StoreError(
            f"{store.url}: run {run_id} was made by starwheel {frozen.code_version}, whose config this version "
            f"({version('starwheel')}) can't read; use that version"
        ) from None
    records = store.run_log(run_id).records()
    used: dict[tuple[int, str, str], Used] = {}
    for one in records:
        if one["kind"] == "step":
            use = Used(*(one[name] for name in ("iteration", "step", "label", "key", "attempt", "reused")))
            used[use.iteration, use.step, use.label] = use
    return History(run_id, config, records, list(used.values()))


def manifest_of(store: Store, used: Used) -> Manifest | None:
    """Give the manifest of a used step, None where its attempt was lost or voided since, also if another one counts."""
    found = store.manifest(used.key)
    return found if found is not None and found.attempt == used.attempt else None


def metric(metrics: pa.Table, name: str, subset: str = "") -> Mapping[str, Any]:
    """Give one row of a metrics table: value, low, high, n, clusters."""
    chosen = metrics.filter(pc.and_(pc.equal(metrics["metric"], name), pc.equal(metrics["subset"], subset)))
    rows: list[Mapping[str, Any]] = chosen.to_pylist()
    return rows[0] if rows else {"value": None, "low": None, "high": None, "n": 0, "clusters": 0}


def summarise(store: Store, run_id: str) -> dict[str, Any]:
    """Sum a run up from its log alone: state, last iteration, steps, when."""
    history = read_history(store, run_id)
    return {
        "run": run_id,
        "state": history.state,
        "iteration": max((one.iteration for one in history.used), default=0),
        "iterations": history.config.iterations,
        "last_step": f"{history.used[-1].step} {history.used[-1].label}".strip() if history.used else "",
        "steps": len(history.used),
        "reused": sum(one.reused for one in history.used),
        "holder": str(last_holder(history.records) or ""),
        "opened": sum(one["kind"] == "opened" for one in history.records),
        "started": history.records[0]["time"] if history.records else "",
        "last_record": history.records[-1]["time"] if history.records else "",
    }


def summarise_any(store: Store, run_id: str) -> dict[str, Any]:
    """Sum a run up, or say that this version can't read it: one foreign run must not hide the others."""
    try:
        return summarise(store, run_id)
    except StoreError as error:
        unknown = dict.fromkeys(("iteration", "iterations", "steps", "reused", "opened", "started", "last_record"))
        return {"run": run_id, "state": "unreadable", "last_step": str(error), **unknown}


def iteration_steps(store: Store, run_id: str, iteration: int) -> list[dict[str, Any]]:
    """List the steps of an iteration with their counts and timings."""
    history = read_history(store, run_id)
    chosen = [one for one in history.used if one.iteration == iteration]
    if not chosen:
        known = ", ".join(str(one) for one in sorted({one.iteration for one in history.used}))
        raise StoreError(f"{run_id} has no steps in iteration {iteration}; there are steps in {known or 'none'}")
    return [_step_row(used, manifest_of(store, used)) for used in chosen]


def _step_row(used: Used, manifest: Manifest | None) -> dict[str, Any]:
    row = {
        "step": f"{used.step} {used.label}".strip(),
        "state": "reused" if used.reused else "computed",
        "key": used.key[:12],
    }
    if manifest is None:
        return {
            **row,
            "state": "lost or void",
            "in": None,
            "kept": None,
            "dropped": "",
            "artifacts": "",
            "tokens": None,
            "seconds": None,
        }
    dropped = manifest.counts.get("dropped", {})
    return {
        **row,
        "in": manifest.counts.get("in"),
        "kept": manifest.counts.get("kept"),
        "dropped": ", ".join(f"{reason} {count}" for reason, count in dropped.items()),
        "artifacts": ", ".join(f"{name} {one.rows}" for name, one in manifest.artifacts.items()),
        "tokens": manifest.facts.get("tokens"),
        "seconds": manifest.facts.get("seconds"),
    }


def timings(store: Store, run_id: str) -> list[dict[str, Any]]:
    """Sum up the seconds that a run's own steps took, one row an iteration; reused steps are counted alone."""
    history = read_history(store, run_id)
    with ThreadPoolExecutor(_READERS) as pool:
        manifests = list(pool.map(lambda one: None if one.reused else manifest_of(store, one), history.used))
    rows: dict[int, dict[str, Any]] = {}
    for used, manifest in zip(history.used, manifests, strict=True):
        row = rows.setdefault(used.iteration, {"iteration": used.iteration, "computed": 0, "reused": 0, "seconds": {}})
        row["reused" if used.reused else "computed"] += 1
        if manifest is not None and (seconds := manifest.facts.get("seconds")) is not None:
            row["seconds"][used.step] = round(row["seconds"].get(used.step, 0.0) + seconds, 3)
    return sorted(rows.values(), key=lambda row: int(row["iteration"]))


def step_manifests(store: Store, run_id: str, iteration: int, step: str) -> list[dict[str, Any]]:
    """Give the manifests of a step in an iteration, as JSON."""
    history = read_history(store, run_id)
    chosen = list(history.of(step, iteration))
    if not chosen:
        known = sorted({one.step for one in history.used if one.iteration == iteration})
        raise StoreError(
            f"{run_id} used no step {step!r} in iteration {iteration}; it used {', '.join(known) or 'none'}"
        )
    found = [(used, manifest_of(store, used)) for used in chosen]
    return [
        {"label": used.label, "reused": used.reused, **manifest_fields(one)} for used, one in found if one is not None
    ]


def broken_completions(store: Store, run_id: str) -> dict[str, int]:
    """Count a run's completions that were dropped as truncated or unparsed; empty before selection."""
    manifests = [manifest_of(store, used) for used in read_history(store, run_id).of("select")]
    dropped = [one.counts.get("dropped", {}) for one in manifests if one is not None]
    statuses = (str(Status.TRUNCATED), str(Status.UNPARSED))
    return {status: sum(one.get(status, 0) for one in dropped) for status in statuses} if dropped else {}
