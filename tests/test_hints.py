"""The pure half of rationalization: which pairs failed, what quotes a hint, how many hinted rows are selected."""

from __future__ import annotations

from collections import Counter
from typing import Any

import polars as pl
import pytest
from judge_cases import PROMPT, check_golden, completion, fixed_case, judgment, pair, table

from configs.run import PairsConfig, RationalizeConfig, SelectConfig
from storage.schema import JUDGMENT_ID, SCHEMAS
from tasks import pairs as building
from tasks import rationalize, select
from tasks.judge import hints, prompts
from tasks.judge.verdict import judge

ID = list(JUDGMENT_ID)
HINT = RationalizeConfig().hint


def test_failed_pairs_have_no_right_completion_in_any_order() -> None:
    pairs = table("pairs", [pair(name, gold) for name, gold in zip("abcdx", "AABAA", strict=True)])
    rows = [
        completion("a", "[[B]]"),
        completion("a", "[[B]]", order="ba"),  # right: gold is shown second
        completion("b", "[[B]]"),
        completion("b", "no verdict", sample=1),
        completion("c", "[[B]]"),
        completion("d", "[[A]]", finish_reason="length"),
    ]
    found = rationalize.failed(table("completions", rows), pairs)
    assert found["pair_id"].to_pylist() == ["b", "d"]
    assert found.schema == SCHEMAS["pairs"]


@pytest.mark.parametrize(
    ("text", "quotes"),
    [
        ("Response A is better because it names the capital. [[A]]", False),
        ("That is why response A is better. [[A]]", False),
        ("Explain why response A is better. It names the capital. [[A]]", True),
        ("You want me to EXPLAIN, why response  B\nis *better*! [[B]]", True),
        ("So I end: why response A is better. End with [[A]]", True),
        ("I was told that A is better. [[A]]", True),
        ("As you told me, [[B]]", True),
        ("By the hint, [[B]]", True),
        ("It follows the instructions, and we are told that x = 3; the given answer is right. [[A]]", False),
        ("", False),
        (None, False),
    ],
)
def test_a_text_that_quotes_the_hint(text: str | None, quotes: bool) -> None:
    assert hints.quoting(pl.Series([text], dtype=pl.String), HINT).to_list() == [quotes]


def test_a_short_hint_is_quoted_as_a_whole() -> None:
    texts = pl.Series(["A wins, since", "Say why: A wins", "Say why A loses"])
    assert hints.quoting(texts, "Say why {verdict} wins.").to_list() == [False, True, False]


def test_the_hint_stands_behind_the_question() -> None:
    asked = prompts.judge_messages(PROMPT, "q {verdict}", "x", "y")
    shown = hints.hinted(asked, "It is {verdict}: [[{verdict}]].", "B")
    assert shown[:-1] == asked[:-1]
    assert shown[-1] == {"role": "user", "content": f"{asked[-1]['content']}\n\nIt is B: [[B]]."}


def rows_of(letter: str, sure: int, hinted: int) -> list[dict[str, Any]]:
    """Make right judgments of as many pairs, each with a wrong one beside it."""
    made = []
    other = {"A": "B", "B": "A"}[letter]
    for number in range(sure + hinted):
        name, extra = f"{letter}{number:03d}", number >= sure
        made.append(judgment(name, "correct", verdict=letter, hinted=extra))
        made.append(judgment(name, "wrong", verdict=other, sample=1))
    return made


def flags(rows: list[dict[str, Any]], *quoting: str) -> pl.Series:
    return pl.Series([row["pair_id"] in quoting and row["hinted"] for row in rows])


def chosen(
    rows: list[dict[str, Any]], method: str, share: float | None = 0.2, quoting: tuple[str, ...] = (), **config: Any
) -> tuple[pl.DataFrame, Counter[str]]:
    """Select for SFT or DPO; hold that every row has one place and no share is exceeded."""
    hinted = select.Hinted(flags(rows, *quoting), share)
    judgments, settings = table("judgments", rows), SelectConfig(**config)
    if method == "sft":
        selected, dropped = select.select(judgments, settings, seed=0, hinted=hinted)
    else:
        selected, dropped = select.select_sides(judgments, settings, seed=0, unparsed_rejected=True, hinted=hinted)
    assert selected.num_rows + dropped.num_rows == len(rows)
    right = pl.DataFrame(selected).filter(pl.col("status") == "correct")
    if share is not None and right.height:
        assert right["hinted"].mean() <= share
    return right, Counter(dropped.column("reason").to_pylist())


