"""Run a small loop to its end and look at what it committed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import polars as pl
import small

from flows.iteration import star

if TYPE_CHECKING:
    from pathlib import Path

    from storage.manifest import Manifest
    from storage.store import Store
    from tasks.run import Checkpoint, Run


@dataclass
class Finished:
    """Hold a finished run: its judge, and its steps in the order in which they were committed."""

    store: Store
    run: Run
    judge: Checkpoint
    events: list[dict[str, Any]]

    @cached_property
    def manifests(self) -> dict[tuple[int, str, str], Manifest]:
        found = {}
        for one in self.events:
            manifest = self.store.manifest(one["key"])
            assert manifest is not None
            found[one["iteration"], one["step"], one["label"]] = manifest
        return found

    def rows(self, iteration: int, step: str, artifact: str) -> pl.DataFrame:
        return pl.DataFrame(self.store.read(self.manifests[iteration, step, ""].artifact(artifact)))

    @cached_property
    def sets(self) -> dict[str, set[str]]:
        """The pair ids of each set."""
        splits = self.rows(0, "split", "splits").filter(pl.col("split") != "dropped")
        return {str(name): set(rows["pair_id"]) for (name,), rows in splits.group_by("split")}

    @property
    def iterations(self) -> range:
        return range(1, self.run.config.iterations + 1)


def finish(folder: Path, **changes: Any) -> Finished:
    events: list[dict[str, Any]] = []
    described = small.config(folder, **changes)
    store, run = small.start(described, listen=lambda one: events.append(dict(one)) if one["event"] == "step" else None)
    return Finished(store, run, star(run), events)
