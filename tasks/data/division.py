"""Split the pairs: dev and test by a hash of the group, the rest into a bootstrap set and equal parts."""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import polars as pl
import pyarrow as pa

from storage.errors import DataError, StepFailedError
from storage.schema import SCHEMAS, Split, part
from tasks.data.reading import prompt_keys
from tasks.data.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Iterable

    from configs.run import SplitConfig
    from tasks.data.reading import Reading

VERSION = 1  # part of the step keys: raise it when the same pairs are split otherwise

HELD_OUT = (Split.DEV.value, Split.TEST.value)


@dataclass(frozen=True)
class Limits:
    """Say which pairs may go where.

    lengths: prompt tokens of each pair of the reading, of the longer of the two shown orders. budget: the most there
    may be. suites: `pairs` of the evaluation suites; what they ask never trains. bootstrap_ids: the pairs that the warm
    start can use (None: all); a group goes there only as a whole.
    """

    lengths: pa.Array | None = None
    budget: int | None = None
    suites: pa.Table | None = None
    bootstrap_ids: pa.Array | None = None


@dataclass(frozen=True)
class Division:
    """Hold the `splits` table (one row a source row) and the certificate that its sets are disjoint."""

    splits: pa.Table
    certificate: dict[str, Any]


def split(reading: Reading, config: SplitConfig, *, parts: int, seed: int, limits: Limits | None = None) -> Division:
    """Give each pair its split, whole groups together.

    dev and test are the groups whose SHA-256 of (salt, group) falls below `config.test` or above 1 - `config.dev`: the
    same for every seed, number of pairs and other rows, for ever. A training group that shares a prompt with dev, test
    or a suite is dropped (`contaminated`). The others, in the order of a hash of (seed, salt, group), fill the
    bootstrap set and then the parts. Raises DataError where the groups don't suffice.
    """
    limits = limits or Limits()
    if config.dev + config.test >= 1:
        raise DataError(f"split.dev + split.test is {config.dev + config.test:g}: leave something to train on.")
    if limits.lengths is not None and limits.budget is not None:
        reading = drop_too_long(reading, limits.lengths, limits.budget)
    held_out = _held_out(reading.pairs, config)
    reading, held_out = _drop_contaminated(reading, held_out, limits.suites)
    training = _rank(reading.pairs, held_out, salt=config.salt, seed=seed, ready=limits.bootstrap_ids)
    lost = _lost(reading)
    names = _fill_bootstrap(training, config.bootstrap, lost)
    rest = training.filter(~pl.col("group").is_in(list(names)))
    names |= _fill_parts(rest, parts, lost)
    where = pl.DataFrame(reading.pairs.select(["group"])).select(
        pl.coalesce(held_out, pl.col("group").replace_strict(names, default=None, return_dtype=pl.String))
    )
    splits = reading.assign(where.to_series())
    return Division(splits, _certify(reading, splits))


def add_suite(division: Division, suite: Reading, name: str) -> Division:
    """Put every pair of an evaluation suite into a set of its own, named like the suite."""
    splits = suite.assign(pl.Series([name] * suite.pairs.num_rows, dtype=pl.String))
    pairs = pl.DataFrame(suite.pairs.select(["pair_id", "group"]))
    table = pl.DataFrame(splits)
    added: dict[str, dict[str, Any]] = {
        "pairs": {name: pairs.height},
        "groups": {name: pairs["group"].n_unique()},
        "digests": {name: _digest(pairs)},
        "too_long": _too_long(table),
    }
    certificate = {
        **division.certificate,
        **{part: {**division.certificate[part], **new} for part, new in added.items()},
    }
    return Division(pa.concat_tables([division.splits, splits]), certificate)


def drop_too_long(reading: Reading, lengths: pa.Array, budget: int) -> Reading:
    """Drop pairs whose prompt is over the budget; the detail names the tokens and which response is the longer."""
    sides = pl.DataFrame(reading.pairs.select(["response_a", "response_b", "gold"])).select(
        a=pl.col("response_a").str.len_chars(), b=pl.col("response_b").str.len_chars(), gold="gold"
    )
    better = pl.when(gold_is_a := pl.col("gold") == "A").then("a").otherwise("b")
    worse = pl.when(gold_is_a).then("b").otherwise("a")
    longer = pl.when(better > worse).then(pl.lit("better longer")).when(better < worse).then(pl.lit("worse longer"))
    frame = sides.with_columns(tokens=pl.Series(lengths.to_pylist(), dtype=pl.Int64)).select(
        reason=pl.when(pl.col("tokens") > budget).then(pl.lit(Reason.TOO_LONG.value)),
        detail=pl.concat_str("tokens", pl.lit(f" tokens of {budget}, "), longer.otherwise(pl.lit("as long"))),
    )
    return reading.drop(frame["reason"], frame["detail"])