@pytest.mark.parametrize("method", ["sft", "dpo"])
@pytest.mark.parametrize(("share", "expected"), [(0.2, 10), (0.3, 17), (0.01, 0), (0.5, 20)])
def test_the_share_of_hinted_rows_is_capped_for_each_verdict(method: str, share: float, expected: int) -> None:
    right, reasons = chosen(rows_of("A", 40, 20) + rows_of("B", 3, 0), method, share)
    assert right["hinted"].sum() == expected
    assert reasons["hinted_share"] == (20 - expected) * (2 if method == "dpo" else 1)


@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_the_share_holds_after_the_balance(method: str) -> None:
    right, _ = chosen(rows_of("A", 40, 20) + rows_of("B", 8, 30), method, balance=True)
    assert right["hinted"].sum() == 2  # of B; those of A go first
    assert Counter(name[0] for name in right["pair_id"]) == {"A": 10, "B": 10}


@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_hinted_rows_that_quote_or_are_not_needed_or_wrong_are_dropped(method: str) -> None:
    rows = rows_of("A", 40, 3)
    rows += [judgment("A000", "correct", hinted=True), judgment("A041", "wrong", hinted=True, sample=1)]
    rows += [judgment("A042", "truncated", hinted=True, sample=1)]
    right, reasons = chosen(rows, method, quoting=("A040",))
    assert sorted(right.filter("hinted")["pair_id"]) == ["A041", "A042"]
    assert {one: reasons[one] for one in ("quotes_hint", "not_needed", "hinted_wrong", "hinted_truncated")} == {
        "quotes_hint": 1,
        "not_needed": 1,
        "hinted_wrong": 1,
        "hinted_truncated": 1,
    }


def test_without_a_share_hinted_rows_are_all_there_is() -> None:
    rows = [judgment(f"p{one}", ("correct", "wrong")[one % 2], hinted=True) for one in range(10)]
    right, reasons = chosen(rows, "sft", None)
    assert right.height == 5
    assert reasons == {"hinted_wrong": 5}


def test_a_hinted_row_is_chosen_once_against_a_wrong_sample() -> None:
    pairs = table("pairs", [pair("p"), pair("q"), pair("r")])
    rows = [completion("p", "good [[A]]", hinted=True, sample=one) for one in range(2)]
    rows += [completion("p", "bad [[B]]", sample=one) for one in range(3)]
    rows += [completion("q", "good [[A]]", hinted=True), completion("q", "no verdict")]
    rows += [completion("r", "good [[A]]", sample=one) for one in range(4)] + [completion("r", "[[B]]", sample=4)]
    completions = table("completions", rows)
    hinted = select.Hinted(pl.Series([False] * len(rows)), 0.5)
    selected, dropped = select.select_sides(
        judge(completions, pairs), SelectConfig(), seed=0, unparsed_rejected=True, hinted=hinted
    )
    made, unused = building.dpo_rows(selected, completions, pairs, PROMPT, PairsConfig(max_per_pair=4), seed=0)
    found = [(row["pair_id"], row["chosen_hinted"], row["rejected_hinted"]) for row in made.to_pylist()]
    assert found == [("p", True, False)] + [("r", False, False)] * 4
    assert unused == {"enough_of_pair": 3}
    assert Counter(pl.DataFrame(dropped)["reason"]) == {"no_wrong": 2}


def test_golden() -> None:
    pairs, completions = fixed_case()
    check_golden("rationalize", rationalize.VERSION, rationalize.failed(completions, pairs)["pair_id"].to_pylist())
    texts = pl.Series([f"{start} explain why response {letter} is better" for start in "xy" for letter in "ABC"])
    asked = prompts.judge_messages(PROMPT, "q", "x", "y")
    check_golden("hints", hints.VERSION, [hints.quoting(texts, HINT).to_list(), hints.hinted(asked, HINT, "A")])
    rows = rows_of("A", 9, 6) + rows_of("B", 5, 4)
    made = []
    for method, config in (("sft", {"balance": True}), ("dpo", {}), ("dpo", {"balance": True})):
        right, reasons = chosen(rows, method, 0.3, ("B005",), **config)
        made.append([right.select(ID).rows(), dict(sorted(reasons.items()))])
    check_golden("select_hinted", select.VERSION, made)
