"""Count votes: majorities, ties that stay ties, both orders, the soft vote."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from judge_cases import check_golden, fixed_case, judgment, table

from tasks.judge import votes
from tasks.judge.verdict import judge

if TYPE_CHECKING:
    import pyarrow as pa


def cast(statuses: str, order: str = "ab", probs: list[float | None] | None = None) -> list[dict[str, Any]]:
    """Make votes: c correct, w wrong, t tie, u unparsed, b both, x truncated, e error."""
    words = {"c": "correct", "w": "wrong", "t": "tie", "u": "unparsed", "b": "both", "x": "truncated", "e": "error"}
    read = probs or [None] * len(statuses)
    return [
        judgment("p", words[letter], order=order, sample=number, prob_gold=prob)
        for number, (letter, prob) in enumerate(zip(statuses, read, strict=True))
    ]


def one_order(statuses: str, probs: list[float | None] | None = None) -> dict[str, Any]:
    row: dict[str, Any] = votes.by_order(table("judgments", cast(statuses, probs=probs))).to_pylist()[0]
    return row


def both_orders(ab: str, ba: str, probs: tuple[list[float | None], list[float | None]] | None = None) -> dict[str, Any]:
    rows = cast(ab, "ab", probs and probs[0]) + cast(ba, "ba", probs and probs[1])
    made: pa.Table = votes.by_pair(votes.by_order(table("judgments", rows)))
    row: dict[str, Any] = made.to_pylist()[0]
    return row


@pytest.mark.parametrize(
    ("statuses", "majority", "share"),
    [
        ("ccw", "correct", 1.0),
        ("cww", "wrong", 0.0),
        ("cw", "tie", 0.5),
        ("ccwwu", "tie", 0.5),
        ("t", "tie", 0.5),
        ("ttc", "correct", 1.0),
        ("cuuuxe", "correct", 1.0),
        ("wbbb", "wrong", 0.0),
        ("ubxe", None, 0.0),
    ],
)
def test_majority(statuses: str, majority: str | None, share: float) -> None:
    row = one_order(statuses)
    assert (row["majority"], row["free_text"], row["votes"]) == (majority, share, len(statuses))


def test_forced_choice_is_a_majority_of_votes_and_the_soft_vote_a_mean() -> None:
    row = one_order("www", [0.6, 0.6, 0.0])
    assert row["forced_choice"] == 1.0
    assert row["prob_gold"] == pytest.approx(0.4)


def test_forced_choice_ties_and_absence() -> None:
    assert one_order("cc", [0.6, 0.4])["forced_choice"] == 0.5
    assert one_order("c", [0.5])["forced_choice"] == 0.5
    assert one_order("cc", [0.9, None])["forced_choice"] == 1.0
    assert one_order("cc")["forced_choice"] is None


@pytest.mark.parametrize(
    ("ab", "ba", "free", "parsed", "consistent"),
    [
        ("c", "c", 1.0, 1.0, True),
        ("w", "w", 0.0, 0.0, True),
        ("c", "w", 0.5, 0.5, False),
        ("c", "u", 0.5, 1.0, False),
        ("u", "u", 0.0, None, False),
        ("t", "t", 0.5, 0.5, False),
        ("cw", "c", 0.75, 0.75, False),
    ],
)
def test_both_orders(ab: str, ba: str, free: float, parsed: float | None, consistent: bool) -> None:
    row = both_orders(ab, ba)
    assert (row["free_text"], row["free_text_parsed"], row["consistent"], row["orders"]) == (
        free,
        parsed,
        consistent,
        2,
    )


def test_one_order_has_no_consistency() -> None:
    row = votes.by_pair(votes.by_order(table("judgments", cast("c")))).to_pylist()[0]
    assert row["consistent"] is None
    assert row["free_text"] == 1.0


def test_the_soft_vote_averages_over_orders() -> None:
    row = both_orders("cw", "c", ([0.9, 0.9], [0.2]))
    assert row["prob_gold"] == pytest.approx(0.55)
    assert row["soft_vote"] == 1.0
    assert row["forced_choice"] == 0.5


def test_checkpoints_vote_apart() -> None:
    rows = [judgment("p", "correct"), judgment("p", "wrong", checkpoint="c1")]
    assert votes.by_order(table("judgments", rows)).column("free_text").to_pylist() == [1.0, 0.0]


def test_golden() -> None:
    pairs, completions = fixed_case()
    counted = votes.by_order(judge(completions, pairs))
    check_golden("votes", votes.VERSION, [counted.to_pylist(), votes.by_pair(counted).to_pylist()])
