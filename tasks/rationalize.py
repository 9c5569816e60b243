"""Ask for rationales with the answer shown: of the pairs that failed (STaR), or of a whole part (STaR-Rationalizer)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc

from configs.run import Method, RunConfig, key_part
from storage.digest import digest_table
from storage.schema import Status, empty
from tasks.generation import Questions
from tasks.judge import hints, prompts, verdict
from tasks.sample import generation_parts, sampling
from tasks.step import Step

if TYPE_CHECKING:
    import pyarrow as pa

    from tasks.models import Model

VERSION = 1


def failed(completions: pa.Table, pairs: pa.Table) -> pa.Table:
    """Give the pairs that were asked and have no right completion in any order, in the order of `pairs`."""
    judgments = verdict.judge(completions, pairs)
    right = judgments.filter(pc.equal(judgments["status"], Status.CORRECT.value))
    asked, reached = (pc.is_in(pairs["pair_id"], one["pair_id"].combine_chunks()) for one in (judgments, right))
    return pairs.filter(pc.and_not(asked, reached))


def draws(config: RunConfig) -> int:
    """Count the hinted completions of a pair and order."""
    return config.sample.n if config.method is Method.STAR_RATIONALIZER else config.rationalize.n


def rationalize_step(config: RunConfig, pairs: pa.Table, model: Model) -> Step:
    """Name the step by the ids of the pairs it asks and the gold it shows."""
    parts = {
        **generation_parts(config),
        "sample": {**key_part(config.sample), "n": draws(config)},
        "hint": config.rationalize.hint,
        "hints": hints.VERSION,
    }
    inputs = {"pairs": digest_table(pairs.select(["pair_id", "gold"])), "model": model.digest}
    return Step("rationalize", VERSION, inputs, parts)


def rationalize_questions(config: RunConfig, pairs: pa.Table, model: Model) -> Questions:
    """Ask in the orders in which the pairs are sampled."""
    return Questions(
        pairs=pairs,
        orders=prompts.orders(config.sample.order, config.seed, pairs.column("pair_id").to_pylist()),
        sampling=sampling(config, draws(config)),
        model=model.digest,
        forced_choice=False,
        shard_pairs=config.sample.shard_pairs,
        hint=config.rationalize.hint,
    )


def nothing() -> dict[str, Any]:
    """Give what is committed where no pair failed."""
    return {"tables": {"completions": empty("completions")}, "counts": {"in": 0, "kept": 0, "dropped": {}}}
