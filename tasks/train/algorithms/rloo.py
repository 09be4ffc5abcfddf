"""RLOO: REINFORCE on whole episodes, each compared with the mean of the others of its group.

    A = R - (sum of the others' R) / (n - 1),   R with -kl_ctl log(policy / version 0) of each token
    loss = 1/episodes sum sum_t -A logp

Source: arXiv 2402.14740, equation 6, with the KL in the reward (k1). Nothing corrects for the steps of an update after
its first one: the paper takes one for each batch (`train.minibatches=1`).

Example: returns -1, 1, 1 of a group give A = -2, 1, 1.
"""

from collections.abc import Sequence

from configs import algorithms
from tasks.train.advantages import Observed, against_group
from tasks.train.algorithms.algorithm import Algorithm, Assignment
from tasks.train.components import LossInputs, LossOutputs, Normaliser
from tasks.train.samples import Sample


class RLOO(Algorithm):
    knobs: algorithms.RLOO
    per: Normaliser = "sequences"

    def assign(self, samples: Sequence[Sample], observed: Sequence[Observed]) -> Assignment:
        return self.share(against_group(samples, observed, leave_one_out=True))

    def loss(self, inputs: LossInputs) -> LossOutputs:
        return LossOutputs(-inputs.advantages * inputs.logp)
