"""The input and the output of an advantage estimator."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from configs.train import Advantage
from tasks.train.samples import Floats, Sample


@dataclass(frozen=True, slots=True)
class Observed:
    """The data about the A action tokens of one sample, in addition to the turns' rewards.

    Example: Observed(penalties=[0.0, -0.1], values=[0.4, 0.5], bootstrap=0.0)
    """

    penalties: Floats  # A, rewards of single tokens: minus the KL penalty, or 0 without one
    values: Floats | None = None  # A, the critic's value before each token, in units of returns
    bootstrap: float = 0.0  # return after the last turn: 0 if the episode ended, an estimate if it was cut

    def turn_penalties(self, sample: Sample) -> Floats:
        """Return the sum of the penalties [K] of each turn's tokens."""
        return np.bincount(sample.turn_of_action, self.penalties, len(sample.rewards)).astype(np.float64)


@dataclass(frozen=True, slots=True)
class Estimated:
    """The advantages and returns of N samples: for each sample an array [A]."""

    advantages: list[Floats]  # N arrays [A]
    returns: list[Floats] | None = None  # N arrays [A], the targets of the critic
    centred: bool = False  # the advantages are already centred by group: normalisation must not shift them again
    of_penalties: list[Floats] | None = None  # N arrays [A], added to the advantages after normalisation


Estimator = Callable[[Sequence[Sample], Sequence[Observed], Advantage], Estimated]
"""A function of N samples, the N `Observed`, and the knobs."""