def suite_overlap(pairs: pa.Table, suite_pairs: pa.Table) -> pa.Array:
    """Mark the pairs whose group holds a prompt, or is a group, of the suites (swapped twins share the prompt)."""
    frame = pl.DataFrame({"group": _column(pairs, "group"), "prompt": pl.Series(prompt_keys(pairs))})
    asked = pl.concat([_column(suite_pairs, "group"), pl.Series(prompt_keys(suite_pairs))]).unique().implode()
    hit = frame.filter(pl.col("group").is_in(asked) | pl.col("prompt").is_in(asked))["group"]
    return pa.array(frame["group"].is_in(hit.implode()).to_list(), pa.bool_())


def shuffle_gold(pairs: pa.Table, splits: pa.Table, seed: int) -> pa.Table:
    """Permute gold over the pairs of the parts: the control that nothing can be learnt from.

    As many golds A as before; all others keep theirs (the warm start's rationales argue for it). Pair ids stay: gold
    isn't in them.
    """
    training = pl.DataFrame(splits).filter(pl.col("split").str.starts_with(part(0)[:-1]))["pair_id"]
    frame = pl.DataFrame(pairs.select(["pair_id", "gold"])).with_row_index("_at")
    mine = frame.filter(pl.col("pair_id").is_in(training.implode())).sort("pair_id")
    donors = mine.with_columns(rank=_hashes("shuffle", str(seed), values=mine["pair_id"])).sort("rank")
    mine = mine.with_columns(gold=donors["gold"])
    gold = frame.join(mine.select("_at", shuffled="gold"), on="_at", how="left", maintain_order="left").select(
        pl.coalesce("shuffled", "gold")
    )
    column = gold.to_series().to_arrow().cast(SCHEMAS["pairs"].field("gold").type)
    return pairs.set_column(pairs.schema.get_field_index("gold"), SCHEMAS["pairs"].field("gold"), column)


def _column(table: pa.Table, name: str) -> pl.Series:
    return pl.DataFrame(table.select([name])).to_series().cast(pl.String)


def _is_training() -> pl.Expr:
    return ~pl.col("split").is_in([*HELD_OUT, Split.DROPPED.value])


def _hashes(*words: str, values: Iterable[str]) -> pl.Series:
    """Give SHA-256 (hex) of the words and each value; no text of ours holds the null byte between them."""
    start = hashlib.sha256("".join(f"{word}\0" for word in words).encode())
    digests = []
    for value in values:
        digest = start.copy()
        digest.update(value.encode())
        digests.append(digest.hexdigest())
    return pl.Series(digests, dtype=pl.String)


def _held_out(pairs: pa.Table, config: SplitConfig) -> pl.Series:
    """Give `dev`, `test` or null for each pair. Raising one share leaves the other set as it is."""
    groups = _column(pairs, "group")
    unique = groups.unique(maintain_order=True)
    hashes = _hashes("held-out", config.salt, values=unique)
    shares = pl.Series([int(digest[:13], 16) / 16**13 for digest in hashes], dtype=pl.Float64)
    name = (
        pl.when(pl.lit(shares) < config.test)
        .then(pl.lit(Split.TEST.value))
        .when(pl.lit(shares) >= 1 - config.dev)
        .then(pl.lit(Split.DEV.value))
    )
    table = pl.DataFrame({"group": unique}).with_columns(split=name)
    return groups.to_frame("group").join(table, on="group", how="left", maintain_order="left")["split"]


def _drop_contaminated(reading: Reading, held_out: pl.Series, suites: pa.Table | None) -> tuple[Reading, pl.Series]:
    training = held_out.is_null()
    kept_out = reading.pairs.filter(pa.array((~training).to_list(), pa.bool_()))
    marks = [("in dev or test", suite_overlap(reading.pairs, kept_out))]
    if suites is not None:
        marks.append(("in a suite", suite_overlap(reading.pairs, suites)))
    detail = pl.select(
        pl.coalesce(pl.when(pl.lit(training & pl.Series(mark))).then(pl.lit(words)) for words, mark in marks)
    ).to_series()
    reason = pl.select(pl.when(pl.lit(detail.is_not_null())).then(pl.lit(Reason.CONTAMINATED.value))).to_series()
    return reading.drop(reason, detail), held_out.filter(reason.is_null())


def _rank(pairs: pa.Table, held_out: pl.Series, *, salt: str, seed: int, ready: pa.Array | None) -> pl.DataFrame:
    """Give the training groups in the order of their hash: group, size, ready (all its pairs are), rank."""
    frame = pl.DataFrame(pairs.select(["pair_id", "group"])).filter(held_out.is_null())
    ids = frame["pair_id"] if ready is None else pl.Series(ready.to_pylist(), dtype=pl.String)
    frame = frame.with_columns(ready=pl.col("pair_id").is_in(ids.implode()))
    groups = frame.group_by("group", maintain_order=True).agg(size=pl.len(), ready=pl.col("ready").all())
    return groups.with_columns(rank=_hashes("rank", str(seed), salt, values=groups["group"])).sort("rank")


