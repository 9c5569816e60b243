"""Count the pairs of each set and the tokens of their prompts: from the committed split, else from the sources."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import polars as pl

from configs.run import EngineKind, RunConfig
from storage.schema import Split, part
from tasks import split
from tasks.estimate import ASSUMED, HUB_SIZES, Range

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import pyarrow as pa

    from configs.run import Source
    from storage.manifest import Manifest
    from storage.store import Store

ROOM = 0.1  # for what a split by hash and its drops do to an expected share


@dataclass(frozen=True)
class Sizes:
    """Hold pairs and mean prompt tokens by set; a set that isn't there is not known. `source` says how."""

    pairs: Mapping[str, int] = field(default_factory=dict)
    prompt_tokens: Mapping[str, Range] = field(default_factory=dict)
    exact: bool = False
    source: str = ""

    def count(self, name: str) -> Range | None:
        """Give the pairs of a set."""
        if name not in self.pairs:
            return None
        known = Range.exactly(self.pairs[name])
        return known if self.exact else known.widened(ROOM)


def split_sizes(store: Store, config: RunConfig, manifest: Manifest) -> Sizes:
    """Read them off a committed split; one made before lengths were recorded is measured in characters."""
    pairs = manifest.facts["certificate"]["pairs"]
    if "prompt_tokens" in manifest.facts:
        lengths = {name: Range.exactly(mean) for name, mean in manifest.facts["prompt_tokens"].items()}
        return Sizes(pairs, lengths, exact=True, source="the committed split")
    splits = pl.DataFrame(store.read(manifest.artifact("splits"), columns=["pair_id", "split"]))
    table = store.read(manifest.artifact("pairs"))
    measured = pl.DataFrame({"pair_id": table["pair_id"], "characters": _characters(table)})
    means = measured.join(splits, on="pair_id").group_by("split").agg(pl.col("characters").mean())
    lengths = {name: _tokens(config, mean) for name, mean in means.iter_rows()}
    return Sizes(pairs, lengths, exact=True, source="the committed split, prompts by their characters")


def source_sizes(config: RunConfig, cache: Path) -> Sizes:
    """Estimate them from the sources; empty where one of the training sources can't be read and isn't known."""
    inputs = split.fetch_sources(config, cache)
    read = {one.name: _measure(config, one, inputs) for one in (*config.data.sources, *config.data.suites)}
    found = {name: one for name, one in read.items() if one is not None}
    if any(source.name not in found for source in config.data.sources):
        return Sizes()
    sources = [found[source.name] for source in config.data.sources]
    kept = sum(pairs for pairs, _ in sources)
    mean = sum(pairs * characters for pairs, characters in sources) / max(kept, 1)
    shares = {str(Split.DEV): round(kept * config.split.dev), str(Split.TEST): round(kept * config.split.test)}
    taught = config.split.bootstrap if config.bootstrap else 0
    rest = max(kept - sum(shares.values()) - taught, 0)
    pairs = shares | ({str(Split.BOOTSTRAP): taught} if taught else {})
    pairs |= {part(i): rest // config.iterations for i in range(1, config.iterations + 1)}
    lengths = dict.fromkeys(pairs, mean)
    for suite in config.data.suites:
        if suite.name in found:
            pairs[suite.name], lengths[suite.name] = found[suite.name]
    tokens = {name: _tokens(config, characters) for name, characters in lengths.items()}
    hub = any(source.hub for source in config.data.sources)
    known = "the cards of data sets of the hub, lengths assumed" if hub else "the sources, prompts by their characters"
    return Sizes(pairs, tokens, source=known)


def _measure(config: RunConfig, source: Source, inputs: split.Inputs) -> tuple[int, float] | None:
    """Give the pairs that fit model.max_len and their mean characters; None for an unknown data set of the hub."""
    if source.hub is not None:
        return HUB_SIZES.get((source.hub, source.split or "train"))
    pairs = split.read_source(source, inputs).pairs
    characters = pl.Series(_characters(pairs))
    budget = config.model.max_len - config.sample.max_tokens
    fitting = characters.filter(characters + _frame(config) <= budget * _characters_a_token(config).value)
    return fitting.len(), float(fitting.mean() or 0.0)  # type: ignore[arg-type]


def _characters(pairs: pa.Table) -> list[int]:
    """Count the characters of each pair's prompt and responses."""
    frame = pl.DataFrame(pairs.select(["prompt", "response_a", "response_b"]))
    prompt = pl.col("prompt").list.eval(pl.element().struct.field("content").str.len_chars()).list.sum()
    shown = frame.select(prompt + pl.col("response_a").str.len_chars() + pl.col("response_b").str.len_chars())
    return shown.to_series().to_list()


def _frame(config: RunConfig) -> int:
    """Count the characters of a prompt that are the same for every pair."""
    shots = sum(len(shot.model_dump_json()) + len(config.prompt.user) for shot in config.prompt.few_shot)
    return len(config.prompt.system or "") + len(config.prompt.user) + shots


def _characters_a_token(config: RunConfig) -> Range:
    """Give the characters of a token; the scripted engine takes bytes for tokens."""
    return Range.exactly(1) if config.engine.kind is EngineKind.SCRIPTED else ASSUMED["characters"].range


def _tokens(config: RunConfig, characters: float) -> Range:
    return Range.exactly(characters + _frame(config)).over(_characters_a_token(config))
