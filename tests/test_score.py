"""Score judgments: every metric against numbers counted by hand, and against published ones."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest
from judge_cases import check_golden, completion, fixed_case, judgment, pair, table

from storage.errors import StepFailedError
from storage.schema import SCHEMAS
from tasks import score
from tasks.judge.statistics import wilson
from tasks.judge.verdict import judge

if TYPE_CHECKING:
    import pyarrow as pa

SHARED = Path(__file__).parents[2] / "shared" / "data"


def measured(judgments: pa.Table, pairs: pa.Table) -> dict[tuple[str, str], dict[str, Any]]:
    metrics, _ = score.score(judgments, pairs, suite="s")
    assert metrics.schema == SCHEMAS["metrics"]
    return {(row["subset"], row["metric"]): row for row in metrics.to_pylist()}


def two_pairs() -> tuple[pa.Table, pa.Table]:
    """Judge p (gold A) and q (gold B) in both orders with two votes each."""
    texts = {
        ("p", "ab"): ("[[A]]", "[[A]]"),  # right, right
        ("p", "ba"): ("[[A]]", "oops"),  # wrong, unparsed
        ("q", "ab"): ("[[tie]]", "[[B]]"),  # tie, right
        ("q", "ba"): ("[[A]]", "[[A]]"),  # right, truncated
    }
    rows = [
        completion(
            name, text, order=order, sample=sample, n_tokens=10 + sample, prob_a=0.9 if sample else 0.6,
            finish_reason="length" if (name, order, sample) == ("q", "ba", 1) else "stop",
        )
        for (name, order), votes in texts.items()
        for sample, text in enumerate(votes)
    ]  # fmt: skip
    pairs = table("pairs", [pair("p", "A", subset="x"), pair("q", "B", subset="y")])
    return judge(table("completions", rows), pairs), pairs


@pytest.mark.parametrize(
    ("metric", "value", "n"),
    [
        ("forced_choice", 0.5, 2),  # every vote says A: right in one order, wrong in the other
        ("free_text", 0.75, 2),  # p: 1 and 0; q: 1 and 1
        ("free_text_parsed", 0.75, 2),
        ("soft_vote", 0.5, 2),
        ("consistency", 0.5, 2),
        ("single_vote", 4.5 / 8, 8),
        ("parse_rate", 6 / 8, 8),
        ("truncation_rate", 1 / 8, 8),
        ("pick_a", 4 / 5, 5),  # A A A B A: the tie, the unparsed and the truncated one have no letter
        ("pick_a_forced", 1.0, 8),
        ("prob_gold", 0.5, 8),
        ("rationale_tokens", 10.5, 8),
    ],
)
def test_metric_by_hand(metric: str, value: float, n: int) -> None:
    row = measured(*two_pairs())["", metric]
    assert row["value"] == pytest.approx(value)
    assert (row["n"], row["clusters"], row["suite"], row["section"]) == (n, 2, "s", "")
    assert row["low"] <= row["value"] <= row["high"]


def test_every_subset_has_every_metric() -> None:
    """No accuracy without n, parse rate and truncation rate."""
    found = measured(*two_pairs())
    assert set(found) == {(subset, metric) for subset in ("", "x", "y") for metric in score.METRICS}
    assert found["x", "free_text"]["value"] == 0.5
    assert found["y", "free_text"]["value"] == 1.0
    assert found["x", "free_text"]["n"] == 1


def test_pair_scores() -> None:
    _, scores = score.score(*two_pairs(), suite="s")
    assert scores.schema == SCHEMAS["pair_scores"]
    assert scores.column("suite").to_pylist() == ["s", "s"]
    assert [tuple(row.values())[1:] for row in scores.to_pylist()] == [
        ("p", "p", "x", 0.5, 0.5, False),
        ("q", "q", "y", 0.5, 1.0, True),
    ]


def test_unparsed_is_not_right_and_shown_apart() -> None:
    """Traps, rule 19: a judge that stops answering falls to 0, not to a half."""
    rows = [judgment(f"p{one}", "unparsed" if one < 6 else "correct") for one in range(10)]
    found = measured(table("judgments", rows), table("pairs", [pair(f"p{one}") for one in range(10)]))
    assert found["", "free_text"]["value"] == 0.4
    assert (found["", "free_text_parsed"]["value"], found["", "free_text_parsed"]["n"]) == (1.0, 4)
    assert found["", "parse_rate"]["value"] == 0.4


def test_intervals_are_wilsons_and_count_groups() -> None:
    rows = [judgment(f"p{one}", "correct" if one < 30 else "wrong") for one in range(40)]
    alone = table("pairs", [pair(f"p{one}") for one in range(40)])
    row = measured(table("judgments", rows), alone)["", "free_text"]
    assert (row["low"], row["high"]) == pytest.approx(wilson(0.75, 40))
    grouped = table("pairs", [pair(f"p{one}", group=str(one // 10)) for one in range(40)])
    wide = measured(table("judgments", rows), grouped)["", "free_text"]
    assert wide["clusters"] == 4
    assert wide["high"] - wide["low"] > row["high"] - row["low"]


def test_all_right_has_a_width() -> None:
    rows = [judgment(f"p{one}", "correct") for one in range(30)]
    row = measured(table("judgments", rows), table("pairs", [pair(f"p{one}") for one in range(30)]))["", "free_text"]
    assert (row["value"], row["high"]) == (1.0, 1.0)
    assert row["low"] == pytest.approx(0.8865, abs=1e-4)


def test_tokens_are_never_below_zero() -> None:
    rows = [judgment("p", "correct", n_tokens=1), judgment("q", "correct", n_tokens=200)]
    row = measured(table("judgments", rows), table("pairs", [pair("p"), pair("q")]))["", "rationale_tokens"]
    assert (row["value"], row["low"]) == (100.5, 0.0)
    assert row["high"] > 200


def test_what_was_not_read_is_null() -> None:
    found = measured(table("judgments", [judgment("p", "error", n_tokens=0)]), table("pairs", [pair("p", subset=None)]))
    for metric in (
        "forced_choice",
        "soft_vote",
        "consistency",
        "pick_a",
        "pick_a_forced",
        "prob_gold",
        "rationale_tokens",
    ):
        row = found["", metric]
        assert (row["value"], row["low"], row["high"], row["n"], row["clusters"]) == (None, None, None, 0, 0)
    assert found["", "free_text"]["value"] == 0.0


@pytest.mark.parametrize(
    ("rows", "pairs"),
    [
        ([judgment("p", "correct")], [pair("p"), pair("q")]),
        ([judgment("p", "correct"), judgment("q", "correct")], [pair("p")]),
        ([judgment("p", "correct"), judgment("p", "correct", checkpoint="c1")], [pair("p")]),
        ([judgment("p", "correct", hinted=True)], [pair("p")]),
    ],
)
def test_a_wrong_set_of_judgments_is_refused(rows: list[dict[str, Any]], pairs: list[dict[str, Any]]) -> None:
    with pytest.raises(StepFailedError):
        score.score(table("judgments", rows), table("pairs", pairs), suite="s")


@pytest.mark.skipif(not SHARED.exists(), reason="needs ../shared/data (published LLMBar judgments)")
def test_published_numbers_of_llmbar() -> None:
    """GPT-4, Vanilla, natural: 95 and 96 of 100 right in the two orders, 95 consistent."""
    judged = pl.read_parquet(SHARED / "extras" / "llmbar_judges.parquet")
    judged = judged.filter((pl.col("judge_model") == "GPT-4") & (pl.col("strategy") == "Vanilla"))
    known = pl.read_parquet(SHARED / "pairs" / "llmbar.parquet").filter(pl.col("subset") == "natural")
    rows = known.join(judged, on="id", how="inner").to_dicts()
    pairs = table("pairs", [pair(row["id"], row["label"], subset="natural") for row in rows])
    swap = {"A": "B", "B": "A"}
    orders = {
        "ab": [completion(row["id"], f"[[{row['winner_order1'] or '?'}]]") for row in rows],
        "ba": [completion(row["id"], f"[[{swap.get(row['winner_order2'], '?')}]]", order="ba") for row in rows],
    }
    right = {
        order: measured(judge(table("completions", written), pairs), pairs)["natural", "free_text"]
        for order, written in orders.items()
    }
    both = measured(judge(table("completions", orders["ab"] + orders["ba"]), pairs), pairs)
    assert [right[order]["value"] for order in ("ab", "ba")] == [0.95, 0.96]
    assert both["natural", "consistency"]["value"] == 0.95
    assert both["natural", "free_text"]["value"] == pytest.approx(0.955)
    assert both["natural", "free_text"]["n"] == 100


def test_golden() -> None:
    pairs, completions = fixed_case()
    made = score.score(judge(completions, pairs), pairs, suite="s")
    check_golden("score", score.VERSION, [one.to_pylist() for one in made])