def _lost(reading: Reading) -> str:
    """Name the reasons of the rows that are no pairs, with their counts."""
    reasons = Counter(reading.dropped["reason"].to_pylist())
    return ", ".join(f"{reason} {count}" for reason, count in sorted(reasons.items())) or "none"


def _fill_bootstrap(groups: pl.DataFrame, wanted: int, lost: str) -> dict[str, str]:
    """Take groups in order while they fit."""
    usable = groups.filter("ready").select("group", "size")
    taken: dict[str, str] = {}
    room = wanted
    for group, size in usable.iter_rows():
        if size <= room:
            taken[group] = Split.BOOTSTRAP.value
            room -= size
    if wanted and (not taken or usable["size"].sum() < wanted):
        raise DataError(
            f"split.bootstrap asks for {wanted} pairs, but {usable['size'].sum()} in {usable.height} groups can be "
            f"used for the warm start (dropped: {lost}): lower it or give more pairs."
        )
    return taken


def _fill_parts(groups: pl.DataFrame, parts: int, lost: str) -> dict[str, str]:
    """Give each group, large ones first, to the part with the fewest pairs so far."""
    if groups.height < parts:
        raise DataError(
            f"iterations is {parts} and each needs a group of training pairs, but {groups.height} are left after dev, "
            f"test, bootstrap and what was dropped ({lost}): give more pairs or run fewer iterations."
        )
    filled = [(0, number) for number in range(1, parts + 1)]
    taken: dict[str, str] = {}
    largest_first = groups.sort("size", "rank", descending=[True, False])
    for group, size in largest_first.select("group", "size").iter_rows():
        pairs, number = filled[0]
        taken[group] = part(number)
        heapq.heapreplace(filled, (pairs + size, number))
    return taken


def _certify(reading: Reading, splits: pa.Table) -> dict[str, Any]:
    """Count the sets and check from the finished table that none shares a pair, a group or a prompt with another."""
    groups = pl.DataFrame(reading.pairs.select(["pair_id", "group"])).with_columns(
        prompt=pl.Series(prompt_keys(reading.pairs))
    )
    table = pl.DataFrame(splits)
    placed = table.filter(pl.col("split") != Split.DROPPED.value).join(groups, on="pair_id", how="left").sort("split")
    sizes = placed.group_by("split", maintain_order=True).agg(pairs=pl.len(), groups=pl.col("group").n_unique())
    held_out = placed.filter(pl.col("split").is_in(HELD_OUT))["prompt"]
    shared = {
        "pair_ids": _shared(placed, "pair_id"),
        "groups": _shared(placed, "group"),
        "held_out_prompts": placed.filter(_is_training())["prompt"].is_in(held_out.unique().implode()).sum(),
    }
    if placed.height != reading.pairs.num_rows or any(shared.values()):
        raise StepFailedError(
            f"The split is not disjoint ({shared}; {placed.height} of {reading.pairs.num_rows} pairs placed): "
            "nothing was committed; report this."
        )
    return {
        "version": VERSION,
        "pairs": dict(sizes.select("split", "pairs").iter_rows()),
        "groups": dict(sizes.select("split", "groups").iter_rows()),
        "shared": shared,
        "digests": {str(name): _digest(ids) for (name,), ids in placed.group_by("split", maintain_order=True)},
        "too_long": _too_long(table),
        "dropped": dict(table["reason"].drop_nulls().value_counts().sort("reason").iter_rows()),
    }


def _shared(placed: pl.DataFrame, column: str) -> int:
    """Count values that occur in more than one split (pair ids: that occur twice at all)."""
    seen = pl.len() if column == "pair_id" else pl.col("split").n_unique()
    return placed.group_by(column).agg(seen=seen).filter(pl.col("seen") > 1).height


def _digest(rows: pl.DataFrame) -> str:
    return hashlib.sha256("\n".join(rows["pair_id"].sort()).encode()).hexdigest()


def _too_long(table: pl.DataFrame) -> dict[str, dict[str, int]]:
    """Count the pairs over the budget by source and by longer response."""
    rows = table.filter(pl.col("reason") == Reason.TOO_LONG.value)
    side = pl.col("detail").str.split(", ").list.last()
    counts = rows.group_by("source", side.alias("side")).len().sort("source", "side")
    found: dict[str, dict[str, int]] = {}
    for source, longer, count in counts.iter_rows():
        found.setdefault(source, {})[longer] = count
    return found
