"""Read pairs and suites, drop what can't be used, cut the rest: dev, test, warm start, one part an iteration."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from configs.run import Method, RunConfig, Source, key_part
from storage.errors import DataError, StepFailedError
from storage.inputs import InputFile, fetch_input
from storage.schema import SCHEMAS, Order, Split, empty
from tasks.data import division, formats, hub, synthetic
from tasks.data.reading import Reading, combine
from tasks.judge import prompts
from tasks.step import Context, Step

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from storage.manifest import Manifest
    from storage.store import Store
    from tasks.engines.base import Template
    from tasks.models import Model

VERSION = 1
GENERATOR = "generator"


@dataclass(frozen=True)
class Inputs:
    """Hold the files of the sources by name, and the file of the warm start's rationales."""

    files: Mapping[str, InputFile]
    rationales: InputFile | None


def fetch_sources(config: RunConfig, cache: Path) -> Inputs:
    """Fetch every file that the config names, and its digest."""
    sources = (*config.data.sources, *config.data.suites)
    files = {one.name: fetch_input(one.path, cache) for one in sources if one.path is not None}
    own = config.bootstrap is not None and config.bootstrap.rationales != GENERATOR
    return Inputs(files, fetch_input(config.bootstrap.rationales, cache) if own and config.bootstrap else None)


def split_step(config: RunConfig, base: Model, inputs: Inputs) -> Step:
    """Name the step; the base model is an input because its tokenizer measures the pairs."""
    digests = {f"source:{name}": file.sha256 for name, file in inputs.files.items()}
    parts = {
        "data": key_part(config.data),
        "split": key_part(config.split),
        "iterations": config.iterations,
        "seed": config.seed,
        "order": str(config.sample.order),
        "prompt": prompts.prompt_digest(prompts.worded(config)),
        "template_kwargs": config.model.template_kwargs,
        "engine": str(config.engine.kind),
        "budget": config.model.max_len - config.sample.max_tokens,
        "versions": [formats.VERSION, division.VERSION, synthetic.VERSION, prompts.VERSION],
        "bootstrap": GENERATOR if config.bootstrap and inputs.rationales is None else None,
    }
    if config.method is Method.GENRM:
        parts["letters"] = [prompts.OPENING, prompts.CLOSING]
    rationales = inputs.rationales.sha256 if inputs.rationales else None
    return Step("split", VERSION, {"model": base.digest, "rationales": rationales, **digests}, parts)


def make_split(context: Context, inputs: Inputs, template: Template) -> dict[str, Any]:
    """Give pairs, splits and rationales; the certificate of disjointness goes into the manifest.

    Refuses a tokenizer that genrm's verdict can't be read with, before any model is trained.
    """
    config = context.config
    if config.method is Method.GENRM:
        template.letters(prompts.OPENING, prompts.CLOSING)
    budget = config.model.max_len - config.sample.max_tokens
    reading = combine([read_source(source, inputs) for source in config.data.sources])
    suites = {source.name: read_source(source, inputs) for source in config.data.suites}
    lengths = [_named(reading.pairs, prompt_lengths(reading.pairs, config, template))]
    rationales = _rationales(config, reading, inputs)
    limits = division.Limits(
        lengths=lengths[0]["tokens"].combine_chunks(),
        budget=budget,
        suites=pa.concat_tables([one.pairs for one in suites.values()]) if suites else None,
        bootstrap_ids=rationales.column("pair_id").combine_chunks() if config.bootstrap else None,
    )
    divided = division.split(reading, config.split, parts=config.iterations, seed=config.seed, limits=limits)
    shuffle = config.data.shuffle_gold
    pairs = [division.shuffle_gold(reading.pairs, divided.splits, config.seed) if shuffle else reading.pairs]
    for name, suite in suites.items():
        lengths.append(_named(suite.pairs, prompt_lengths(suite.pairs, config, template)))
        fitting = division.drop_too_long(suite, lengths[-1]["tokens"].combine_chunks(), budget)
        pairs.append(fitting.pairs)
        divided = division.add_suite(divided, fitting, name)
    return {
        "tables": {
            "pairs": _placed(pa.concat_tables(pairs), divided.splits),
            "splits": divided.splits,
            "rationales": rationales,
        },
        "counts": _counts(divided.splits),
        "facts": {
            "certificate": divided.certificate,
            "prompt_tokens": _mean_lengths(pa.concat_tables(lengths), divided.splits),
        },
    }


def _named(pairs: pa.Table, lengths: pa.Array) -> pa.Table:
    return pa.table({"pair_id": pairs["pair_id"], "tokens": lengths})


def _mean_lengths(lengths: pa.Table, splits: pa.Table) -> dict[str, float]:
    """Give the mean prompt tokens of each set, for the plans of later runs."""
    measured = pl.DataFrame(lengths).unique("pair_id")
    placed = pl.DataFrame(splits.select(["pair_id", "split"])).filter(pl.col("split") != Split.DROPPED.value)
    means = placed.join(measured, on="pair_id").group_by("split").agg(pl.col("tokens").mean()).sort("split")
    return {name: round(mean, 1) for name, mean in means.iter_rows()}


