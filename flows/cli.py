"""The command line. Every user error is one sentence and exit code 2; nothing heavy is imported before it is needed."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

import click

from flows import keeping, look
from flows.arguments import JSON, STORE, default_store, find_run, open_named

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from configs.run import RunConfig

SET = click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a config key, e.g. train.epochs=2."
)
AGAINST = click.option(
    "--against", default=None, metavar="RUN", help="Compare with this run. [default: the latest run of the same name]"
)

# Prefect's API gets every log line; the terminal has lines of its own, and errors are told as one sentence.
QUIET_PREFECT = {"PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL", "PREFECT_SERVER_LOGGING_LEVEL": "ERROR"}


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="starwheel")
def cli() -> None:
    """Turn preference pairs into ever better judges: the STaR loop, resumable and inspectable."""


@cli.command()
@click.argument("config")
@SET
@STORE
@JSON
def run(config: str, overrides: Sequence[str], store: str | None, as_json: bool) -> None:
    """Run the loop of CONFIG (a preset or a YAML file). Committed steps of earlier runs are reused."""
    from configs.load import load_config

    _start(load_config(config, [*_store_override(store), *overrides]), as_json=as_json)


def _start(described: RunConfig, *, as_json: bool) -> None:
    from configs.budget import find_machine, fit
    from flows.iteration import star
    from storage.store import open_store
    from tasks.outcome import freeze_plan
    from tasks.run import create_run

    fit(described, find_machine())
    opened = open_store(described.store)
    run_id = create_run(opened, described)
    freeze_plan(opened, run_id, described, star)
    _run_flow(run_id, opened.url, as_json=as_json)


@cli.command()
@click.argument("run_id", metavar="RUN")
@STORE
@JSON
def resume(run_id: str, store: str | None, as_json: bool) -> None:
    """Go on with RUN where it ended. What is committed is not done again."""
    from flows.printed import print_follows, print_report
    from storage.hold import wait_until_free
    from tasks.history import read_history
    from tasks.verify import not_counting

    opened = open_named(store)
    run_id = find_run(opened, run_id)
    history = read_history(opened, run_id)
    lost = not_counting(opened, history)
    if history.state == "done" and not lost:
        click.echo(f"{run_id} is done; nothing is left to do.", err=True)
        print_report(opened, run_id, as_json=as_json)
        return
    freed = wait_until_free(opened, run_id, tell=lambda message: click.echo(message, err=True))
    if lost:
        print_follows(opened, history, lost)
    _run_flow(run_id, opened.url, as_json=as_json, freed=freed)


@cli.command()
@click.argument("run_id", metavar="RUN")
@click.option("--tokens", default=0, metavar="N", help="Continue truncated completions by at most N tokens.")
@click.option("--redraws", default=0, metavar="N", help="Draw completions without a verdict at most N times again.")
@STORE
@JSON
def repair(run_id: str, tokens: int, redraws: int, store: str | None, as_json: bool) -> None:
    """Run RUN anew with its broken completions mended: none that has a verdict is drawn again.

    A new run of the same configuration with `repair.tokens` and `repair.redraws`; the first iteration's samples are
    reused, what follows from them is made again. Evaluation is never mended.
    """
    from configs.load import with_section
    from tasks.history import broken_completions

    opened = open_named(store)
    run_id = find_run(opened, run_id)
    if not tokens and not redraws:
        found = broken_completions(opened, run_id)
        said = ", ".join(f"{number} {status}" for status, number in found.items()) or "no selection yet"
        raise click.UsageError(f"{run_id} has {said}; say what to mend: --tokens N, --redraws N, or both")
    described = with_section(opened.run_config(run_id), "repair", {"tokens": tokens, "redraws": redraws})
    _start(described.model_copy(update={"store": opened.url}), as_json=as_json)


def _run_flow(run_id: str, store: str, *, as_json: bool, freed: int = 0) -> None:
    import signal

    from flows.printed import print_report
    from storage.errors import DataError
    from storage.store import open_store
    from tasks.jobs.launch import QUIET

    for name, value in {**QUIET, **QUIET_PREFECT}.items():
        os.environ.setdefault(name, value)
    for sign in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(sign, lambda number, _: sys.exit(128 + number))
    where = "" if store == default_store() else f" --store {store}"
    click.echo(f"run {run_id} in {store}", err=True)
    try:
        from flows.embedded import prefect_api
        from flows.star import star

        with prefect_api():
            done = star(run_id=run_id, store=store, freed=freed)
    except BaseException as stop:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the jobs are being ended; a second Ctrl-C would only tear that
        again = f"Go on with: starwheel resume {run_id}{where}"
        if isinstance(stop, DataError):
            again = (
                f"Mend the file and go on with: starwheel resume {run_id}{where}; or mend the configuration and "
                "`starwheel run` it again, what is done is reused"
            )
        click.echo(f"\n{run_id} stopped; what is committed stays. {again}", err=True)
        raise
    print_report(open_store(store, create=False), run_id, as_json=as_json)
    if not as_json:
        for file in done["report"]:
            click.echo(f"wrote {file}", err=True)
        click.echo(f"look inside: starwheel show {run_id}{where}", err=True)


@cli.command()
@click.argument("config")
@SET
@STORE
@AGAINST
@JSON
def plan(config: str, overrides: Sequence[str], store: str | None, against: str | None, as_json: bool) -> None:
    """Show each step of CONFIG: reused or to do, why, and what it will take. Starts nothing, computes nothing."""
    from configs.load import load_config
    from flows.iteration import star
    from flows.printed import print_plan
    from flows.terminal import print_json
    from storage.store import open_store
    from tasks.earlier import named_run
    from tasks.forecast import to_json
    from tasks.outcome import cost_plan

    described = load_config(config, [*_store_override(store), *overrides])
    opened = open_store(described.store)
    compared = named_run(opened, find_run(opened, against)) if against else None
    planned, forecast = cost_plan(opened, described, star, compared)
    if as_json:
        print_json(to_json(planned, forecast))
        return
    print_plan(planned, forecast)


@cli.command()
@click.argument("run_id", metavar="RUN")
@click.argument("step", required=False)
@STORE
@AGAINST
@JSON
def explain(run_id: str, step: str | None, store: str | None, against: str | None, as_json: bool) -> None:
    """Say why each step of RUN (or those called STEP) would be reused, or is stale or missing, as it is made now."""
    from dataclasses import asdict, replace

    from flows.iteration import star
    from flows.printed import print_explanation
    from flows.terminal import print_json
    from tasks.earlier import earlier_runs, named_run, read_earlier, readable
    from tasks.explain import explain
    from tasks.history import read_history

    opened = open_named(store)
    history = read_history(opened, find_run(opened, run_id))
    if against:
        compared = named_run(opened, find_run(opened, against))
    else:
        runs = earlier_runs(opened, history.config.name, before=history.run_id)
        compared = [history, *readable(opened, runs)]
    earlier = read_earlier(opened, compared)
    found = explain(opened, history.config, star, earlier)
    if step is not None:
        named = tuple(one for one in found.steps if one.step == step)
        if not named:
            known = ", ".join(dict.fromkeys(one.step for one in found.steps))
            raise click.UsageError(f"{history.run_id} has no step `{step}`; it has {known}")
        found = replace(found, steps=named)
    if as_json:
        print_json(asdict(found))
        return
    print_explanation(found)


@cli.command()
@STORE
@JSON
def ls(store: str | None, as_json: bool) -> None:
    """List the runs of a store."""
    from flows.terminal import print_json, print_table
    from tasks.history import summarise_any

    opened = open_named(store)
    runs = [summarise_any(opened, run_id) for run_id in opened.runs()]
    if as_json:
        print_json(runs)
        return
    columns = ("run", "state", "iteration", "steps", "reused", "started", "last record")
    print_table(columns, [tuple(one[name.replace(" ", "_")] for name in columns) for one in runs], title=opened.url)


@cli.command()
@click.argument("run_id", metavar="RUN")
@STORE
@JSON
def status(run_id: str, store: str | None, as_json: bool) -> None:
    """Say how far RUN is."""
    from flows.terminal import print_json, print_table
    from tasks.history import summarise

    opened = open_named(store)
    summary = summarise(opened, find_run(opened, run_id))
    if as_json:
        print_json(summary)
        return
    print_table(("", ""), summary.items())


for _command in (*look.COMMANDS, *keeping.COMMANDS):
    cli.add_command(_command)


@cli.group()
def config() -> None:
    """List, show and check configurations."""


@config.command("list")
@JSON
def config_list(as_json: bool) -> None:
    """List the presets."""
    from configs.load import presets
    from flows.terminal import print_json

    if as_json:
        print_json(presets())
        return
    click.echo("\n".join(presets()))


@config.command("show")
@click.argument("name", metavar="CONFIG")
@SET
@JSON
def config_show(name: str, overrides: Sequence[str], as_json: bool) -> None:
    """Show CONFIG with every default filled in, and what is still to be set."""
    from configs.load import preview, write
    from flows.terminal import print_json

    values, missing = preview(name, overrides)
    print_json(values) if as_json else click.echo(write(values), nl=False)
    if missing:
        values_word = "value" if missing == 1 else "values"
        click.echo(f"{missing} {values_word} must be set before {name} can run", err=True)


@config.command("validate")
@click.argument("name", metavar="CONFIG")
@SET
@JSON
def config_validate(name: str, overrides: Sequence[str], as_json: bool) -> None:
    """Check CONFIG: all problems at once, lengths and memory computed; no model is loaded."""
    from configs.budget import fit
    from configs.facts import missing_token
    from configs.load import load_config
    from flows.terminal import print_json, print_table

    described = load_config(name, overrides)
    needs, lacks = fit(described), missing_token(described.model)
    whole, written = described.model.max_len, described.sample.max_tokens
    lengths = {"prompt": whole - written, "written": written, "whole": whole}
    if as_json:
        print_json({"valid": True, "lengths": lengths, "memory": needs, "notes": [lacks] if lacks else []})
        return
    print_table(("needs", "GiB"), needs)
    click.echo(
        f"lengths: prompts of at most {lengths['prompt']} tokens (pairs over it are dropped as too_long), "
        f"{written} to write, {whole} in all"
    )
    if lacks:
        click.echo(f"note: {lacks}")
    click.echo(f"{name} is valid")


@cli.group()
def data() -> None:
    """Look into files of preference pairs."""


@data.command("inspect")
@click.argument("path", metavar="FILE")
@click.option("--file", "written", default=None, help="parquet, json, jsonl or csv. [default: told from the file]")
@click.option("--format", "layout", default=None, help="As data.sources.N.format. [default: told from the columns]")
@click.option("--column", "columns", multiple=True, metavar="OURS=COLUMN", help="As data.sources.N.columns.")
@click.option("--tokenizer", default=None, help="Folder with tokenizer.json: measure lengths in tokens.")
@JSON
def data_inspect(
    path: str, *, written: str | None, layout: str | None, columns: Sequence[str], tokenizer: str | None, as_json: bool
) -> None:
    """Show what FILE (local or s3://) holds: format, counts, drops, lengths, balance, trivial judges, a few pairs."""
    import tempfile
    from dataclasses import replace
    from pathlib import Path

    from flows.printed import print_profile
    from flows.terminal import print_json
    from storage.inputs import fetch_input
    from tasks.data.formats import make_form, read_pairs
    from tasks.data.profile import make_profile, token_counter

    form = make_form(file=written, layout=layout, columns=_assignments(columns))
    count = token_counter(tokenizer) if tokenizer else len
    with tempfile.TemporaryDirectory() as cache:
        file = fetch_input(path, Path(cache))
        reading = read_pairs(file.path, name=Path(path).name, form=replace(form, address=file.url))
    profile = make_profile(reading, count=count, unit="tokens" if tokenizer else "characters")
    if as_json:
        print_json({"file": file.url, "bytes": file.bytes, "sha256": file.sha256, **profile.to_json()})
        return
    print_profile(file.url, profile)


def _assignments(columns: Sequence[str]) -> dict[str, str]:
    parted = [column.partition("=") for column in columns]
    if wrong := [column for column, (_, sign, theirs) in zip(columns, parted, strict=True) if not sign or not theirs]:
        raise click.UsageError(f"--column {wrong[0]}: write OURS=COLUMN, e.g. prompt=question")
    return {ours: theirs for ours, _, theirs in parted}


def _store_override(store: str | None) -> list[str]:
    """Let --store and STARWHEEL_STORE stand over a config's store; --set stands over both."""
    named = store or os.environ.get("STARWHEEL_STORE")
    return [f"store={json.dumps(named)}"] if named else []


def main(call: Callable[..., Any] = cli) -> None:
    """Run the command line and turn errors into sentences and exit codes."""
    try:
        call(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Exception as error:
        code = getattr(error, "exit_code", None)
        if code is None:
            raise
        from flows.terminal import plain

        sentences = "\n".join(plain(line) for line in str(error).splitlines())
        click.echo(f"starwheel: {sentences}", err=True)
        sys.exit(code)


if __name__ == "__main__":
    main()
