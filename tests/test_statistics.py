"""Hold intervals and tests against published numbers, closed forms and enumeration."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from judge_cases import check_golden

from tasks.judge import statistics


@pytest.mark.parametrize(
    ("right", "n", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_unclustered_shares_have_wilsons_interval(right: int, n: int, low: float, high: float) -> None:
    """Newcombe 1998, Statistics in Medicine 17, table I, method 3."""
    assert statistics.wilson(right / n, n) == pytest.approx((low, high), abs=5e-5)
    found = statistics.mean_interval([1] * right + [0] * (n - right), [str(row) for row in range(n)])
    assert (found.low, found.high) == pytest.approx((low, high), abs=5e-5)
    assert (found.n, found.clusters) == (n, n)


def test_all_right_still_has_a_width() -> None:
    """Traps, rule 22; 30 of 30 leaves everything from 88.6 % up."""
    found = statistics.mean_interval([1] * 30, [str(row) for row in range(30)])
    assert found.high == 1.0
    assert found.low == pytest.approx(30 / (30 + statistics.Z**2))


@pytest.mark.parametrize("value", [0.0, 0.25, 0.5, 0.99, 1.0])
def test_rows_that_agree_have_a_width(value: float) -> None:
    found = statistics.mean_interval([value] * 30, [str(row) for row in range(30)])
    assert found.low is not None
    assert found.high is not None
    assert found.low <= value <= found.high
    assert found.high - found.low > 0.02


def test_copies_in_a_cluster_tell_nothing_new() -> None:
    """Ten copies of each of 100 rows: as wide as the 100 rows, not as 1000."""
    one = statistics.mean_interval([1] * 60 + [0] * 40, [str(row) for row in range(100)])
    ten = statistics.mean_interval([1] * 600 + [0] * 400, [str(row // 10) for row in range(1000)])
    assert ten.n == 1000
    assert ten.clusters == 100
    assert one.low is not None
    assert ten.low is not None
    assert 0.6 - ten.low == pytest.approx(0.6 - one.low, rel=0.03)
    assert ten.low <= one.low


def test_the_mean_of_an_unbounded_number_has_students_interval() -> None:
    """Values 1 … 10: mean 5.5, s = 3.0277, t(9) = 2.2622, half-width 2.1659."""
    found = statistics.mean_interval(range(1, 11), [str(row) for row in range(10)], bounded=False)
    assert (found.value, found.low, found.high) == pytest.approx((5.5, 3.3341, 7.6659), abs=1e-4)


def test_nothing_and_one_cluster() -> None:
    assert statistics.clustered([], []) == statistics.Interval(None, None, None, 0, 0)
    one = statistics.clustered([3], [4])
    assert one.value == 0.75
    assert one.low is not None
    assert one.low < 0.2
    assert statistics.clustered([3], [4], bounded=False).low is None


def test_few_clusters_widen_the_interval() -> None:
    """By hand: 4 clusters of 25; variance 250 / 100^2 * 4 / 3, t(99) = 1.9842, t(3) = 3.1824."""
    found = statistics.clustered([25, 20, 10, 5], [25] * 4)
    size = 100 / 99 * 0.6 * 0.4 / (250 / 100**2 * 4 / 3) * (1.9842 / 3.1824) ** 2
    assert (found.low, found.high) == pytest.approx(statistics.wilson(0.6, size), abs=1e-4)


def test_clusters_that_agree_more_than_chance_tell_no_more_than_their_rows() -> None:
    found = statistics.clustered([15] * 7 + [16, 14], [25] * 9)
    size = 225 * (statistics.t_quantile(224) / statistics.t_quantile(8)) ** 2
    assert (found.low, found.high) == pytest.approx(statistics.wilson(0.6, size))


@pytest.mark.parametrize("share", [0.5, 0.9, 0.98])
def test_intervals_cover_in_clusters(share: float) -> None:
    """Simulate 400 suites of 60 clusters of 3 correlated rows (seeded): near 95 % of the intervals hold the truth."""
    draws = np.random.default_rng(5)
    held = 0
    for _ in range(400):
        shared, own = draws.random((60, 1)) < share, draws.random((60, 3)) < share
        rows = np.where(draws.random((60, 1)) < 0.5, shared, own)
        found = statistics.clustered(rows.sum(axis=1), np.full(60, 3))
        assert found.low is not None
        assert found.high is not None
        held += found.low <= share <= found.high
    assert 0.92 <= held / 400 <= 0.99


@pytest.mark.parametrize(
    ("df", "quantile"), [(1, 12.706), (2, 4.303), (3, 3.182), (5, 2.571), (10, 2.228), (30, 2.042), (120, 1.980)]
)
def test_students_quantile(df: int, quantile: float) -> None:
    """Any table of Student's t."""
    assert statistics.t_quantile(df) == pytest.approx(quantile, abs=6e-4)


