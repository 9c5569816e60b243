"""Evaluate a checkpoint: both orders, votes in blocks of eight that can be added to, forced choice beside them.

A judge without reasons (genrm) casts no votes: the letters are read once an order, behind the opening of its verdict.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from configs.run import Method, RunConfig
from storage.schema import Order, Split
from tasks.engines.base import Sampling
from tasks.generation import Questions
from tasks.judge import prompts
from tasks.sample import generation_parts
from tasks.step import Step

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

    from tasks.models import Model

VERSION = 2
BLOCK = 8


@dataclass(frozen=True)
class Block:
    """Name some of the votes on one suite in one order: `votes` draws, the first of which is number `first`.

    Without votes the letters alone are read.
    """

    suite: str
    order: Order
    first: int
    votes: int

    def __str__(self) -> str:
        what = f"votes {self.first + 1}–{self.first + self.votes}" if self.votes else "letters"
        return f"{self.suite} {self.order} {what}"


def blocks(config: RunConfig, suite: str) -> Iterator[Block]:
    """Cut the votes on a suite; raising `votes` adds blocks and leaves the full ones as they are."""
    votes = config.evaluate.dev_votes if suite == Split.DEV else config.evaluate.votes
    if artifact(config) == "choices":
        votes = 0
    for order in Order:
        for first in range(0, max(votes, 1), BLOCK):
            yield Block(suite, order, first, min(BLOCK, votes - first))


def artifact(config: RunConfig) -> str:
    """Name what an evaluation stores: `completions`, or `choices` where no text is written."""
    return "choices" if config.method is Method.GENRM else "completions"


def evaluate_step(config: RunConfig, pairs: str, model: Model, block: Block) -> Step:
    """Name the step; `pairs` is the digest of the suite's pair ids."""
    inputs = {"pairs": pairs, "model": model.digest}
    if not block.votes:
        read = {"letters": prompts.OPENING, "order": str(block.order)}
        return Step("evaluate", VERSION, inputs, {**generation_parts(config), **read})
    parts = {
        **generation_parts(config),
        "evaluate": {"temperature": config.evaluate.temperature, "top_p": config.evaluate.top_p},
        "max_tokens": config.sample.max_tokens,
        "stop": list(config.sample.stop),
        "order": str(block.order),
        "first": block.first,
        "votes": block.votes,
    }
    return Step("evaluate", VERSION, inputs, parts)


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
        sampling=sampling if block.votes else None,
        model=model.digest,
        forced_choice=block.votes > 0,
        shard_pairs=config.evaluate.shard_pairs,
        first_sample=block.first,
    )
