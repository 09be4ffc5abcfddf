"""The measurements of one side, and the checks that both sides did the same work."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median, variance

SURE = 5.0
"""Largest difference of the mean lengths, in standard errors."""
SLACK = 0.02
"""Further difference, as a share of the mean, because two trainings from one policy drift apart."""


@dataclass(frozen=True, slots=True)
class Side:
    """The counted rounds of one process.

    Example: Side([1.1, 1.0], {"generating": [0.4, 0.4]}, [6, 5, …], 1024, 4, 619328, ("float32",), 2, 0.01)
    """

    seconds: list[float]  # of each round
    parts: dict[str, list[float]]  # seconds of each round for some of the work in it
    lengths: list[int]  # sampled tokens of each episode, all rounds
    samples: int
    updates: int  # optimizer steps
    parameters: int
    dtypes: tuple[str, ...]
    threads: int  # of the trainer
    others: float  # share of the processors that other processes used meanwhile

    @property
    def typical(self) -> float:
        """Seconds of a round: the median."""
        return median(self.seconds)

    @property
    def tokens(self) -> float:
        """Mean sampled tokens of an episode."""
        return fmean(self.lengths)

    @property
    def counts(self) -> tuple[object, ...]:
        """The counts that must be equal on both sides."""
        return (len(self.seconds), self.samples, self.updates, self.parameters, self.dtypes, self.threads)


def check_same_work(theirs: Side, ours: Side) -> None:
    """Check that both sides did the same work.

    Raises:
        ValueError: rounds, samples, updates, parameters, number formats or threads differ, or the mean lengths differ
            by more than chance explains.
    """
    if theirs.counts != ours.counts:
        names = "rounds, samples, updates, parameters, dtypes, threads"
        raise ValueError(f"the sides did not do the same work ({names}): TRL {theirs.counts}, here {ours.counts}")
    error = math.sqrt(sum(variance(side.lengths) / len(side.lengths) for side in (theirs, ours)))
    if abs(theirs.tokens - ours.tokens) > SURE * error + SLACK * ours.tokens:
        raise ValueError(
            f"the mean numbers of sampled tokens differ by more than chance: TRL {theirs.tokens:.2f}, "
            f"here {ours.tokens:.2f}, standard error {error:.3f}"
        )


def ratios(pairs: Sequence[tuple[Side, Side]]) -> list[float]:
    """Return TRL's seconds of a round divided by ours, for each pair."""
    return [theirs.typical / ours.typical for theirs, ours in pairs]
