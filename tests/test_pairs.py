"""Build training rows: same pair, order and checkpoint; verdict last; every judgment used or counted."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from judge_cases import PROMPT, check_golden, completion, fixed_case, ids, pair, table

from configs.run import PairsConfig, SelectConfig
from storage.digest import digest_table
from storage.errors import StepFailedError
from storage.schema import SCHEMAS
from tasks import pairs as building
from tasks import select
from tasks.judge.verdict import judge, read

if TYPE_CHECKING:
    from collections.abc import Iterable

_TEXTS = {"c": "good [[A]] tail", "w": "bad [[B]] tail", "u": "no verdict", "b": "[[A]] or [[B]]"}


def asked(kinds: Iterable[tuple[str, str]]) -> tuple[pa.Table, pa.Table]:
    """Make completions (a pair's statuses as letters, gold A shown first) and the pairs of them."""
    rows, pairs = [], []
    for name, statuses in kinds:
        pairs.append(pair(name))
        rows += [completion(name, _TEXTS[letter], sample=number) for number, letter in enumerate(statuses)]
    return table("completions", rows), table("pairs", pairs)


def dpo(kinds: Iterable[tuple[str, str]], seed: int = 0, **config: Any) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Run judge, select and pairs; hold that every selected judgment is used or counted."""
    completions, pairs = asked(kinds)
    judged = judge(completions, pairs)
    selected, _ = select.select_sides(judged, SelectConfig(), seed=seed, unparsed_rejected=True)
    rows, unused = building.dpo_rows(selected, completions, pairs, PROMPT, PairsConfig(**config), seed=seed)
    assert rows.schema == SCHEMAS["dpo"]
    made: list[dict[str, Any]] = rows.to_pylist()
    used = {(row["pair_id"], row[f"{side}_sample"]) for row in made for side in ("chosen", "rejected")}
    assert len(used) + sum(unused.values()) == selected.num_rows
    return made, unused


def text(row: dict[str, Any], column: str) -> str:
    (turn,) = row[column]
    assert turn["role"] == "assistant"
    return str(turn["content"])


def test_sft_rows_hold_the_hint_free_prompt_and_end_with_the_verdict() -> None:
    """Traps, rule 36: every training row holds its verdict."""
    completions, pairs = asked([("q", "wc"), ("p", "cc")])
    selected, _ = select.select(judge(completions, pairs), SelectConfig(), seed=0)
    rows = building.sft_rows(selected, completions, pairs, PROMPT)
    assert rows.schema == SCHEMAS["sft"]
    assert sorted(ids(selected)) == ids(rows)
    for row in rows.to_pylist():
        assert text(row, "completion") == "good [[A]]"
        assert [turn["role"] for turn in row["prompt"]] == ["system", "user"]
        assert f"Question: question {row['pair_id']}\nA: first of" in row["prompt"][1]["content"]


def test_a_row_of_the_swapped_order_shows_the_swapped_prompt() -> None:
    completions = table("completions", [completion("p", "[[B]]", order="ba")])
    pairs = table("pairs", [pair("p")])
    selected, _ = select.select(judge(completions, pairs), SelectConfig(), seed=0)
    (row,) = building.sft_rows(selected, completions, pairs, PROMPT).to_pylist()
    assert "A: second of p\nB: first of p" in row["prompt"][1]["content"]


@pytest.mark.parametrize("lost", ["completions", "pairs"])
def test_lost_rows_are_refused(lost: str) -> None:
    completions, pairs = asked([("p", "c"), ("q", "c")])
    selected, _ = select.select(judge(completions, pairs), SelectConfig(), seed=0)
    given_ = {"completions": completions, "pairs": pairs}
    given_[lost] = given_[lost].slice(0, 1)
    with pytest.raises(StepFailedError):
        building.sft_rows(selected, given_["completions"], given_["pairs"], PROMPT)


def test_dpo_pairs_right_with_wrong_of_one_prompt() -> None:
    rows, unused = dpo([("p", "cw"), ("q", "wwc")])
    assert [row["pair_id"] for row in rows] == ["p", "q"]
    assert unused == {"enough_of_pair": 1}
    for row in rows:
        assert text(row, "chosen") == "good [[A]]"
        assert text(row, "rejected") == "bad [[B]]"
        assert row["pair_id"] in row["prompt"][1]["content"]


def test_orders_and_checkpoints_never_mix() -> None:
    """The swapped order is another prompt."""
    rows = [
        completion("p", "[[A]]"),
        completion("p", "[[A]]", order="ba"),
        completion("p", "[[B]]", checkpoint="c1"),
        completion("p", "[[A]]", checkpoint="c1", order="ba"),
    ]
    completions, pairs = table("completions", rows), table("pairs", [pair("p")])
    every = table("selected", judge(completions, pairs).select(SCHEMAS["selected"].names).to_pylist())
    made, unused = building.dpo_rows(every, completions, pairs, PROMPT, PairsConfig(), seed=0)
    assert made.num_rows == 0
    assert unused == {"no_right": 3, "no_wrong": 1}


@pytest.mark.parametrize(
    ("statuses", "most", "expected"), [("ccww", 1, 1), ("ccww", 2, 2), ("ccww", 9, 4), ("cwww", 2, 2)]
)
def test_max_per_pair_gives_distinct_rows(statuses: str, most: int, expected: int) -> None:
    rows, _ = dpo([("p", statuses)], max_per_pair=most)
    assert len({(row["chosen_sample"], row["rejected_sample"]) for row in rows}) == len(rows) == expected


def test_each_right_one_is_used_once_before_any_twice() -> None:
    rows, _ = dpo([("p", "cccww")], max_per_pair=3)
    assert Counter(row["chosen_sample"] for row in rows) == {0: 1, 1: 1, 2: 1}


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0), (0.1, 0), (0.2, 2), (0.5, 8), (1.0, 8)])
def test_the_share_of_unparsed_rejected_is_capped(share: float, expected: int) -> None:
    kinds = [(f"w{one}", "cw") for one in range(8)] + [(f"u{one}", "cu") for one in range(8)]
    rows, unused = dpo(kinds, unparsed_rejected_share=share)
    without = [row for row in rows if read(text(row, "rejected")).outcome is None]
    if share == 0.1:
        expected = int(0.1 * 8 / 0.9)
    assert len(without) == expected
    assert len(rows) == 8 + expected
    assert unused == ({"unparsed_cap": 2 * (8 - expected)} if expected < 8 else {})


def test_the_cap_is_reached_exactly() -> None:
    """0.7 of 10 rows are 7, though 0.7 * 3 / 0.3 is a little less in floating point."""
    kinds = [*((f"w{one}", "cw") for one in range(3)), *((f"u{one}", "cu") for one in range(9))]
    rows, _ = dpo(kinds, unparsed_rejected_share=0.7)
    assert len(rows) == 10


def test_unparsed_is_rejected_only_where_wrong_ones_do_not_suffice() -> None:
    rows, _ = dpo([("p", "cuuw")], unparsed_rejected_share=1.0)
    assert [text(row, "rejected") for row in rows] == ["bad [[B]]"]
    rows, _ = dpo([("p", "cuuw")], unparsed_rejected_share=1.0, max_per_pair=3)
    assert Counter(text(row, "rejected") for row in rows) == {"bad [[B]]": 1, "no verdict": 2}


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.text("cwub", max_size=6), max_size=8),
    st.integers(1, 4),
    st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.9, 1.0]),
)
def test_any_mixture_adds_up(statuses: list[str], most: int, share: float) -> None:
    kinds = [(f"p{number}", one) for number, one in enumerate(statuses)]
    rows, _ = dpo(kinds, max_per_pair=most, unparsed_rejected_share=share)
    without = sum(read(text(row, "rejected")).outcome != "B" for row in rows)
    assert without <= share * len(rows) + 1e-9
    assert all(read(text(row, "chosen")).outcome == "A" for row in rows)
    assert max(Counter(row["pair_id"] for row in rows).values(), default=0) <= most


def test_yields_say_what_gave_nothing() -> None:
    completions, pairs = asked([("p", "cw"), ("q", "cc"), ("r", "wu"), ("s", "cu")])
    judged = judge(completions, pairs)
    selected, _ = select.select_sides(judged, SelectConfig(), seed=0, unparsed_rejected=False)
    rows, _ = building.dpo_rows(selected, completions, pairs, PROMPT, PairsConfig(), seed=0)
    assert building.yields(judged, rows) == {"asked": 4, "with_rows": 1, "all_right": 1, "none_right": 1, "other": 1}


def test_rationales_of_another_source_train_if_right() -> None:
    written = [
        ("p", "ab", "x [[A]] y"),
        ("p", "ba", "z [[A]]"),
        ("q", "ab", "none"),
        ("p", "ab", "[[A]]"),
        ("r", "ab", ""),
    ]
    rationales = table("rationales", [dict(zip(("pair_id", "order", "text"), row, strict=True)) for row in written])
    rows, dropped = building.rationale_rows(rationales, table("pairs", [pair("p"), pair("q")]), PROMPT)
    assert dropped == {"duplicate": 1, "pair_not_given": 1, "unparsed": 1, "wrong": 1}
    (row,) = rows.to_pylist()
    assert (row["checkpoint"], row["sample"], row["hinted"]) == ("bootstrap", 0, False)
    assert text(row, "completion") == "x [[A]]"


def test_shuffle_is_by_seed_and_ids_alone() -> None:
    completions, pairs = asked([(f"p{number:03d}", "ccww") for number in range(50)])
    judged = judge(completions, pairs)
    selected, _ = select.select_sides(judged, SelectConfig(), seed=0, unparsed_rejected=False)
    config = PairsConfig(max_per_pair=4)
    dpo_rows, _ = building.dpo_rows(selected, completions, pairs, PROMPT, config, seed=0)
    right, _ = select.select(judged, SelectConfig(), seed=0)
    for rows in (dpo_rows, building.sft_rows(right, completions, pairs, PROMPT)):
        mixed = building.shuffle(rows, seed=1)
        assert digest_table(building.shuffle(rows.take(list(range(rows.num_rows))[::-1]), seed=1)) == digest_table(
            mixed
        )
        assert digest_table(building.shuffle(rows, seed=2)) != digest_table(mixed)
        assert sorted(mixed.column("pair_id").to_pylist()) == rows.column("pair_id").to_pylist()
        assert mixed.column("pair_id").to_pylist() != rows.column("pair_id").to_pylist()


def test_cumulative_rows_stand_behind_each_other() -> None:
    completions, pairs = asked([("p", "c"), ("q", "c")])
    selected, _ = select.select(judge(completions, pairs), SelectConfig(), seed=0)
    rows = building.sft_rows(selected, completions, pairs, PROMPT)
    both = building.concat(rows.slice(0, 1), rows.slice(1))
    assert both.equals(rows)


def test_no_rows() -> None:
    assert dpo([]) == ([], {})


def test_golden() -> None:
    pairs, completions = fixed_case()
    judged = judge(completions, pairs)
    right, _ = select.select(judged, SelectConfig(), seed=4)
    sides, _ = select.select_sides(judged, SelectConfig(), seed=4, unparsed_rejected=True)
    config = PairsConfig(max_per_pair=2, unparsed_rejected_share=0.2)
    dpo_rows, unused = building.dpo_rows(sides, completions, pairs, PROMPT, config, seed=4)
    sft = building.sft_rows(right, completions, pairs, PROMPT)
    output = [building.shuffle(rows, seed=4).to_pylist() for rows in (sft, dpo_rows)]
    check_golden("pairs", building.VERSION, [*output, unused, building.yields(judged, dpo_rows)])


def test_speed() -> None:
    """Take 200 000 judgments through judge, select and pairs without a loop over rows."""
    completions, pairs = many(200_000)
    start = time.perf_counter()
    judged = judge(completions, pairs)
    right, _ = select.select(judged, SelectConfig(balance=True), seed=1)
    sides, _ = select.select_sides(judged, SelectConfig(balance=True), seed=1, unparsed_rejected=True)
    config = PairsConfig(unparsed_rejected_share=0.1)
    dpo_rows, _ = building.dpo_rows(sides, completions, pairs, PROMPT, config, seed=1)
    sft = building.sft_rows(right, completions, pairs, PROMPT)
    assert time.perf_counter() - start < 20  # about 3 s on two free cores
    assert min(sft.num_rows, dpo_rows.num_rows) > 20_000


def many(count: int) -> tuple[pa.Table, pa.Table]:
    """Make completions, eight a pair, and their pairs; the benchmark takes a million."""
    row = np.arange(count)
    names = np.array([f"{number:064x}" for number in range(count // 8)])
    texts = np.array([f"{'word ' * 60}[[A]]", f"{'word ' * 60}[[B]].", "no verdict"])
    columns = {
        "pair_id": names[row // 8],
        "checkpoint": np.full(count, "c" * 64),
        "order": np.full(count, "ab"),
        "sample": row % 8,
        "hinted": np.zeros(count, bool),
        "text": texts[np.random.default_rng(0).choice(3, count, p=(0.48, 0.48, 0.04))],
        "finish_reason": np.full(count, "stop"),
        "n_tokens": np.full(count, 60),
        "logprob": np.full(count, -1.0),
        "prob_a": np.full(count, 0.5),
        "error": pa.nulls(count),
    }
    pairs = [pair(name, "AB"[number % 2]) for number, name in enumerate(names.tolist())]
    return pa.table(columns).cast(SCHEMAS["completions"]), table("pairs", pairs)
