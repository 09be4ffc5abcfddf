"""MaxRL: the gradient of the log of the success rate, which gives hard problems as much weight as maximum likelihood.

    A = (s - p) / p,   p = mean(s) over the group; 0 where nothing is right
    loss = mean over tokens of -min(ratio A, clip(ratio, 1 ± eps_clip) A)

s is 1 for the tokens of a turn if it or a later one is right, and p its mean over the episodes that are compared.
Source: arXiv 2602.02710, equation 10, with the policy loss of GRPO.

Example: one right answer of four gives A = 3 to it and -1 to the others; three of four give 0.33 and -1.
"""

from collections.abc import Sequence

import numpy as np

from configs import algorithms
from tasks.train.advantages import Observed, compare
from tasks.train.algorithms.algorithm import Algorithm, Assignment
from tasks.train.samples import Floats, Sample


class MaxRL(Algorithm):
    knobs: algorithms.MaxRL

    def assign(self, samples: Sequence[Sample], observed: Sequence[Observed]) -> Assignment:
        successes, advantages = [_ahead(sample) for sample in samples], list[Floats]()
        for sample, of_turns, centred in zip(
            samples, successes, compare(samples, successes, algorithms.Advantage()), strict=True
        ):
            rate = of_turns[sample.turn_of_action] - centred  # p
            advantages.append(np.divide(centred, rate, out=np.zeros(len(rate)), where=rate > 1e-9))
        return self.share(advantages)


def _ahead(sample: Sample) -> Floats:
    """Return for each turn [K] whether it, or one that the agent got after it, is right."""
    position = sample.causes.position
    right = position[sample.graded & (sample.successes > 0.5)]
    return (position <= (right.max() if right.size else -1)).astype(np.float64)
