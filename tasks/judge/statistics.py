"""Give every number an interval and every comparison a paired test; rows of one group (one prompt) are one cluster.

Nothing is drawn at random, so the same rows give the same numbers everywhere. Intervals hold 95 %.
"""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

    Floats = NDArray[np.float64]

VERSION = 1

LEVEL = 0.95
Z = NormalDist().inv_cdf((1 + LEVEL) / 2)

_NORMAL_FROM = 2000  # degrees of freedom from which Student's t is taken as normal (the quantile differs by 0.06 %)
_GRID = 2**15  # steps that cluster sums are rounded to where they are no multiples of 1/4
_ZERO = 1e-18  # a variance of rounding errors


class Interval(NamedTuple):
    """Hold a mean and its interval; all None where there are no rows."""

    value: float | None
    low: float | None
    high: float | None
    n: int
    clusters: int


class Difference(NamedTuple):
    """Hold a mean paired difference (now - before), its interval, and p values of the sign-flip test.

    `p` is two-sided; `p_worse` is one-sided, small where now is worse.
    """

    value: float
    low: float
    high: float
    p: float
    p_worse: float
    n: int
    clusters: int


def wilson(share: float, n: float, z: float = Z) -> tuple[float, float]:
    """Give Wilson's score interval of a share (Wilson 1927; Newcombe 1998, method 3); `n` may be an effective size."""
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return (max(0.0, middle - half) if share > 0 else 0.0, min(1.0, middle + half) if share < 1 else 1.0)


def mean_interval(values: ArrayLike, groups: Sequence[str], *, bounded: bool = True) -> Interval:
    """Give the mean of one value a row and its interval, clustered by group; `bounded` says the values lie in 0 … 1."""
    _, cluster = np.unique(np.asarray(groups, dtype=str), return_inverse=True)
    numbers = np.asarray(values, dtype=np.float64)
    return clustered(np.bincount(cluster, numbers), np.bincount(cluster), bounded=bounded)


def clustered(sums: ArrayLike, sizes: ArrayLike, *, bounded: bool = True) -> Interval:
    """Give the mean over all rows and its interval, from each cluster's sum of values and number of rows.

    The variance is that of a mean of clusters drawn at random (linearised, as Miller 2024, arXiv 2411.00640, section
    2.2, uses it, with the factor G / (G - 1)). `bounded`: Wilson's interval at the effective sample size, the rows
    divided by the design effect, corrected for few clusters by (t_{n-1} / t_{G-1})^2 (Korn and Graubard 1998, Survey
    Methodology 24(2), with Wilson's interval as in Dean and Pagano 2015, J. Surv. Stat. Methodol. 3(4)). For
    0/1 values in clusters of one this is Wilson's interval exactly, so 30 of 30 has a width. Else: Student's t with
    G - 1 degrees of freedom.
    """
    total, rows = np.asarray(sums, dtype=np.float64), np.asarray(sizes, dtype=np.float64)
    total, rows = total[rows > 0], rows[rows > 0]
    n, clusters = int(rows.sum()), len(rows)
    if n == 0:
        return Interval(None, None, None, 0, 0)
    mean = float(total.sum() / n)
    variance = _variance(total - mean * rows, n)
    if bounded:
        mean = min(1.0, max(0.0, mean))
        return Interval(mean, *wilson(mean, _effective(mean, variance, n, clusters)), n, clusters)
    if clusters < 2:
        return Interval(mean, None, None, n, clusters)
    half = t_quantile(clusters - 1) * math.sqrt(variance)
    return Interval(mean, mean - half, mean + half, n, clusters)


def _variance(residuals: Floats, n: int) -> float:
    clusters = len(residuals)
    return float((residuals**2).sum()) / n**2 * clusters / (clusters - 1) if clusters > 1 else 0.0


