"""The commands that look into a run: show, rows, trace, diff, sql, open. They read, and nothing heavy is imported."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from flows.arguments import JSON, STORE, find_run, open_named

if TYPE_CHECKING:
    from storage.store import Store
    from tasks.look.contents import Contents

RUN = click.argument("run_id", metavar="RUN")
ITERATION = click.argument("iteration", type=click.IntRange(min=0))
LIMIT = click.option("--limit", default=20, show_default=True, type=click.IntRange(min=1), help="Rows shown.")
ARTIFACT = click.argument("artifact")
STEP = click.option(
    "--step", default="", help="Only of this step, as `show RUN ITERATION` names it: select, 'score test', …"
)


@click.command()
@RUN
@click.argument("iteration", type=click.IntRange(min=0), required=False)
@click.argument("step", required=False)
@click.option("--plan", "planned", is_flag=True, help="Show what was planned at the start against what happened.")
@STORE
@JSON
def show(run_id: str, iteration: int | None, step: str | None, planned: bool, store: str | None, as_json: bool) -> None:
    """Show a RUN's results, an ITERATION's funnel, steps and metrics, or what a STEP made, and of what."""
    from flows import printed
    from flows.terminal import print_json
    from tasks.history import step_manifests
    from tasks.look.overview import look_at_iteration

    opened = open_named(store)
    run_id = find_run(opened, run_id)
    if planned:
        from tasks.outcome import compare_plan

        printed.print_outcomes(run_id, compare_plan(opened, run_id), as_json=as_json)
    elif iteration is None:
        printed.print_report(opened, run_id, as_json=as_json)
    elif step is None:
        seen = look_at_iteration(opened, run_id, iteration)
        if as_json:
            print_json(seen.to_json())
        else:
            printed.print_iteration(seen)
    else:
        manifests = step_manifests(opened, run_id, iteration, step)
        if as_json:
            print_json(manifests)
        else:
            printed.print_step(_contents(opened, run_id), iteration, step)


@click.command()
@RUN
@ITERATION
@ARTIFACT
@STEP
@click.option("--id", "wanted", default=None, metavar="PAIR[:ORDER[:SAMPLE]]", help="Only these rows.")
@click.option("--status", default=None, help="Only judgments of this status: correct, wrong, tie, unparsed, …")
@click.option("--subset", default=None, help="Only pairs of this subset.")
@click.option("--hinted", is_flag=True, help="Only what was written with the answer shown.")
@click.option("--flipped", is_flag=True, help="Only pairs that the checkpoint before put on the other side of right.")
@click.option("--contains", default=None, metavar="TEXT", help="Only rows whose text holds this, letter for letter.")
@click.option("--full", is_flag=True, help="Show texts in full: prompt, both responses side by side, rationale.")
@LIMIT
@click.option("--offset", default=0, type=click.IntRange(min=0), help="Rows passed over first.")
@STORE
@JSON
def rows(
    run_id: str,
    iteration: int,
    artifact: str,
    step: str,
    wanted: str | None,
    status: str | None,
    subset: str | None,
    hinted: bool,
    flipped: bool,
    contains: str | None,
    full: bool,
    limit: int,
    offset: int,
    store: str | None,
    as_json: bool,
) -> None:
    """List the rows of an ARTIFACT (judgments, completions, selected, dropped, sft, dpo, pairs, …) of an ITERATION."""
    from flows.printed_rows import print_full, print_rows
    from flows.terminal import print_json
    from storage.schema import Status
    from tasks.look.row_id import parse_id
    from tasks.look.rows import Filters, find_rows

    if status is not None and status not in list(Status):
        raise click.UsageError(f"--status {status}: there are {', '.join(Status)}")
    named = parse_id(wanted) if wanted else None
    filters = Filters(step, named, status, subset, hinted=hinted, flipped=flipped, contains=contains)
    contents = _named(run_id, store)
    page = find_rows(contents, artifact, iteration, filters, limit=limit, offset=offset, full=full)
    if as_json:
        print_json({"total": page.total, "offset": offset, "rows": page.rows})
        return
    title = f"{contents.history.run_id} iteration {iteration} {artifact}"
    if full:
        print_full(page, title=title, offset=offset)
    else:
        print_rows(page, artifact, title=title, offset=offset)


@click.command()
@RUN
@click.argument("row", metavar="ID")
@STORE
@JSON
def trace(run_id: str, row: str, store: str | None, as_json: bool) -> None:
    """Trace a row (ID as `rows` prints it) to its judgments, judge, split and source, and to what it trained."""
    from flows.printed_rows import print_trace
    from flows.terminal import print_json
    from tasks.look.row_id import parse_id
    from tasks.look.trace import trace as trace_row

    wanted = parse_id(row)
    found = trace_row(_named(run_id, store), wanted)
    if as_json:
        print_json(found.to_json())
    else:
        print_trace(found)


@click.command()
@click.argument("before", metavar="RUN_A[@i]")
@click.argument("now", metavar="RUN_B[@j]")
@LIMIT
@STORE
@JSON
def diff(before: str, now: str, limit: int, store: str | None, as_json: bool) -> None:
    """Compare two judges: settings, yields, metrics with paired tests, pairs that flipped.

    A judge is that of the last checkpoint, of checkpoint i, or the untrained one (RUN@base).
    """
    from flows.printed_rows import print_comparison
    from flows.terminal import print_json
    from tasks.look.compare import compare, side

    opened = open_named(store)
    sides = []
    for name in (before, now):
        run_id, _, judge = name.partition("@")
        sides.append(side(_contents(opened, find_run(opened, run_id)), judge or None))
    found = compare(*sides, limit=limit)
    if as_json:
        print_json(found.to_json())
    else:
        print_comparison(found)


@click.command()
@RUN
@click.argument("query", metavar="SQL", required=False)
@LIMIT
@STORE
@JSON
def sql(run_id: str, query: str | None, limit: int, store: str | None, as_json: bool) -> None:
    """Ask SQL (DuckDB) of RUN: one view an artifact, with iteration, step and label. Without SQL, list the views."""
    from flows.terminal import excerpt, print_json, print_table
    from tasks.look import query as asking

    contents = _named(run_id, store)
    if query is None:
        found = asking.views(contents)
        if as_json:
            print_json([one._asdict() for one in found])
            return
        print_table(("view", "rows", "columns"), [(one.name, one.rows, ", ".join(one.columns)) for one in found])
        return
    answer = asking.query(contents, query, limit=limit)
    if answer.more:
        click.echo(f"the first {limit} rows; --limit shows more", err=True)
    if as_json:
        print_json([dict(zip(answer.columns, row, strict=True)) for row in answer.rows])
        return
    shown = [
        [cell if cell is None or isinstance(cell, float) else excerpt(str(cell)) for cell in row] for row in answer.rows
    ]
    print_table(answer.columns, shown)


@click.command("open")
@RUN
@ITERATION
@ARTIFACT
@STEP
@click.option("--as", "library", type=click.Choice(("datasets", "pandas", "polars")), help="Print a line of Python.")
@STORE
@JSON
def open_artifact(
    run_id: str, iteration: int, artifact: str, step: str, library: str | None, store: str | None, as_json: bool
) -> None:
    """Fetch an ARTIFACT, check it, and print where its Parquet files lie, or the line that reads them."""
    from flows.terminal import print_json
    from tasks.look.notebook import reading_line

    contents = _named(run_id, store)
    placed = contents.asked(artifact, iteration, step)
    fetched = contents.fetch(placed)
    files = [path for one in placed for path in fetched[one.place]]
    line = reading_line(files, library) if library else None
    if as_json:
        steps = [
            {
                **one.place._asdict(),
                "rows": one.artifact.rows,
                "digest": one.artifact.digest,
                "files": fetched[one.place],
            }
            for one in placed
        ]
        print_json({"artifact": artifact, "steps": steps, **({library: line} if library else {})})
        return
    click.echo(line or "\n".join(map(str, files)))


def _named(run_id: str, store: str | None) -> Contents:
    opened = open_named(store)
    return _contents(opened, find_run(opened, run_id))


def _contents(store: Store, run_id: str) -> Contents:
    """Read what a run committed; say on stderr what was lost since."""
    from tasks.look.contents import read_contents

    contents = read_contents(store, run_id)
    if contents.lost:
        lost = ", ".join(str(place) for place in contents.lost[:5])
        click.echo(f"note: void or lost, so left out: {lost}{' …' if len(contents.lost) > 5 else ''}", err=True)
    return contents


COMMANDS = (show, rows, trace, diff, sql, open_artifact)
