"""Mend what sampling left broken, for training alone: truncated completions go on, unparsed ones are drawn again.

A truncated text is continued and not drawn again, which would favour short rationales. Evaluation mends nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import polars as pl

from configs.run import RunConfig, key_part
from storage.schema import Status, empty
from tasks.generation import Begun, Questions
from tasks.judge import frames, verdict
from tasks.sample import generation_parts, sample_questions
from tasks.step import Step

if TYPE_CHECKING:
    import pyarrow as pa

    from storage.manifest import Manifest
    from tasks.models import Model

VERSION = 1


def wanted(config: RunConfig) -> bool:
    """Say whether the config has anything mended."""
    return config.repair.tokens > 0 or config.repair.redraws > 0


def mended_statuses(config: RunConfig) -> list[str]:
    """Name the statuses of the completions that the config has mended."""
    kinds = {Status.TRUNCATED: config.repair.tokens, Status.UNPARSED: config.repair.redraws}
    return [kind.value for kind, asked in kinds.items() if asked]


def broken(config: RunConfig, completions: pa.Table, pairs: pa.Table) -> pa.Table:
    """Give the completions that the config has mended."""
    status = frames.series(verdict.judge(completions, pairs).column("status"))
    return completions.filter(status.is_in(mended_statuses(config)).to_arrow())


def repair_step(config: RunConfig, samples: Manifest, model: Model) -> Step:
    """Name the step by all that was sampled and what is done about it."""
    parts = {
        **generation_parts(config),
        "sample": key_part(config.sample),
        "repair": key_part(config.repair),
        "parser": verdict.VERSION,
    }
    inputs = {"completions": samples.artifact("completions").digest, "model": model.digest}
    return Step("repair", VERSION, inputs, parts)


def repair_questions(config: RunConfig, rows: pa.Table, pairs: pa.Table, model: Model) -> Questions:
    """Ask for the broken rows alone, each as it was shown."""
    begun: dict[tuple[str, str], list[Begun]] = {}
    for row in rows.to_pylist():
        one = Begun(row, "", config.repair.redraws, config.sample.max_tokens)
        if row["finish_reason"] == "length":
            one = Begun(row, row["text"].rstrip("\ufffd"), 1, config.repair.tokens)
        begun.setdefault((row["pair_id"], row["order"]), []).append(one)
    asked = frames.frame(pairs.select(["pair_id"])).select(pl.col("pair_id").is_in([pair for pair, _ in begun]))
    return sample_questions(config, pairs.filter(asked.to_series().to_arrow()), model, begun=begun)


def nothing() -> dict[str, Any]:
    """Give what is committed where nothing is broken."""
    return {"tables": {"completions": empty("completions")}, "counts": {"in": 0, "kept": 0, "dropped": {}}}
