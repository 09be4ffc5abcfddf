"""Dr. GRPO: GRPO without the divisions that favour easy and hard problems, and long wrong answers.

    A = R - mean(R)
    loss = 1/episodes sum 1/L sum_t -min(ratio A, clip(ratio, 1 ± eps_clip) A),   L = sampling.max_new_tokens

Source: arXiv 2503.20783, section 3.2.

Example: returns -1, -1, -1, 1 of a group give A = -0.5, -0.5, -0.5, 1.5. With L = 100, a wrong answer of 50 tokens has
twice the loss of one of 25.
"""

from collections.abc import Sequence

import numpy as np

from configs import algorithms
from tasks.train.advantages import Observed, against_group
from tasks.train.algorithms.algorithm import Algorithm, Assignment
from tasks.train.components import Normaliser
from tasks.train.samples import Sample


class DrGRPO(Algorithm):
    knobs: algorithms.DrGRPO
    per: Normaliser = "sequences"

    def assign(self, samples: Sequence[Sample], observed: Sequence[Observed]) -> Assignment:
        weights = [np.full(len(sample.actions), 1 / self.max_new_tokens) for sample in samples]
        return self.share(against_group(samples, observed), weights)