def _effective(mean: float, variance: float, n: int, clusters: int) -> float:
    """Count the independent 0/1 rows that would tell as much.

    Rows that all agree show no variance. There the size is what one unseen dissenting cluster would leave, at least
    the number of clusters (all right, all wrong). It bounds the size elsewhere too, where it is above the rows.
    """
    if clusters == 1:
        return 1.0
    rarer, commoner = min(mean, 1 - mean), max(mean, 1 - mean)
    one_unseen = clusters**2 * rarer / commoner
    if variance <= _ZERO:
        return max(float(clusters), one_unseen) * _few(n, clusters)
    return min(n / (n - 1) * rarer * commoner / variance, max(float(n), one_unseen)) * _few(n, clusters)


def _few(n: int, clusters: int) -> float:
    return (t_quantile(n - 1) / t_quantile(clusters - 1)) ** 2


@lru_cache(maxsize=4096)
def t_quantile(df: int) -> float:
    """Give the two-sided 95 % quantile of Student's t, by bisection of its distribution."""
    if df >= _NORMAL_FROM:
        return Z
    low, high = Z, 16.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_inside(middle, df) < LEVEL else (low, middle)
    return (low + high) / 2


def _t_inside(t: float, df: int) -> float:
    """Give P(|T| < t) for whole degrees of freedom (Abramowitz and Stegun 1964, 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(df))
    cosine = math.cos(angle)
    odd = df % 2
    steps = np.arange(1, (df - 2 - odd) // 2 + 1)
    ratios = (2 * steps - 1 + odd) / (2 * steps + odd) * cosine**2
    series = 1.0 + float(np.cumprod(ratios).sum())
    if not odd:
        return math.sin(angle) * series
    return 2 / math.pi * (angle + (math.sin(angle) * cosine * series if df > 1 else 0.0))


def paired(now: ArrayLike, before: ArrayLike, groups: Sequence[str]) -> Difference:
    """Compare two checkpoints on the same rows, clustered by group; values lie in 0 … 1.

    The interval is mean difference ± t_{G-1} standard errors, clustered as in `clustered`; rows that all differ by the
    same amount get the standard error that one dissenting cluster would give, 1/G. The p values are those of the
    sign-flip test over clusters (Fisher 1935), enumerated exactly by convolution (Pagano and Tritchler 1983,
    JASA 78). For 0/1 values in clusters of one that is McNemar's exact test.
    Raises ValueError without rows.
    """
    difference = np.asarray(now, dtype=np.float64) - np.asarray(before, dtype=np.float64)
    if not len(difference):
        raise ValueError("no rows to compare")
    _, cluster = np.unique(np.asarray(groups, dtype=str), return_inverse=True)
    sums, sizes = np.bincount(cluster, difference), np.bincount(cluster)
    n, clusters = len(difference), len(sums)
    mean = float(sums.sum() / n)
    variance = _variance(sums - mean * sizes, n)
    error = math.sqrt(variance) if variance > _ZERO else 1 / clusters
    half = t_quantile(clusters - 1) * error if clusters > 1 else 2.0
    return Difference(mean, max(-1.0, mean - half), min(1.0, mean + half), *sign_flip(sums), n, clusters)


def sign_flip(sums: ArrayLike) -> tuple[float, float]:
    """Test that cluster sums are symmetric around 0; give p two-sided and p that the total is this low.

    Exact for multiples of 1/4, as pair scores are; others are rounded to 2^-15 of the sum of their sizes.
    """
    whole = _whole(np.asarray(sums, dtype=np.float64))
    sizes = np.abs(whole)
    most, total = int(sizes.sum()), int(whole.sum())
    chances = np.ones(1)
    for size in sizes[sizes > 0].tolist():  # chances[k]: that the positive ones sum to k
        chances = 0.5 * (np.pad(chances, (0, size)) + np.pad(chances, (size, 0)))
    lower = float(chances[: (total + most) // 2 + 1].sum())
    tail = float(chances[: (most - abs(total)) // 2 + 1].sum())
    return min(1.0, 2 * tail if total else 1.0), min(1.0, lower)


def _whole(sums: Floats) -> NDArray[np.int64]:
    quarters = np.rint(sums * 4)
    if np.abs(sums * 4 - quarters).max(initial=0.0) < 1e-6:
        whole = quarters.astype(np.int64)
    else:
        whole = np.rint(sums / np.abs(sums).sum() * _GRID).astype(np.int64)
    return whole // max(1, int(np.gcd.reduce(np.abs(whole))))