def _placed(pairs: pa.Table, splits: pa.Table) -> pa.Table:
    """Keep the pairs that are in a set, once each: a suite may hold a pair that training lost to it."""
    placed = splits.filter(pc.not_equal(splits["split"], str(Split.DROPPED))).column("pair_id").combine_chunks()
    first = pl.DataFrame(pairs.select(["pair_id"])).to_series().is_first_distinct().to_arrow()
    return pairs.filter(pc.and_(first, pc.is_in(pairs["pair_id"], placed)))


def read_source(source: Source, inputs: Inputs) -> Reading:
    """Read the pairs of a source; DataError or StoreError where that can't be done."""
    form = formats.make_form(file=source.file, layout=source.format, columns=source.columns.given())
    if source.hub is not None:
        table = hub.load(source.hub, revision=source.revision, config=source.config, split=source.split)
        return formats.read_pairs(table, name=source.name, form=replace(form, address=hub.address(source.hub)))
    if source.generator is None:
        file = inputs.files[source.name]
        return formats.read_pairs(file.path, name=source.name, form=replace(form, address=file.url))
    made = source.generator
    try:
        table = synthetic.generate(made.categories, made.count, seed=made.seed)
    except ValueError as error:
        raise DataError(f"data source {source.name}: {error}") from error
    if not made.rationales:
        table = table.drop_columns([name for name in table.column_names if name.startswith("rationale")])
    return formats.read_pairs(table, name=source.name)


def _own(file: InputFile) -> Reading:
    return formats.read_pairs(file.path, name="rationales", form=formats.Form(address=file.url))


def prompt_lengths(pairs: pa.Table, config: RunConfig, template: Template) -> pa.Array:
    """Count the prompt tokens of each pair, in the order that makes the longer prompt."""
    lengths = []
    for order in Order:
        rendered = prompts.render(pairs, [str(order)] * pairs.num_rows, prompts.worded(config))
        lengths.append([len(ids) for ids in template.prompts(rendered.column("prompt").to_pylist())])
    return pa.array([max(both) for both in zip(*lengths, strict=True)], pa.int64())


def _rationales(config: RunConfig, reading: Reading, inputs: Inputs) -> pa.Table:
    """Give a rationale for each pair that has one, in the order in which the pair is shown."""
    if config.bootstrap is None:
        return empty("rationales")
    own = inputs.rationales
    extras = reading.extras if own is None else _own(own).extras
    if "rationale" not in extras.column_names:
        raise DataError(
            "bootstrap.rationales: no source has a column `rationale`; name a file that has one, or a generator source"
        )
    ids = extras.column("pair_id").to_pylist()
    shown = prompts.shown_order(config.seed, ids)
    texts = extras.column("rationale").to_pylist()
    swapped = (
        extras.column("rationale_swapped").to_pylist()
        if "rationale_swapped" in extras.column_names
        else [None] * len(ids)
    )
    rows = []
    for pair_id, order, text, other in zip(ids, shown, texts, swapped, strict=True):
        if order == Order.BA and other:
            rows.append((pair_id, str(Order.BA), other))
        elif text:
            rows.append((pair_id, str(Order.AB), text))
    columns = [[row[place] for row in rows] for place in range(3)]
    return pa.table(columns, schema=SCHEMAS["rationales"])


def _counts(splits: pa.Table) -> dict[str, Any]:
    reasons = pc.value_counts(splits.column("reason").drop_null()).to_pylist()
    dropped = {one["values"]: one["counts"] for one in reasons}
    return {"in": splits.num_rows, "kept": splits.num_rows - sum(dropped.values()), "dropped": dropped}


@dataclass(frozen=True)
class SplitView:
    """Read the pairs of a committed split by the name of their set."""

    store: Store
    manifest: Manifest

    @cached_property
    def _joined(self) -> tuple[pa.Table, pa.Table]:
        read = self.store.read
        pairs = read(self.manifest.artifact("pairs")).sort_by("pair_id")
        splits = read(self.manifest.artifact("splits"), columns=["source", "pair_id", "split"])
        return pairs, splits

    @property
    def certificate(self) -> Mapping[str, Any]:
        """Give sizes and digests of the sets."""
        found: Mapping[str, Any] = self.manifest.facts["certificate"]
        return found

    @property
    def suites(self) -> Sequence[str]:
        """Name what a checkpoint is evaluated on beside dev: test and the suites."""
        training = {str(Split.DEV), str(Split.BOOTSTRAP)}
        sets = self.certificate["pairs"]
        return [name for name in sets if sets[name] and name not in training and not name.startswith("part-")]

    def size(self, name: str) -> int:
        """Count the pairs of a set."""
        return int(self.certificate["pairs"].get(name, 0))

    def digest(self, name: str) -> str:
        """Give the digest of a set's pair ids; a set without pairs has one too."""
        return str(self.certificate["digests"].get(name, "none"))

    def pairs(self, name: str) -> pa.Table:
        """Give the pairs of a set, sorted by id."""
        pairs, splits = self._joined
        ids = splits.filter(pc.equal(splits["split"], str(name))).column("pair_id").combine_chunks()
        return pairs.filter(pc.is_in(pairs["pair_id"], ids))


def committed_split(context: Context, key: str) -> SplitView:
    """Open the split of a run; StepFailedError where it was voided since."""
    manifest = context.store.manifest(key)
    if manifest is None:
        raise StepFailedError(f"step {key[:12]} (split) is not committed any more; resume the run to make it again")
    return SplitView(context.store, manifest)
