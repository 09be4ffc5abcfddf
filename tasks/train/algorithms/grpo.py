"""GRPO: advantages in units of the group's spread, and the mean over episodes of the mean over each one's tokens.

    A = (R - mean(R)) / std(R)
    loss = 1/episodes sum 1/|o| sum_t [ -min(ratio A, clip(ratio, 1 ± eps_clip) A) + kl_ctl KL(policy ‖ version 0) ]

Source: arXiv 2402.03300, equations 3 and 4, with the k3 estimate of the KL.

Example: returns -1, -1, 1, 1 of a group give A = -1, -1, 1, 1; returns -1, -1, -1, 1 give -0.58, -0.58, -0.58, 1.73.
"""

from collections.abc import Sequence

from configs import algorithms
from tasks.train.advantages import Observed, against_group
from tasks.train.algorithms.algorithm import Algorithm, Assignment, by_episode
from tasks.train.components import Normaliser
from tasks.train.samples import Sample


class GRPO(Algorithm):
    knobs: algorithms.GRPO
    per: Normaliser = "sequences"

    def assign(self, samples: Sequence[Sample], observed: Sequence[Observed]) -> Assignment:
        return self.share(against_group(samples, observed, scale_by_std=True), by_episode(samples))
