"""Freeze a run's plan at its start, and hold what happened against it afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc

from configs.run import Method
from storage import record
from storage.errors import StoreError
from tasks.earlier import Place, earlier_runs, read_earlier, readable
from tasks.forecast import START, Forecast, forecast, to_json
from tasks.history import manifest_of, read_history
from tasks.plan import Planned, plan_run
from tasks.rates import FOR_TRAINING, WRITTEN, Measured, own_seconds, trained_tokens

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from configs.run import RunConfig
    from storage.manifest import Manifest
    from storage.store import Store
    from tasks.history import History

FILE = "plan.json"
RECENT = 20  # runs that are looked through for the one that is most like


def cost_plan(
    store: Store, config: RunConfig, walk: Any, against: Sequence[History] | None = None
) -> tuple[list[Planned], Forecast]:
    """Plan a config and estimate it by the run `against`, else the latest of its name, else the most alike."""
    if against is None:
        against = readable(store, earlier_runs(store, config.name))
    measured = against or readable(store, _most_like(store, config))
    earlier = read_earlier(store, against)
    planned, sizes = plan_run(store, config, walk, earlier)
    known = Measured()
    for history in measured:
        manifests = earlier.manifests if against else read_earlier(store, measured).manifests
        known = Measured.of(config, history.run_id, history.config, manifests)
    return planned, forecast(config, planned, sizes, known)


def _most_like(store: Store, config: RunConfig) -> list[str]:
    """Order the latest runs: of the same method first, then those that write text, as this one does or not."""

    def unlike(run_id: str) -> tuple[bool, bool]:
        try:
            method = store.run_config(run_id).get("method")
        except StoreError:
            return True, True
        genrm = Method.GENRM
        return method != config.method, (method == genrm) != (config.method is genrm)

    return sorted(earlier_runs(store)[:RECENT], key=unlike)


def freeze_plan(store: Store, run_id: str, config: RunConfig, walk: Any) -> None:
    """Put the plan of a run that was just made beside it; one that is there already stays."""
    against = readable(store, earlier_runs(store, config.name, before=run_id))
    planned, found = cost_plan(store, config, walk, against)
    store.put_report(run_id, FILE, record.encode(to_json(planned, found)))


@dataclass(frozen=True)
class Outcome:
    """Hold what was planned of a step and what happened; a part is None where one of the two isn't known."""

    iteration: int
    step: str
    label: str
    tokens_planned: float | None
    tokens: float | None
    seconds_planned: float | None
    seconds: float | None

    @property
    def tokens_ratio(self) -> float | None:
        """Give happened / planned."""
        return _ratio(self.tokens, self.tokens_planned)

    @property
    def seconds_ratio(self) -> float | None:
        """Give happened / planned."""
        return _ratio(self.seconds, self.seconds_planned)

    def to_json(self) -> dict[str, Any]:
        """Give the JSON form."""
        return {**vars(self), "tokens_ratio": self.tokens_ratio, "seconds_ratio": self.seconds_ratio}


def _ratio(happened: float | None, planned: float | None) -> float | None:
    return happened / planned if happened is not None and planned else None


def compare_plan(store: Store, run_id: str) -> list[Outcome]:
    """Hold each step that was planned, or that this run computed, against its plan; the last row adds up.

    tokens: written by the engine, or trained on. seconds: wall time. Only what both sides know is added up.
    """
    content = store.report(run_id, FILE)
    if content is None:
        raise StoreError(f"{store.url}: run {run_id} has no plan: it was made by a version that froze none")
    fields = record.decode(content, f"{store.url}: {FILE} of {run_id}")
    planned = {Place(one["iteration"], one["step"], one["label"]): one for one in fields["forecast"]["steps"]}
    happened = _happened(store, run_id)
    rows = [
        Outcome(
            *place,
            _value(planned.get(place), "tokens"),
            happened.get(place, (None, None))[0],
            _value(planned.get(place), "seconds"),
            happened.get(place, (None, None))[1],
        )
        for place in dict.fromkeys((*planned, *happened))
    ]
    return [*rows, _added(rows)]


def _value(estimate: Mapping[str, Any] | None, name: str) -> float | None:
    return None if estimate is None or estimate[name] is None else float(estimate[name]["value"])


def _added(rows: Iterable[Outcome]) -> Outcome:
    tokens, seconds = [], []
    for one in rows:
        if one.tokens_planned is not None and one.tokens is not None:
            tokens.append((one.tokens_planned, one.tokens))
        if one.seconds_planned is not None and one.seconds is not None:
            seconds.append((one.seconds_planned, one.seconds))
    return Outcome(0, "in all", "", *_sums(tokens), *_sums(seconds))


def _sums(pairs: Sequence[tuple[float, float]]) -> tuple[float | None, float | None]:
    return (sum(planned for planned, _ in pairs), sum(happened for _, happened in pairs)) if pairs else (None, None)


def _happened(store: Store, run_id: str) -> dict[Place, tuple[float | None, float | None]]:
    """Give tokens and seconds of what this run computed itself, and of its engine starts."""
    found: dict[Place, tuple[float | None, float | None]] = {}
    starts: dict[str, tuple[Place, float]] = {}
    for used in read_history(store, run_id).used:
        manifest = None if used.reused else manifest_of(store, used)
        if manifest is None:
            continue
        place = Place(used.iteration, used.step, used.label)
        engine = manifest.facts.get("engine")
        if engine is not None and engine["start"] not in starts:
            checkpoint = used.iteration - (used.step in FOR_TRAINING)
            alone = "base" if used.label.startswith("base ") else ""
            starts[engine["start"]] = Place(checkpoint, START, alone), engine["start_seconds"]
        found[place] = _tokens(store, manifest), own_seconds(manifest)
    for place, seconds in starts.values():
        found[place] = None, seconds + (found.get(place, (None, 0.0))[1] or 0.0)
    return found


def _tokens(store: Store, manifest: Manifest) -> float | None:
    """Give what was written, shards of an interrupted attempt included, or trained on."""
    if manifest.step not in WRITTEN:
        return trained_tokens(manifest)
    if not manifest.facts.get("reused_shards"):
        return float(manifest.facts["tokens"])
    if "completions" not in manifest.artifacts:
        return 0.0
    if manifest.step == "repair":  # its rows hold what was sampled before, too
        return None
    written = store.read(manifest.artifact("completions"), columns=["n_tokens"])
    return float(pc.sum(written["n_tokens"]).as_py() or 0)
