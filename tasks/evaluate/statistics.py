"""Proportions, means, differences, pass@k and their uncertainty (scipy does the statistics)."""

import math
from collections.abc import Sequence
from math import comb
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

CONFIDENCE = 0.95
_RESAMPLES = 9999
_FINEST = 120  # steps of a difference of means between 0 and 1
_BATCH = 50  # resamples in memory at a time; more are slower, since they do not fit into the processor's cache


class Estimate(NamedTuple):
    """A number and its 95 % interval."""

    value: float
    low: float
    high: float


def proportion(successes: Sequence[float]) -> Estimate:
    """Compute the share of ones with Wilson's interval (Wilson 1927).

    Raises:
        ValueError: there is no observation.
    """
    from scipy.stats import binomtest

    count = int(sum(successes))
    interval = binomtest(count, len(successes)).proportion_ci(CONFIDENCE, method="wilson")
    return Estimate(count / len(successes), float(interval.low), float(interval.high))


def mean(values: Sequence[float], weights: Sequence[float] | None = None) -> Estimate:
    """Compute the mean of one value for each problem, with the percentile bootstrap over problems (Efron 1979).

    Args:
        values: one for each problem, in any unit.
        weights: the weight of each value, above 0; None: equal weights.
    """
    from scipy.stats import bootstrap

    data = np.asarray(values, dtype=float)
    weighting = np.ones_like(data) if weights is None else np.asarray(weights, dtype=float)
    value = float(_weighted_mean(data, weighting))
    if np.ptp(data) == 0:  # every resample is the same
        return Estimate(value, value, value)
    interval = bootstrap(
        [data, weighting],
        _weighted_mean,
        paired=True,
        confidence_level=CONFIDENCE,
        n_resamples=_RESAMPLES,
        batch=_BATCH,
        method="percentile",
        rng=np.random.default_rng(0),  # the same values always have the same interval
    ).confidence_interval
    return Estimate(value, float(interval.low), float(interval.high))


def _weighted_mean(values: npt.NDArray[np.float64], weights: npt.NDArray[np.float64], axis: int = -1) -> Any:
    return (values * weights).sum(axis=axis) / weights.sum(axis=axis)


def paired_difference(before: Sequence[float], after: Sequence[float]) -> Estimate:
    """Compute the mean of after - before on the same problems, in the same order, with the interval of `mean`.

    Raises:
        ValueError: the numbers before and after differ.
    """
    return mean([new - old for old, new in zip(before, after, strict=True)])


def pass_at_k(n: int, c: int, k: int) -> float:
    """Compute the probability that k of n episodes, drawn without replacement, include one of the c successes.

    1 - C(n-c, k) / C(n, k), unbiased (Chen et al. 2021, arXiv 2107.03374, equation 1).
    """
    return (comb(n, k) - comb(n - c, k)) / comb(n, k)  # integers until the division, so it is rounded once


def sign_flip(before: Sequence[float], after: Sequence[float]) -> float:
    """Compute the exact two-sided p of the paired permutation test, which flips signs of differences (Fisher 1935).

    The differences are taken in steps of 1/n, for the smallest n up to 120 of which all are multiples, as those of
    means of n episodes are; otherwise they are rounded to steps of 1/120. If all values are 0 or 1, the test is
    McNemar's exact test (1947): among the pairs that differ, as many are won as lost. The distribution of the sum is
    exact: drawn permutations would have a least p, 0.0002 with 9,999 of them, but late looks of the gate ask for less.

    Args:
        before: mean success of each problem, 0 to 1.
        after: the same for the same problems, in the same order.
    """
    differences = np.subtract(after, before)
    for n in range(1, _FINEST + 1):
        steps = np.rint(differences * n).astype(np.int64)
        if np.allclose(steps, differences * n, rtol=0, atol=1e-9):
            break
    chance = np.ones(1)  # of each sum -total, …, total of the steps so far, with random signs
    for step in np.abs(steps[steps != 0]):
        chance = (np.pad(chance, (0, 2 * step)) + np.pad(chance, (2 * step, 0))) / 2
    sums = np.arange(len(chance)) - len(chance) // 2
    return float(min(1.0, chance[np.abs(sums) >= abs(steps.sum())].sum()))


def paired_means(before: Sequence[float], after: Sequence[float]) -> Estimate:
    """Compute the mean difference after - before of values from 0 to 1, with the adjusted Wald interval.

    The interval adds one pair that was won and one that was lost, so it is valid even if few pairs differ, or none: for
    10 pairs without a difference it is -0.23 to 0.23. Source: for values 0 and 1, Bonett and Price (2012), Journal of
    Educational and Behavioral Statistics 37, 479-488.

    Raises:
        ValueError: the numbers before and after differ.
    """
    from scipy.stats import norm

    differences = [new - old for old, new in zip(before, after, strict=True)]
    adjusted = np.array([*differences, 1.0, -1.0])
    centre = adjusted.mean()
    spread = float(norm.ppf(0.5 + CONFIDENCE / 2)) * adjusted.std() / math.sqrt(len(adjusted))
    return Estimate(float(np.mean(differences)), float(max(-1, centre - spread)), float(min(1, centre + spread)))


def paired_proportions(only_before: int, only_after: int, pairs: int) -> Estimate:
    """Compute the difference after - before of two proportions of the same `pairs`, with its score interval.

    The interval is valid even if few pairs differ. If none differs, a bootstrap interval has width 0, but this interval
    is -0.28 to 0.28 for 10 pairs. Source: Tango (1998), Statistics in Medicine 17, 891-908.

    Args:
        only_before: number of pairs in which only the first succeeded.
        only_after: number of pairs in which only the second succeeded.
        pairs: number of all pairs, 1 or more.
    """
    from scipy.optimize import brentq
    from scipy.stats import norm

    z, edge = float(norm.ppf(0.5 + CONFIDENCE / 2)), 1 - 1e-9

    def score(delta: float) -> float:
        b = (2 * pairs - only_after + only_before) * delta - only_after - only_before
        c = -only_before * delta * (1 - delta)
        lost = (math.sqrt(max(0.0, b * b - 8 * pairs * c)) - b) / (4 * pairs)  # most likely only_before under delta
        variance = pairs * (2 * lost + delta * (1 - delta))
        return (only_after - only_before - pairs * delta) / math.sqrt(max(variance, 1e-12))

    low = brentq(lambda delta: score(delta) - z, -edge, edge) if score(-edge) > z else -1.0
    high = brentq(lambda delta: score(delta) + z, -edge, edge) if score(edge) < -z else 1.0
    return Estimate((only_after - only_before) / pairs, float(low), float(high))
