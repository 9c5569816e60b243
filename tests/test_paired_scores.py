"""Hold two judges' scores against each other: shared pairs, flips, intervals and tests clustered by prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from judge_cases import table

from tasks.judge import paired_scores, statistics
from tasks.look.compare import measure

if TYPE_CHECKING:
    import pyarrow as pa


def scores(values: list[float], **changes: Any) -> pa.Table:
    rows = [
        {
            "suite": "test",
            "pair_id": f"p{number}",
            "group": f"g{number // 2}",
            "subset": "",
            "forced_choice": value,
            "free_text": value,
            "consistent": True,
        }
        | changes
        for number, value in enumerate(values)
    ]
    return table("pair_scores", rows)


def test_flips_are_changes_of_side() -> None:
    """Right is above 1/2; an even score is on the other side of right."""
    before, now = scores([1, 0, 0.5, 0.75, 0.5, 0.25]), scores([0, 1, 1, 1, 0, 0.75, 1])
    flips = paired_scores.flips(now, before)
    found = [(row["pair_id"], row["before"], row["now"], row["change"]) for row in flips.to_dicts()]
    assert found == [
        ("p0", 1, 0, "lost"),
        ("p1", 0, 1, "gained"),
        ("p2", 0.5, 1, "gained"),
        ("p5", 0.25, 0.75, "gained"),
    ]


def test_flips_by_free_text_where_no_probability_was_read() -> None:
    flips = paired_scores.flips(scores([1], forced_choice=None), scores([0], forced_choice=None))
    assert flips["change"].to_list() == ["gained"]
    assert paired_scores.flips(scores([1]), scores([0], forced_choice=None, free_text=None)).height == 0


def test_metrics_are_over_the_shared_pairs_clustered_by_prompt() -> None:
    draws = np.random.default_rng(5)
    before, now = (list(draws.integers(0, 5, 40) / 4) for _ in range(2))
    found = {one.metric: one for one in measure("test", scores(now), scores(before[:30]))}
    assert set(found) == {"forced_choice", "free_text", "consistent"}
    groups = [f"g{number // 2}" for number in range(30)]
    one = found["forced_choice"]
    assert one.difference == pytest.approx(statistics.paired(now[:30], before[:30], groups))
    assert one.before == pytest.approx(statistics.mean_interval(before[:30], groups))
    assert one.now == pytest.approx(statistics.mean_interval(now[:30], groups))
    assert (one.difference.n, one.difference.clusters) == (30, 15)
