"""Make the rows of a judge without reasons: the pairs and their verdicts (paper: GenRM, no chain of thought)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import polars as pl

from storage.schema import JUDGMENT_ID, Split, part
from tasks import pairs
from tasks.judge import prompts, verdict
from tasks.split import committed_split
from tasks.step import Context, Step

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pyarrow as pa

    from configs.run import PromptConfig, RunConfig
    from storage.manifest import Manifest

VERSION = 1

GOLD = "gold"  # stands for the checkpoint of verdicts that no model wrote


def indicator_rows(table: pa.Table, orders: Mapping[str, Sequence[str]], config: PromptConfig) -> pa.Table:
    """Make an `sft` row of every pair and order shown, sorted by id: the completion is the gold verdict, `[[A]]`."""
    asked = [(pair_id, order) for pair_id, shown in orders.items() for order in shown]
    rows = pl.DataFrame(asked, schema={"pair_id": pl.String, "order": pl.String}, orient="row").with_columns(
        pl.lit(GOLD).alias("checkpoint"), pl.lit(0, pl.Int32).alias("sample"), pl.lit(False).alias("hinted")
    )
    text = pl.lit(prompts.OPENING) + pl.col("shown_gold") + pl.lit(prompts.CLOSING)
    rows = verdict.with_shown_gold(rows, table).with_columns(text.alias("text"))
    return pairs.sft_table(rows.sort(JUDGMENT_ID), table, config)


def indicators_step(config: RunConfig, iteration: int, split: Manifest, *, earlier: Manifest | None) -> Step:
    """Name the step by the part's pairs and their gold, and by the rows before where they are trained on again."""
    again = earlier if config.pairs.data == "cumulative" else None
    inputs = {
        "pairs": split.artifact("pairs").digest,
        "part": split.facts["certificate"]["digests"].get(_part(iteration), "none"),
        "earlier": again.artifact("sft").digest if again else None,
    }
    parts = {
        "order": str(config.sample.order),
        "prompt": prompts.prompt_digest(prompts.worded(config)),
        "prompt_version": prompts.VERSION,
        "rows": pairs.VERSION,
        "seed": config.seed,
    }
    return Step("indicators", VERSION, inputs, parts)


def make_indicators(context: Context, iteration: int, split: Manifest, *, earlier: Manifest | None) -> dict[str, Any]:
    """Build the rows of an iteration's part (of the warm start's pairs in iteration 0), in a seeded order."""
    config = context.config
    table = committed_split(context, split.key).pairs(_part(iteration))
    orders = prompts.orders(config.sample.order, config.seed, table.column("pair_id").to_pylist())
    rows = indicator_rows(table, orders, prompts.worded(config))
    fresh = rows.num_rows
    if config.pairs.data == "cumulative" and earlier is not None:
        rows = pairs.concat(context.store.read(earlier.artifact("sft")), rows)
    return {
        "tables": {"sft": pairs.shuffle(rows, seed=config.seed)},
        "counts": {"in": fresh, "kept": fresh, "dropped": {}},
        "facts": {"fresh": fresh, "earlier": rows.num_rows - fresh},
    }


def _part(iteration: int) -> str:
    return part(iteration) if iteration else str(Split.BOOTSTRAP)
