"""Print what the reading commands found: reports, profiles, plans, explanations."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from flows.terminal import excerpt, plain, print_json, print_table
from tasks.estimate import Estimate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from storage.store import Store
    from tasks.data.profile import Profile
    from tasks.estimate import Range
    from tasks.explain import Explanation
    from tasks.forecast import Forecast
    from tasks.history import History, Used
    from tasks.look.contents import Contents
    from tasks.look.overview import Iteration
    from tasks.outcome import Outcome
    from tasks.plan import Planned
    from tasks.verify import Verified


def print_profile(address: str, profile: Profile) -> None:
    """Print what a file of pairs holds."""
    print(f"{plain(address)}\n{plain(profile.layout)}")
    print(
        f"{profile.rows} rows, {profile.kept} pairs of {profile.groups} groups, {profile.multi_turn} with several turns"
    )
    if profile.dropped:
        dropped = [(reason, count, profile.why[reason][:100]) for reason, count in profile.dropped.items()]
        print_table(("dropped", "rows", "first met"), dropped)
    if len(profile.subsets) > 1:
        print_table(("subset", "pairs"), profile.subsets.items())
    if not profile.kept:
        return
    names = ("mean", "median", "p95", "max")
    sizes = [(part, *(f"{size[name]:.0f}" for name in names)) for part, size in profile.lengths.items()]
    print_table((profile.unit, *names), sizes)
    print(f"gold is A in {profile.gold_a} of {profile.kept} pairs, {100 * profile.gold_a / profile.kept:.1f} %")
    scores = [
        (one.judge, f"{100 * one.accuracy:.1f} [{100 * one.low:.1f}, {100 * one.high:.1f}]", one.n, one.clusters)
        for one in profile.baselines
    ]
    print_table(("judge without judgment", "% right, 95 % interval", "pairs", "groups"), scores)
    for example in profile.examples:
        texts = [(part, example[part].replace("\n", " ↵ ")) for part in ("prompt", "better", "worse")]
        print_table((example["pair_id"], ""), texts)


def print_report(store: Store, run_id: str, *, as_json: bool) -> None:
    """Print a run's results, yields and comparisons."""
    from tasks.history import timings
    from tasks.report import make_report, results_table

    report = make_report(store, run_id)
    times = timings(store, run_id)
    if as_json:
        print_json({**report.to_json(), "timings": times})
        return
    rows = results_table(report)
    if not rows:
        print(f"{run_id}: no checkpoint is evaluated yet")
        return
    print_table(list(rows[0]), [list(one.values()) for one in rows], title=f"{run_id}: % with 95 % intervals")
    yields = [
        (
            one.iteration,
            one.asked,
            one.with_rows,
            f"{100 * one.with_rows / max(one.asked, 1):.0f} %",
            one.completions,
            one.selected,
            one.rows,
            one.hinted,
            ", ".join(f"{reason} {count}" for reason, count in one.dropped.items()),
        )
        for one in report.yields
    ]
    columns = ("iteration", "prompts", "with a row", "yield", "completions", "selected", "training rows", "hinted")
    if yields:
        print_table((*columns, "dropped"), yields)
    for one in report.compared:
        against = "the untrained judge" if one.against == "base" else f"checkpoint {one.against}"
        print(
            f"{plain(one.suite)}: checkpoint {one.judge} − {against}: {100 * one.difference:+.1f} points "
            f"[{100 * one.low:+.1f}, {100 * one.high:+.1f}], p = {one.p:.2g}, {one.n} pairs, clustered by prompt"
        )
    steps = list(dict.fromkeys(step for one in times for step in one["seconds"]))
    spent = [
        (
            one["iteration"],
            one["computed"],
            one["reused"],
            *(_duration(one["seconds"][step]) if step in one["seconds"] else "" for step in steps),
        )
        for one in times
    ]
    print_table(("iteration", "steps computed", "reused", *steps), spent)
    print(f"engine starts: {report.engine_starts}")