def test_students_quantile_meets_the_normal() -> None:
    assert statistics.t_quantile(1999) == pytest.approx(statistics.t_quantile(2000), rel=1e-3)


def unclustered(gained: int, lost: int) -> statistics.Difference:
    now, before = [1] * gained + [0] * lost + [1] * 20, [0] * gained + [1] * lost + [1] * 20
    return statistics.paired(now, before, [str(row) for row in range(len(now))])


@pytest.mark.parametrize(
    ("gained", "lost", "p"), [(0, 0, 1.0), (5, 0, 0.0625), (1, 9, 0.021484375), (10, 4, 0.1795654296875), (8, 8, 1.0)]
)
def test_unclustered_pairs_have_mcnemars_p(gained: int, lost: int, p: float) -> None:
    """Two-sided binomial tails, by hand: 2 * 11 / 1024 for 1 against 9."""
    found = unclustered(gained, lost)
    assert found.p == pytest.approx(p)
    tail = sum(math.comb(gained + lost, k) for k in range(gained + 1)) / 2 ** (gained + lost)
    assert found.p_worse == pytest.approx(tail)


def test_mcnemars_p_with_large_counts() -> None:
    z = (2000 - 1900 - 1) / math.sqrt(3900)  # with the continuity correction
    assert unclustered(2000, 1900).p == pytest.approx(math.erfc(z / math.sqrt(2)), rel=1e-3)


@pytest.mark.parametrize("sums", [[0.5, -1, 0.25, 2, -0.75, 1], [3, 3, -0.5], [-0.25] * 7, [1.5, 0, 0, -1.5]])
def test_sign_flip_against_enumeration(sums: list[float]) -> None:
    flipped = [
        sum(sign * one for sign, one in zip(signs, sums, strict=True))
        for signs in itertools.product((-1, 1), repeat=len(sums))
    ]
    total = sum(sums)
    both = sum(abs(one) >= abs(total) - 1e-9 for one in flipped) / len(flipped)
    lower = sum(one <= total + 1e-9 for one in flipped) / len(flipped)
    assert statistics.sign_flip(sums) == pytest.approx((both, lower))


def test_sign_flip_of_any_numbers_against_enumeration() -> None:
    sums = np.random.default_rng(1).normal(0.3, 1, 12)
    signs = np.array(list(itertools.product((-1, 1), repeat=12)))
    flipped, total = signs @ sums, sums.sum()
    both, lower = statistics.sign_flip(sums)
    assert both == pytest.approx(float((np.abs(flipped) >= abs(total) - 1e-9).mean()), abs=2e-3)
    assert lower == pytest.approx(float((flipped <= total + 1e-9).mean()), abs=2e-3)


def test_clusters_count_once() -> None:
    """The same loss in ten copies is one loss."""
    many = statistics.paired([0] * 30, [1] * 30, [str(row // 10) for row in range(30)])
    assert many.p == pytest.approx(0.25)
    assert (many.n, many.clusters) == (30, 3)


def test_no_difference() -> None:
    found = statistics.paired([1, 0] * 20, [1, 0] * 20, [str(row) for row in range(40)])
    assert (found.value, found.p, found.p_worse) == (0.0, 1.0, 1.0)
    assert found.low < 0 < found.high


def test_interval_and_p_of_a_difference_agree() -> None:
    draws = np.random.default_rng(2)
    before = draws.integers(0, 5, 1000) / 4
    for shift in (0.0, 0.02, 0.04, 0.08):
        now = np.where(draws.random(1000) < shift, 0, before)
        found = statistics.paired(now, before, [str(row // 2) for row in range(1000)])
        assert (found.high < 0) == (found.p < 0.05)


def test_nothing_to_compare_is_refused() -> None:
    with pytest.raises(ValueError, match="no rows"):
        statistics.paired([], [], [])


def test_golden() -> None:
    draws = np.random.default_rng(3)
    now, before = draws.integers(0, 5, (2, 90)) / 4
    groups = [str(row // 4) for row in range(90)]
    output = [
        list(statistics.mean_interval(now, groups)),
        list(statistics.mean_interval(now * 200, groups, bounded=False)),
        list(statistics.mean_interval([1] * 30, groups[:30])),
        list(statistics.paired(now, before, groups)),
        list(statistics.paired(now**2, before / 3, groups)),
    ]
    check_golden("statistics", statistics.VERSION, output)
