"""Hold the options that commands share, and find the store and the run that they name."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from storage.store import Store

STORE = click.option(
    "--store", default=None, help="Folder or s3://bucket/prefix. [default: STARWHEEL_STORE or ./starwheel-store]"
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def default_store() -> str:
    """Give the store that is meant where none is named."""
    return os.environ.get("STARWHEEL_STORE", "starwheel-store")


def open_named(store: str | None) -> Store:
    """Open the store that is named; one that isn't there is not made."""
    from storage.store import open_store

    return open_store(store or default_store(), create=False)


def find_run(store: Store, name: str) -> str:
    """Take a run id, or the beginning of one that names one run; `last` is the one made last of those not removed."""
    known = store.runs()
    if name in known:
        return name
    if name == "last" and known:
        latest = sorted(known, key=lambda run_id: run_id.rsplit("-", 2)[1:], reverse=True)
        if (found := next((one for one in latest if not _is_removed(store, one)), None)) is not None:
            return found
    begun = [run_id for run_id in known if run_id.startswith(name)]
    if len(begun) == 1:
        return begun[0]
    hint = f"it may be {', '.join(begun[:5])}" if begun else f"`starwheel ls` lists {len(known)} runs"
    raise click.UsageError(f"{store.url}: no run is named {name}; {hint}")


def _is_removed(store: Store, run_id: str) -> bool:
    from storage.errors import StoreError

    try:
        return store.is_removed(run_id)
    except StoreError:  # a command that is given the run says what is wrong with it
        return False
