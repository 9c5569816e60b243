"""Sample rationales: the latest checkpoint judges a fresh part of the pairs (paper, section 3.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from configs.run import RunConfig, key_part
from tasks.engines.base import Sampling
from tasks.generation import Questions
from tasks.judge import prompts
from tasks.step import Step

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pyarrow as pa

    from tasks.generation import Begun
    from tasks.models import Model

VERSION = 1


def generation_parts(config: RunConfig) -> dict[str, object]:
    """Give what every completion depends on beside its pairs, model and draws."""
    return {
        "engine": key_part(config.engine),
        "prompt": prompts.prompt_digest(prompts.worded(config)),
        "prompt_version": prompts.VERSION,
        "template_kwargs": config.model.template_kwargs,
        "max_len": config.model.max_len,
        "seed": config.seed,
    }


def sampling(config: RunConfig, draws: int) -> Sampling:
    """Say how completions for training are drawn."""
    sample = config.sample
    return Sampling(draws, sample.temperature, sample.top_p, sample.max_tokens, sample.stop)


def sample_step(config: RunConfig, pairs: str, model: Model) -> Step:
    """Name the step; `pairs` is the digest of the part's pair ids, which name their content."""
    parts = {**generation_parts(config), "sample": key_part(config.sample)}
    return Step("sample", VERSION, {"pairs": pairs, "model": model.digest}, parts)


def sample_questions(
    config: RunConfig,
    pairs: pa.Table,
    model: Model,
    *,
    begun: Mapping[tuple[str, str], Sequence[Begun]] | None = None,
) -> Questions:
    """Ask `sample.n` completions a pair, in the order of hash(seed, pair id) or in both; or mend what was `begun`."""
    sample = config.sample
    return Questions(
        pairs=pairs,
        orders=prompts.orders(sample.order, config.seed, pairs.column("pair_id").to_pylist()),
        sampling=sampling(config, sample.n),
        model=model.digest,
        forced_choice=False,
        shard_pairs=sample.shard_pairs,
        begun=begun,
    )
