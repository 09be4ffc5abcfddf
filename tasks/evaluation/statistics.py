"""Proportions, differences and their 95 % intervals (scipy does the statistics)."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

CONFIDENCE = 0.95
_RESAMPLES = 9999


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number and its 95 % interval."""

    value: float
    low: float
    high: float

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def proportion(successes: Sequence[float]) -> Estimate:
    """Share of ones with Wilson's interval (Wilson 1927)."""
    from scipy.stats import binomtest

    if not successes:
        raise ValueError("a proportion needs at least one observation")
    count = int(sum(successes))
    interval = binomtest(count, len(successes)).proportion_ci(CONFIDENCE, method="wilson")
    return Estimate(count / len(successes), float(interval.low), float(interval.high))


def paired_difference(before: Sequence[float], after: Sequence[float], seed: int = 0) -> Estimate:
    """Mean of after - before on the same problems, with the percentile bootstrap over problems (Efron 1979)."""
    from scipy.stats import bootstrap

    differences = np.asarray(after, dtype=float) - np.asarray(before, dtype=float)
    mean = float(differences.mean())
    if np.ptp(differences) == 0:  # every resample is the same
        return Estimate(mean, mean, mean)
    result = bootstrap(
        (differences,),
        np.mean,
        confidence_level=CONFIDENCE,
        n_resamples=_RESAMPLES,
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    interval = result.confidence_interval
    return Estimate(mean, float(interval.low), float(interval.high))
