"""Read verdicts: the golden cases, the classes of judgments, gold in the order shown."""

from __future__ import annotations

import json
import time
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from judge_cases import DATA, check_golden, completion, fixed_case, pair, table

from storage.errors import StepFailedError
from storage.schema import SCHEMAS
from tasks.judge import verdict

CASES = json.loads((DATA / "verdicts.json").read_text())


def judge_one(text: str, gold: str = "A", **other: Any) -> dict[str, Any]:
    judged = verdict.judge(table("completions", [completion("p", text, **other)]), table("pairs", [pair("p", gold)]))
    assert judged.schema == SCHEMAS["judgments"]
    row: dict[str, Any] = judged.to_pylist()[0]
    return row


def test_there_are_many_hard_cases() -> None:
    assert len({case["text"] for case in CASES}) == len(CASES) >= 60


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_golden_case(case: dict[str, Any]) -> None:
    """Traps, rule 20: one parser; the single reading and the column's agree on every hard case."""
    reading = verdict.read(case["text"])
    assert (reading.outcome or "none") == case["outcome"]
    assert verdict.rationale_end(case["text"]) == reading.rationale_end
    if case["outcome"] == "none":
        assert reading.rationale_end is None
    else:
        assert case["text"][: reading.rationale_end] == case["rationale"]
    assert verdict.readings(pl.Series([case["text"]])).row(0) == tuple(reading)


def test_the_cases_as_one_column() -> None:
    texts = [case["text"] for case in CASES]
    assert verdict.readings(pl.Series(texts)).rows() == [tuple(verdict.read(text)) for text in texts]


_BRACKETS = ["[[A]]", "[[B]]", "[[ A]]", "[[tie]]", "[[C]]", "[", "]"]
_PIECES = [*_BRACKETS, "A", "\n", "\r", " ", "é", "🙂", "x" * 210, "\\", ""]
_ERRORS = [
    {"finish_reason": "error"},
    {"error": "prompt too long"},
    {"finish_reason": None},
    {"finish_reason": "abort"},
]


@settings(max_examples=400, deadline=None)
@given(st.lists(st.lists(st.sampled_from(_PIECES), max_size=12).map("".join), min_size=1, max_size=6))
def test_single_and_column_reading_agree(texts: list[str]) -> None:
    assert verdict.readings(pl.Series(texts)).rows() == [tuple(verdict.read(text)) for text in texts]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(_PIECES), max_size=12).map("".join))
def test_cut_ends_with_the_verdict_and_reads_the_same(text: str) -> None:
    short = verdict.cut(pl.Series([text]))[0]
    assert text.startswith(short)
    assert verdict.read(short) == verdict.read(text)
    assert short.endswith("]]") if verdict.read(text).outcome else short == text


@pytest.mark.parametrize(
    ("order", "gold", "text", "status"),
    [
        ("ab", "A", "[[A]]", "correct"),
        ("ab", "A", "[[B]]", "wrong"),
        ("ba", "A", "[[A]]", "wrong"),
        ("ba", "A", "[[B]]", "correct"),
        ("ab", "B", "[[A]]", "wrong"),
        ("ba", "B", "[[A]]", "correct"),
    ],
)
def test_gold_is_mapped_to_the_order_shown(order: str, gold: str, text: str, status: str) -> None:
    row = judge_one(text, gold, order=order, prob_a=0.8)
    assert row["status"] == status
    assert row["verdict"] == text[2]
    gold_shown_first = (order == "ab") == (gold == "A")
    assert row["prob_gold"] == pytest.approx(0.8 if gold_shown_first else 0.2)


@pytest.mark.parametrize("outcome", ["tie", "both", "none"])
def test_ties_both_and_unparsed_are_classes_of_their_own(outcome: str) -> None:
    """Traps, rule 19: a malformed verdict is no tie, no 0 and no B."""
    for case in CASES:
        if case["outcome"] == outcome:
            row = judge_one(case["text"])
            assert row["status"] == {"none": "unparsed"}.get(outcome, outcome)
            assert row["verdict"] is None


def test_truncated_whatever_the_text_says() -> None:
    """Traps, rule 21."""
    row = judge_one("Sure. [[A]] and", finish_reason="length", prob_a=0.9)
    assert (row["status"], row["verdict"], row["rationale_end"], row["prob_gold"]) == ("truncated", None, 6, 0.9)


@pytest.mark.parametrize("other", _ERRORS)
def test_error_whatever_the_text_says(other: dict[str, Any]) -> None:
    row = judge_one("[[A]]", **other)
    assert (row["status"], row["verdict"]) == ("error", None)


def test_an_error_without_text() -> None:
    lost = completion("p", "", finish_reason="error", error="prompt too long") | {"text": None}
    row = verdict.judge(table("completions", [lost]), table("pairs", [pair("p")])).to_pylist()[0]
    assert (row["status"], row["rationale_end"], row["prob_gold"]) == ("error", None, None)


def test_an_unknown_pair_is_refused() -> None:
    with pytest.raises(StepFailedError, match="first to pair q"):
        verdict.judge(table("completions", [completion("q", "[[A]]")]), table("pairs", [pair("p")]))


def test_rows_keep_their_order_and_ids() -> None:
    pairs, completions = fixed_case()
    judged = verdict.judge(completions, pairs)
    for name in ("pair_id", "checkpoint", "order", "sample", "hinted", "n_tokens"):
        assert judged.column(name).to_pylist() == completions.column(name).to_pylist()


def test_no_rows() -> None:
    assert verdict.judge(SCHEMAS["completions"].empty_table(), table("pairs", [pair("p")])).num_rows == 0


def test_golden() -> None:
    pairs, completions = fixed_case()
    texts = pl.Series([case["text"] for case in CASES])
    judged = verdict.judge(completions, pairs)
    output = [judged.to_pylist(), verdict.readings(texts).to_dicts(), verdict.cut(texts).to_list()]
    check_golden("verdict", verdict.VERSION, output)


def test_speed() -> None:
    """Read 200 000 texts with text behind the verdict in seconds: no loop over rows."""
    texts = pl.Series([f"{'word ' * 100}[[{'AB'[number % 2]}]]{' more' * (number % 3)}" for number in range(200_000)])
    start = time.perf_counter()
    assert verdict.readings(texts)["outcome"].value_counts()["count"].to_list() == [100_000, 100_000]
    assert time.perf_counter() - start < 5
