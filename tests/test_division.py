"""Splits are disjoint, whole by group, and dev and test depend on nothing but the group and the salt."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tasks.data.division
from configs.run import SplitConfig
from storage.errors import DataError, StepFailedError
from storage.schema import SCHEMAS
from tasks.data.division import Limits, drop_too_long, shuffle_gold, split, suite_overlap
from tasks.data.formats import Reading, combine, read_pairs

SHARED = Path(__file__).parents[2] / "shared" / "data"
CONFIG = SplitConfig(dev=0.1, test=0.1, bootstrap=10)


def reading(count: int = 300, *, name: str = "x", start: int = 0, per_prompt: int = 1, **columns: Any) -> Reading:
    rows = [
        {"prompt": f"p{i // per_prompt}", "response_a": f"a{i}", "response_b": f"b{i}x", "label": "AB"[i % 2]}
        | {key: make(i) for key, make in columns.items()}
        for i in range(start, start + count)
    ]
    return read_pairs(pa.Table.from_pylist(rows), name=name)


def places(splits: pa.Table) -> dict[str, str]:
    ids = zip(splits["pair_id"].to_pylist(), splits["split"].to_pylist(), strict=True)
    return {pair: where for pair, where in ids if pair is not None}


def only(splits: pa.Table, *names: str) -> set[str]:
    return {pair for pair, where in places(splits).items() if where in names}


def test_every_row_is_in_one_split_and_parts_are_equal() -> None:
    division = split(reading(), CONFIG, parts=3, seed=0)
    assert division.splits.schema == SCHEMAS["splits"]
    assert division.splits["row"].to_pylist() == list(range(300))
    sizes = division.certificate["pairs"]
    assert sizes == dict(Counter(division.splits["split"].to_pylist()))
    assert sizes["bootstrap"] == 10
    parts = [sizes[f"part-{i}"] for i in (1, 2, 3)]
    assert max(parts) - min(parts) <= 1
    assert 15 <= sizes["dev"] <= 45
    assert 15 <= sizes["test"] <= 45
    assert division.certificate["shared"] == {"pair_ids": 0, "groups": 0, "held_out_prompts": 0}
    ids = sorted(only(division.splits, "dev"))
    assert division.certificate["digests"]["dev"] == hashlib.sha256("\n".join(ids).encode()).hexdigest()
    json.dumps(division.certificate)


def test_dev_and_test_are_the_same_for_every_seed_size_and_order() -> None:
    whole = split(reading(300), CONFIG, parts=3, seed=0).splits
    for other in (
        split(reading(300), CONFIG, parts=5, seed=9),
        split(reading(300), CONFIG, parts=3, seed=0, limits=Limits(suites=reading(50).pairs)),
        split(combine([reading(150, start=150, name="z"), reading(150, name="y")]), CONFIG, parts=3, seed=0),
        split(reading(300), CONFIG.model_copy(update={"bootstrap": 50}), parts=3, seed=0),
    ):
        for name in ("dev", "test"):
            assert only(other.splits, name) == only(whole, name)
    more = split(reading(600), CONFIG, parts=3, seed=0).splits
    for name in ("dev", "test"):
        assert only(whole, name) == only(more, name) & set(places(whole))
    larger = split(reading(300), CONFIG.model_copy(update={"test": 0.3}), parts=3, seed=0).splits
    assert only(larger, "test") > only(whole, "test")
    assert only(larger, "dev") == only(whole, "dev")
    salted = split(reading(300), CONFIG.model_copy(update={"salt": "other"}), parts=3, seed=0).splits
    assert only(salted, "dev") != only(whole, "dev")


def test_same_seed_gives_the_same_parts_whatever_the_row_order() -> None:
    rows = reading(200).pairs.to_pylist()
    tables = [pa.Table.from_pylist([row | {"label": row["gold"]} for row in order]) for order in (rows, rows[::-1])]
    one, two = (split(read_pairs(table, name="x"), CONFIG, parts=3, seed=4) for table in tables)
    assert places(one.splits) == places(two.splits)
    assert one.certificate == two.certificate
    assert places(split(reading(200), CONFIG, parts=3, seed=5).splits) != places(one.splits)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None)
@given(st.lists(st.integers(1, 12), min_size=6, max_size=60), st.integers(1, 5), st.integers(0, 3))
def test_groups_are_never_parted(sizes: list[int], parts: int, seed: int) -> None:
    owners = [group for group, size in enumerate(sizes) for _ in range(size)]
    source = reading(len(owners), group=lambda i: f"g{owners[i]}")
    config = SplitConfig(dev=0.1, test=0.1)
    try:
        division = split(source, config, parts=parts, seed=seed)
    except DataError:
        held_out = len(split(source, config, parts=1, seed=seed).certificate["groups"])
        assert held_out == 1 or len(sizes) < 30
        return
    where = places(division.splits)
    owner = dict(zip(source.pairs["pair_id"].to_pylist(), source.pairs["group"].to_pylist(), strict=True))
    homes: dict[str, set[str]] = {}
    for pair, name in where.items():
        homes.setdefault(owner[pair], set()).add(name)
    assert all(len(names) == 1 for names in homes.values())
    filled = [division.certificate["pairs"][f"part-{i + 1}"] for i in range(parts)]
    assert max(filled) - min(filled) <= max(sizes)


def test_parts_hold_as_many_pairs_as_groups_allow() -> None:
    source = reading(40, group=lambda i: f"g{max(i, 10)}")  # one group of 11, 29 of 1
    certificate = split(source, SplitConfig(dev=0, test=0), parts=2, seed=0).certificate
    assert certificate["pairs"] == {"part-1": 20, "part-2": 20}
    assert sorted(certificate["groups"].values()) == [10, 20]


def test_too_long_pairs_are_dropped_and_told_by_source_and_longer_side() -> None:
    source = combine([reading(40), reading(40, name="y", start=100)])
    lengths = pa.array([10 + i for i in range(80)])
    division = split(source, SplitConfig(), parts=2, seed=0, limits=Limits(lengths=lengths, budget=79))
    assert division.certificate["too_long"] == {"y": {"better longer": 5, "worse longer": 5}}
    assert division.certificate["dropped"] == {"too_long": 10}
    dropped = division.splits.slice(70).to_pylist()
    assert dropped[0]["detail"] == "80 tokens of 79, worse longer"
    assert all(row["pair_id"] and row["reason"] == "too_long" for row in dropped)
    assert drop_too_long(source, lengths, 79).pairs.num_rows == 70


def test_prompts_of_suites_and_held_out_groups_do_not_train() -> None:
    source = reading(300, per_prompt=2, group=lambda i: f"g{i}")  # each prompt in two groups
    suite = reading(20, start=200, per_prompt=2, response_a=lambda i: "else")
    division = split(source, CONFIG, parts=2, seed=0, limits=Limits(suites=suite.pairs))
    prompts = dict(zip(source.pairs["pair_id"].to_pylist(), range(300), strict=True))
    training = {prompts[pair] // 2 for pair in only(division.splits, "bootstrap", "part-1", "part-2")}
    held_out = {prompts[pair] // 2 for pair in only(division.splits, "dev", "test")}
    assert not training & held_out
    assert not training & set(range(100, 110))
    assert len(training) + len(held_out | set(range(100, 110))) == 150
    details = {row["detail"] for row in division.splits.to_pylist() if row["reason"] == "contaminated"}
    assert details == {"in dev or test", "in a suite"}
    assert set(range(100, 110)) & held_out  # a suite takes nothing from dev and test


def test_swapped_twin_of_a_suite_is_overlap_and_so_is_its_group() -> None:
    rows = [
        {"prompt": f"p{i}", "response_a": "x", "response_b": f"y{i}", "label": "A", "group": "AB"[i % 2]}
        for i in range(4)
    ]
    twin = {"prompt": "P0 ", "response_a": "y0", "response_b": "x", "label": "B"}
    pairs, suite = (read_pairs(pa.Table.from_pylist(table), name="x").pairs for table in (rows, [twin]))
    assert suite_overlap(pairs, suite).to_pylist() == [True, False, True, False]


def test_bootstrap_takes_only_what_has_a_rationale() -> None:
    source = reading(100, per_prompt=2)
    ready = source.pairs["pair_id"].combine_chunks().slice(0, 61)  # the 31st group only half
    config = SplitConfig(dev=0, test=0, bootstrap=60)
    division = split(source, config, parts=2, seed=0, limits=Limits(bootstrap_ids=ready))
    assert only(division.splits, "bootstrap") == set(ready.to_pylist()[:60])
    with pytest.raises(DataError, match=r"asks for 90 pairs, but \d+ in \d+ groups"):
        split(source, SplitConfig(bootstrap=90), parts=2, seed=0, limits=Limits(bootstrap_ids=ready))


def test_too_few_groups_are_refused() -> None:
    with pytest.raises(DataError, match=r"iterations is 3 .* but 2 are left .* was dropped \(none\)"):
        split(reading(8, per_prompt=4), SplitConfig(dev=0, test=0), parts=3, seed=0)
    tied = {"prompt": "p", "response_a": "x", "response_b": "y", "label": "tie"}
    with pytest.raises(DataError, match=r"but 0 are left .* was dropped \(tie 2\)"):
        split(read_pairs(pa.Table.from_pylist([tied, tied]), name="ties"), SplitConfig(), parts=1, seed=0)
    with pytest.raises(DataError, match="asks for 500 pairs, but 300"):
        split(reading(300), SplitConfig(dev=0, test=0, bootstrap=500), parts=1, seed=0)
    with pytest.raises(DataError, match="leave something to train on"):
        split(reading(300), SplitConfig(dev=0.5, test=0.5), parts=1, seed=0)


def test_certificate_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    source = reading(20, per_prompt=2)
    names = pa.array((["dev", "part-1"] * 10), pa.large_string())
    splits = source.ledger.set_column(3, SCHEMAS["splits"].field("split"), names)
    with pytest.raises(StepFailedError, match="'groups': 10, 'held_out_prompts': 10"):
        tasks.data.division._certify(source, splits)
    with pytest.raises(StepFailedError, match="10 of 20 pairs placed"):
        tasks.data.division._certify(source, splits.slice(0, 10))


def test_shuffled_gold_stays_in_training_and_keeps_its_balance() -> None:
    source = reading(300)
    splits = split(source, CONFIG, parts=3, seed=0).splits
    before = source.pairs
    after = shuffle_gold(before, splits, 3)
    assert after.drop_columns("gold") == before.drop_columns("gold")
    assert after.schema == SCHEMAS["pairs"]
    held_out = only(splits, "dev", "test")
    changed = [
        x["pair_id"] for x, y in zip(before.to_pylist(), after.to_pylist(), strict=True) if x["gold"] != y["gold"]
    ]
    assert not held_out & set(changed)
    assert 0.4 < len(changed) / (300 - len(held_out)) < 0.6
    assert Counter(after["gold"].to_pylist()) == Counter(before["gold"].to_pylist())
    assert shuffle_gold(before, splits, 3) == after
    assert shuffle_gold(before, splits, 4) != after
    turned = shuffle_gold(before.take(pa.array(range(299, -1, -1))), splits, 3)
    assert turned.sort_by("pair_id") == after.sort_by("pair_id")


def test_golden() -> None:
    source = combine([reading(40, per_prompt=2), reading(40, name="y", start=19)])
    lengths = pa.array([i % 37 for i in range(source.pairs.num_rows)])
    limits = Limits(lengths=lengths, budget=35, suites=reading(2, start=30).pairs)
    division = split(source, SplitConfig(dev=0.1, test=0.1, bootstrap=4), parts=3, seed=1, limits=limits)
    shuffled = shuffle_gold(source.pairs, division.splits, 1)["gold"].to_pylist()
    content = json.dumps([division.splits.to_pylist(), division.certificate, shuffled], sort_keys=True)
    digest = hashlib.sha256(content.encode()).hexdigest()
    assert (tasks.data.division.VERSION, digest[:16]) == (1, "593c040c7b2d672f"), (
        "the same pairs are split otherwise: bump VERSION in tasks/data/division.py"
    )


def test_real_sets_together() -> None:
    if not (SHARED / "pairs").exists():
        pytest.skip(f"needs the real pairs in {SHARED}")
    files = sorted((SHARED / "pairs").glob("*.parquet"))
    readings = {file.stem: read_pairs(file, name=file.stem) for file in files}
    suite = readings.pop("llmbar")
    division = split(combine(list(readings.values())), CONFIG, parts=3, seed=0, limits=Limits(suites=suite.pairs))
    assert division.splits.num_rows == 200 + 984 + 731 + 792 + 2303
    assert division.certificate["dropped"] == {"duplicate": 35}
    parts = [division.certificate["pairs"][f"part-{i}"] for i in (1, 2, 3)]
    assert max(parts) - min(parts) <= 1
