"""Decide on dev: no evidence goes on, only worse or a collapse stops."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from judge_cases import check_golden, table

from configs.run import GateConfig
from tasks.gate import VERSION, Decision, Gate, decide

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa


def scores(values: Sequence[float | None], group: int = 1, **other: Any) -> pa.Table:
    rows = []
    for number, value in enumerate(values):
        row = {"suite": "dev", "pair_id": f"p{number:03d}", "group": f"g{number // group}", "subset": ""}
        rows.append(row | {"forced_choice": value, "free_text": value, "consistent": True} | other)
    return table("pair_scores", rows)


def metrics(parse_rate: float | None = 0.9) -> pa.Table:
    row = {"suite": "dev", "subset": "", "section": "", "metric": "parse_rate", "value": parse_rate, "n": 50}
    return table("metrics", [row | {"subset": "x", "value": 0.0}, row])


def gate(now: pa.Table, before: pa.Table | None, looks: int = 1, rate: float | None = 0.9, **config: Any) -> Gate:
    return decide(now, before, metrics(rate), GateConfig(**config), looks)


GOOD, BAD = [1.0] * 60 + [0.0] * 40, [1.0] * 40 + [0.0] * 60


def test_the_first_look_goes_on() -> None:
    assert gate(scores(BAD), None) == Gate(Decision.GO, "Nothing to compare with yet.")


def test_worse_stops() -> None:
    made = gate(scores(BAD), scores(GOOD))
    assert made.decision == "stop"
    assert made.difference == pytest.approx(-0.2)
    assert made.p == pytest.approx(2**-20)
    assert made.low is not None
    assert made.high is not None
    assert made.low < -0.2 < made.high < 0
    assert made.reason.startswith("Worse than the checkpoint before: forced choice -20.0 points (95 % interval ")
    assert made.reason.endswith("on 100 dev pairs of 100 groups, one-sided p 9.5e-07, limit 0.05.")


def test_better_and_equal_go_on() -> None:
    assert gate(scores(GOOD), scores(BAD)).decision == "go"
    made = gate(scores(GOOD), scores(GOOD))
    assert (made.decision, made.difference, made.p) == ("go", 0.0, 1.0)
    assert made.reason.startswith("No evidence that it is worse")


@pytest.mark.parametrize(
    ("lost", "looks", "decision"), [(4, 1, "go"), (5, 1, "stop"), (5, 3, "go"), (6, 3, "stop"), (6, 4, "go")]
)
def test_alpha_is_divided_by_the_looks(lost: int, looks: int, decision: str) -> None:
    """A loss in `lost` pairs and no gain has p = 2^-lost: 0.031 for 5, 0.0156 for 6; limits 0.05, 0.0167, 0.0125."""
    made = gate(scores([0.0] * lost + [1.0] * 50), scores([1.0] * (lost + 50)), looks)
    assert (made.decision, made.p) == (decision, pytest.approx(2.0**-lost))


def test_pairs_of_a_group_are_one_observation() -> None:
    assert gate(scores([0.0] * 20 + [1.0] * 60, group=10), scores([1.0] * 80, group=10)).decision == "go"


def test_continue_reports_and_goes_on() -> None:
    made = gate(scores(BAD), scores(GOOD), on_worse="continue")
    assert made.decision == "go"
    assert made.reason.startswith("Worse than")
    assert made.reason.endswith("; goes on because gate.on_worse is continue.")


def test_a_collapse_stops() -> None:
    """Traps, rule 21: a gate on the rate; the subset's rate doesn't count."""
    made = gate(scores(GOOD), scores(BAD), rate=0.49, min_parse_rate=0.5)
    assert made.decision == "stop"
    assert made.reason == "Only 49.0% of 50 judgments have a verdict, below gate.min_parse_rate 50.0%."
    assert made.difference == pytest.approx(0.2)
    assert gate(scores(GOOD), None, rate=0.49, min_parse_rate=0.5).decision == "stop"
    assert gate(scores(GOOD), None, rate=0.5, min_parse_rate=0.5).decision == "go"
    assert gate(scores(GOOD), None, rate=0.49, min_parse_rate=0.5, on_worse="continue").decision == "go"


def test_nothing_measured_is_no_evidence() -> None:
    assert gate(scores([]), scores([]), rate=None, min_parse_rate=0.5).decision == "go"


def test_free_text_decides_where_no_probability_was_read() -> None:
    now, before = scores(BAD, forced_choice=None), scores(GOOD, forced_choice=None)
    made = gate(now, before)
    assert made.decision == "stop"
    assert "free text -20.0 points" in made.reason


def test_pairs_read_only_once_are_left_out() -> None:
    made = gate(scores([*GOOD, None]), scores([*GOOD, 1.0]))
    assert "on 100 dev pairs" in made.reason


def test_no_looks_are_refused() -> None:
    with pytest.raises(ValueError, match="looks"):
        gate(scores(GOOD), None, looks=0)


def test_golden() -> None:
    halves = [(number * 7 % 5) / 4 for number in range(100)]
    cases = [gate(scores(now, 3), scores(GOOD, 3), 3) for now in (GOOD, BAD, halves)]
    check_golden("gate", VERSION, [list(one) for one in cases])
