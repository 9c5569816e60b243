"""Print what the reading commands found: reports, profiles, plans, explanations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flows.terminal import plain, print_json, print_table

if TYPE_CHECKING:
    from storage.store import Store
    from tasks.data.profile import Profile
    from tasks.explain import Explanation
    from tasks.plan import Planned


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
    from tasks.report import make_report, results_table

    report = make_report(store, run_id)
    if as_json:
        print_json(report.to_json())
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
    print(f"engine starts: {report.engine_starts}")


def print_plan(planned: list[Planned]) -> None:
    """Print each step: reused or to do, and why."""
    rows = [(one.iteration, f"{one.step} {one.label}".strip(), one.state, one.rows, one.why) for one in planned]
    print_table(("iteration", "step", "state", "rows", "why"), rows)
    todo = sum(one.state == "to do" for one in planned)
    print(f"{len(planned) - todo} steps reused, {todo} to do")


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