def print_iteration(seen: Iteration) -> None:
    """Print an iteration's steps as a funnel, what its prompts came to, its judge's metrics and the gate's reason."""
    from tasks.report import scores_table

    columns = ("step", "state", "in", "kept", "share", "dropped", "artifacts", "tokens", "seconds", "key")
    rows = [
        [_share(one["kept"], one["in"]) if name == "share" else one[name] for name in columns] for one in seen.steps
    ]
    print_table(columns, rows, title=f"{seen.run} iteration {seen.iteration}")
    if seen.prompts:
        asked, made = seen.prompts["asked"], seen.prompts["with_rows"]
        others = ", ".join(
            f"{name.replace('_', ' ')} {seen.prompts[name]}" for name in ("all_right", "none_right", "other")
        )
        print(f"{asked} prompts asked, {made} with a training row ({_share(made, asked)}); the others: {others}")
    if seen.scores:
        results = scores_table(seen.scores)
        names = list(dict.fromkeys(name for one in results for name in one))
        print_table(names, [[one.get(name) for name in names] for one in results], title="% with 95 % intervals")
    if seen.gate:
        print(f"gate: {plain(seen.gate)}")


def _share(part: int | None, whole: int | None) -> str | None:
    return f"{100 * part / whole:.0f} %" if part is not None and whole else None


def print_step(contents: Contents, iteration: int, step: str) -> None:
    """Print what a step made and of what: artifacts, counts, inputs by what they are, settings, facts."""
    for place, manifest in contents.manifests.items():
        if (place.iteration, place.step) != (iteration, step):
            continue
        title = f"{contents.history.run_id} {place}: attempt {manifest.attempt}, made {manifest.created}"
        made = [
            (name, one.rows, len(one.files), _bytes_of(sum(file.bytes for file in one.files)), one.digest[:12])
            for name, one in manifest.artifacts.items()
        ]
        print_table(("artifact", "rows", "files", "stored", "digest"), made, title=title)
        inputs = [(name, contents.name(str(one)) if one else None) for name, one in manifest.inputs.items()]
        parts = manifest.key_parts["parts"]
        told = [("key", manifest.key), *(("input " + name, one) for name, one in inputs)]
        told += [(name, json.dumps(one, ensure_ascii=False)) for name, one in _flat(parts, "")]
        print_table(("made of", ""), told)
        facts = [*_flat(manifest.counts, "rows "), *_flat(manifest.facts, "")]
        print_table(("found", ""), [(name, excerpt(str(one))) for name, one in facts])
        if "metrics" in manifest.artifacts:
            rows = contents.store.read(manifest.artifact("metrics")).to_pylist()
            columns = ("subset", "metric", "value", "low", "high", "n", "clusters")
            print_table(columns, [[one[name] for name in columns] for one in rows])


