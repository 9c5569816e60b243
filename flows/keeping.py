"""The commands that look after a store: verify, void, pin, unpin, rm, gc."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from flows.arguments import JSON, STORE, find_run, open_named

if TYPE_CHECKING:
    from storage.collect import Candidate, Collection

FAULTY = 1  # exit code where verify found something
DAY = 86400.0


@click.command()
@click.argument("run_id", metavar="RUN")
@click.option("--deep", is_flag=True, help="Read every byte and compare its digest too.")
@STORE
@JSON
def verify(run_id: str, deep: bool, store: str | None, as_json: bool) -> None:
    """Look whether all that RUN names is there, with its length; exit code 1 where something is not."""
    from flows.printed import print_verified
    from flows.terminal import print_json
    from tasks.verify import verify as look

    opened = open_named(store)
    found = look(opened, find_run(opened, run_id), deep=deep)
    if as_json:
        print_json(found.to_json())
    else:
        print_verified(found)
    if found.faults:
        sys.exit(FAULTY)


@click.command()
@click.argument("key", metavar="KEY")
@click.option("--reason", required=True, help="Why the step's attempt no longer counts; kept in the store.")
@STORE
def void(key: str, reason: str, store: str | None) -> None:
    """Let the step KEY (or its beginning, from `show RUN ITERATION`) be computed again; nothing is deleted."""
    from getpass import getuser

    opened = open_named(store)
    key = opened.find_step(key)
    if not opened.begun(key):
        raise click.UsageError(f"{opened.url}: step {key[:12]} is void already, and not begun again since")
    number = opened.void(key, reason, getuser())
    click.echo(f"attempt {number} of {key[:12]} is void; runs that need the step compute it again")


@click.command()
@click.argument("judge", metavar="RUN[@N]")
@click.argument("name", metavar="NAME")
@STORE
def pin(judge: str, name: str, store: str | None) -> None:
    """Keep checkpoint N of RUN (by default its last) under NAME, whatever becomes of the run."""
    from storage.errors import DataError
    from storage.refs import get_ref, pin_down
    from tasks.keep import checkpoint_pin

    run_id, _, number = judge.partition("@")
    if number and not number.isdecimal():
        raise click.UsageError(f"{judge}: write RUN@N with the number of a checkpoint, e.g. last@2")
    opened = open_named(store)
    found = checkpoint_pin(opened, find_run(opened, run_id), int(number) if number else None)
    before = get_ref(opened.backend, name)
    if before is not None and before != found:
        raise DataError(f"{name} is {before.words} already; `starwheel unpin {name}`, or choose another name")
    pin_down(opened, name, found)
    click.echo(f"{name} is {found.words}")


@click.command()
@click.argument("name", metavar="NAME")
@STORE
def unpin(name: str, store: str | None) -> None:
    """Let go of what is pinned under NAME; nothing is deleted."""
    from storage.refs import all_refs, get_ref, set_ref

    opened = open_named(store)
    found = get_ref(opened.backend, name)
    if found is None:
        known = ", ".join(all_refs(opened.backend)) or "nothing"
        raise click.UsageError(f"{opened.url}: nothing is pinned under {name}; pinned: {known}")
    set_ref(opened.backend, name, None)
    click.echo(f"{name} was {found.words}; it is not kept under this name any more")


@click.command()
@click.argument("run_id", metavar="RUN")
@click.option("--yes", is_flag=True, help="Don't ask.")
@click.option(
    "--keep", "kept", multiple=True, type=click.Choice(["best", "last"]), help="Pin this checkpoint as RUN-best first."
)
@STORE
def rm(run_id: str, yes: bool, kept: tuple[str, ...], store: str | None) -> None:
    """Remove RUN: it can't be resumed, and `gc` deletes what no other run and no pin uses."""
    from storage.errors import DataError
    from storage.hold import REMOVED
    from storage.refs import pin_down
    from tasks.history import read_history
    from tasks.keep import best_checkpoint, checkpoint_pin, remove, summary

    opened = open_named(store)
    run_id = find_run(opened, run_id)
    if kept and read_history(opened, run_id).state == REMOVED:
        raise DataError(f"{run_id} was removed already, so there is nothing to keep of it; leave --keep out")
    numbers = {which: best_checkpoint(opened, run_id) if which == "best" else None for which in kept}
    pins = {f"{run_id}-{which}": checkpoint_pin(opened, run_id, number) for which, number in numbers.items()}
    if not yes:
        click.confirm(f"Remove {run_id} ({summary(opened, run_id)}) from {opened.url}?", abort=True, err=True)
    for name, found in pins.items():
        pin_down(opened, name, found)
        click.echo(f"{name} is {found.words}")
    remove(opened, run_id, tell=lambda message: click.echo(message, err=True))
    click.echo(f"{run_id} is removed; `starwheel gc --yes` deletes what nothing else uses")


@click.command()
@click.option("--yes", is_flag=True, help="Delete what an earlier `gc --yes` wrote down; write down the rest.")
@click.option("--grace", default=7.0, show_default=True, metavar="DAYS", help="Time between the two passes.")
@STORE
@JSON
def gc(yes: bool, grace: float, store: str | None, as_json: bool) -> None:
    """Show what no run and no pin uses. With --yes it is written down, and deleted by a later `gc --yes`."""
    from flows.terminal import print_json
    from storage.collect import collect

    if not grace >= 0:
        raise click.UsageError(f"--grace {grace}: give a number of days, 0 or more")
    opened = open_named(store)
    found = collect(opened, delete=yes, grace_s=grace * DAY)
    if as_json:
        print_json(_collected(found))
        return
    _print_collected(found, yes=yes, grace=grace)


def _state(found: Collection, one: Candidate) -> str:
    if one in found.deleted:
        return "deleted"
    if one.name in found.spared:
        return f"kept: {found.spared[one.name]}"
    return "due" if one in found.due else "waiting"


def _collected(found: Collection) -> list[dict[str, object]]:
    return [
        {
            "name": one.name,
            "why": one.why,
            "objects": len(one.keys),
            "bytes": found.bytes[one.name],
            "state": _state(found, one),
        }
        for one in (*found.due, *found.waiting)
    ]


def _print_collected(found: Collection, *, yes: bool, grace: float) -> None:
    from flows.terminal import print_table

    rows = _collected(found)
    if not rows:
        click.echo("nothing to collect: runs and pins use all that is there")
        return
    print_table(("what", "why", "objects", "bytes", "state"), [tuple(one.values()) for one in rows])
    click.echo(
        f"{len(found.deleted)} deleted, {len(found.due) - len(found.deleted)} due, {len(found.waiting)} waiting: "
        f"due is what a `gc --yes` wrote down {grace:g} days ago or more"
        + ("" if yes else "; this was a dry run, nothing was written or deleted")
    )


COMMANDS = (verify, void, pin, unpin, rm, gc)
