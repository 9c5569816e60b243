"""Evaluate a checkpoint: both orders, votes in blocks of eight that can be added to, forced choice beside them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from storage.schema import Order
from tasks.engines.base import Sampling
from tasks.generation import Questions
from tasks.sample import generation_parts
from tasks.step import Step

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

    from configs.run import RunConfig
    from tasks.models import Model

VERSION = 2
BLOCK = 8


@dataclass(frozen=True)
class Block:
    """Name some of the votes on one suite in one order: `votes` draws, the first of which is number `first`."""

    suite: str
    order: Order
    first: int
    votes: int

    def __str__(self) -> str:
        return f"{self.suite} {self.order} votes {self.first + 1}–{self.first + self.votes}"


def blocks(suite: str, votes: int) -> Iterator[Block]:
    """Cut the votes on a suite; raising `votes` adds blocks and leaves the full ones as they are."""
    for order in Order:
        for first in range(0, votes, BLOCK):
            yield Block(suite, order, first, min(BLOCK, votes - first))


def evaluate_step(config: RunConfig, pairs: str, model: Model, block: Block) -> Step:
    """Name the step; `pairs` is the digest of the suite's pair ids."""
    parts = {
        **generation_parts(config),
        "evaluate": {"temperature": config.evaluate.temperature, "top_p": config.evaluate.top_p},
        "max_tokens": config.sample.max_tokens,
        "stop": list(config.sample.stop),
        "order": str(block.order),
        "first": block.first,
        "votes": block.votes,
    }
    return Step("evaluate", VERSION, {"pairs": pairs, "model": model.digest}, parts)


def evaluate_questions(config: RunConfig, pairs: pa.Table, model: Model, block: Block) -> Questions:
    """Ask the votes of a block, and the forced choice after the rationale of each."""
    sampling = Sampling(
        block.votes,
        config.evaluate.temperature,
        config.evaluate.top_p,
        config.sample.max_tokens,
        config.sample.stop,
    )
    return Questions(
        pairs=pairs,
        orders={one: [str(block.order)] for one in pairs.column("pair_id").to_pylist()},
        sampling=sampling,
        model=model.digest,
        forced_choice=True,
        shard_pairs=config.evaluate.shard_pairs,
        first_sample=block.first,
    )