def _flat(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Write nested values as `a.b` and its value."""
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def print_plan(planned: list[Planned], forecast: Forecast) -> None:
    """Print each step: reused or to do, why, and what it will take; then the sums, the suites and the sources."""
    costed = {tuple(one.place): one.estimate for one in forecast.steps}
    rows = []
    for one in planned:
        estimate = costed.get((one.iteration, one.step, one.label), Estimate())
        took = (_number(estimate.tokens), _seconds(estimate.seconds))
        rows.append((one.iteration, f"{one.step} {one.label}".strip(), one.state, one.rows, *took, one.why))
    print_table(("iteration", "step", "state", "rows", "tokens", "time", "why"), rows)
    todo = sum(one.state == "to do" for one in planned)
    print(f"{len(planned) - todo} steps reused, {todo} to do")
    if not todo:
        return
    if forecast.suites():
        suites = [_costs(suite, parts) for suite, parts in forecast.suites().items()]
        print_table(("to do", *COSTS), [*suites, _costs("in all", forecast.totals())])
    for source in dict.fromkeys(one.estimate.source for one in forecast.steps if one.estimate.source):
        print(f"rates: {plain(source)}")
    if forecast.sizes:
        print(f"rows and prompts: {plain(forecast.sizes)}")
    unknown = f"; not known: time of {', '.join(forecast.unknown())}" if forecast.unknown() else ""
    print(f"engine starts: {forecast.engine_starts()}{unknown}")


COSTS = ("prompt tokens", "tokens", "time", "GPU hours", "stored")


def _costs(what: str, costs: Mapping[str, Range]) -> tuple[str, ...]:
    counts = (_number(costs["prompt_tokens"]), _number(costs["tokens"]), _seconds(costs["seconds"]))
    return (
        f"evaluate {what}" if what != "in all" else what,
        *counts,
        _hours(costs["gpu_hours"]),
        _bytes(costs["bytes"]),
    )


def _number(one: Range | None) -> str:
    """Show `12 k (9 k–15 k)`."""
    return _ranged(one, lambda value: _scaled(value, 1000, ("", " k", " M", " G", " T")))


def _bytes(one: Range | None) -> str:
    return _ranged(one, _bytes_of)


def _bytes_of(value: float) -> str:
    return f"{_scaled(value, 1024, (' ', ' ki', ' Mi', ' Gi', ' Ti'))}B"


def _hours(one: Range) -> str:
    return _ranged(one, lambda value: f"{value:.3g}")


def _seconds(one: Range | None) -> str:
    return _ranged(one, _duration)


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{seconds / 3600:.1f} h"


def _scaled(value: float, step: int, units: Sequence[str]) -> str:
    at = 0
    while value >= step and at < len(units) - 1:
        value, at = value / step, at + 1
    return f"{value:.3g}{units[at]}"


def _ranged(one: Range | None, show: Callable[[float], str]) -> str:
    if one is None:
        return "–"
    return show(one.value) if one.low == one.high else f"{show(one.value)} ({show(one.low)}–{show(one.high)})"


def print_outcomes(run_id: str, outcomes: Sequence[Outcome], *, as_json: bool) -> None:
    """Print what was planned of each step beside what happened."""
    if as_json:
        print_json([one.to_json() for one in outcomes])
        return
    columns = ("iteration", "step", "tokens planned", "happened", "ratio", "seconds planned", "happened", "ratio")
    rows = [
        (
            one.iteration,
            f"{one.step} {one.label}".strip(),
            *(_plain_number(value) for value in (one.tokens_planned, one.tokens, one.tokens_ratio)),
            *(_plain_number(value) for value in (one.seconds_planned, one.seconds, one.seconds_ratio)),
        )
        for one in outcomes
    ]
    print_table(columns, rows, title=f"{run_id}: planned at its start, and happened")


def _plain_number(value: float | None) -> str | None:
    if value is None:
        return None
    return f"{value:,.0f}".replace(",", " ") if value >= 1000 else f"{value:.3g}"


def print_explanation(explanation: Explanation) -> None:
    """Print each step's state and why, one line for each difference."""
    rows = []
    for one in explanation.steps:
        first = (one.iteration, f"{one.step} {one.label}".strip(), one.state, one.against or "")
        for number, why in enumerate(one.why or ("",)):
            rows.append((*(first if number == 0 else ("",) * len(first)), why))
    against = f"compared with {', '.join(explanation.against)}" if explanation.against else "no run to compare with"
    print_table(("iteration", "step", "state", "against", "why"), rows, title=against)
    for warning in explanation.warnings:
        print(f"note: {plain(warning)}")


def print_verified(found: Verified) -> None:
    """Print what is wrong with what a run names, what was made from it, and how to mend it."""
    how = "read and compared" if found.deep else "there with their lengths"
    print(
        f"{found.run_id}: {found.steps} steps, {found.objects} objects, {_scaled_bytes(found.bytes)}: "
        + (f"{len(found.faults)} fault{'s' * (len(found.faults) > 1)}" if found.faults else f"all {how}")
    )
    for one in found.faults:
        print(f"{one.step} {one.key[:12]}: {plain(one.what)}")
        if one.follows:
            print(f"    made from it: {', '.join(one.follows)}")
    for key in dict.fromkeys(one.key for one in found.faults if one.key):
        print(f"mend: starwheel void {key[:12]} --reason lost")
    if any(one.key for one in found.faults):
        print(f"then: starwheel resume {found.run_id}")


def _scaled_bytes(value: int) -> str:
    return f"{_scaled(value, 1024, (' ', ' ki', ' Mi', ' Gi', ' Ti'))}B"


def print_follows(store: Store, history: History, lost: Sequence[Used]) -> None:
    """Say on stderr which steps count no more, and what the plan makes again."""
    from flows.iteration import star
    from tasks.plan import make_plan

    for one in lost:
        print(f"void or lost: {_step(one.iteration, one.step, one.label)} {one.key[:12]}", file=sys.stderr)
    todo = [one for one in make_plan(store, history.config, star) if one.state == "to do"]
    names = [_step(one.iteration, one.step, one.label) for one in todo]
    if names:
        after = f"; then, where its result differs, {', '.join(names[1:])}" if names[1:] else ""
        print(f"to do again: {names[0]}{after}", file=sys.stderr)


def _step(iteration: int, step: str, label: str) -> str:
    return " ".join(str(part) for part in (step, iteration, label) if part != "")
