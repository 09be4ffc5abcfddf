"""CISPO: the ratio, up to a cap, is a constant weight of the log-likelihood, so that every token keeps its gradient.

    A = (R - mean(R)) / std(R)
    loss = mean over tokens of -stop(min(ratio, cap)) A logp

Source: MiniMax-M1 (arXiv 2506.13585), equations 4 and 5, where only the upper limit is used; the cap is ScaleRL's
(2510.13786).

Example: A = 1, ratio 8 and logp = -2 give 5 * 2 = 10, with the gradient -5 for logp; PPO's clip gives no gradient.
"""

from collections.abc import Sequence

from configs import algorithms
from tasks.train.advantages import Observed, against_group
from tasks.train.algorithms.algorithm import Algorithm, Assignment
from tasks.train.components import LossInputs, LossOutputs
from tasks.train.samples import Sample


class CISPO(Algorithm):
    knobs: algorithms.CISPO

    def assign(self, samples: Sequence[Sample], observed: Sequence[Observed]) -> Assignment:
        return self.share(against_group(samples, observed, scale_by_std=True))

    def loss(self, inputs: LossInputs) -> LossOutputs:
        ratio = (inputs.logp - inputs.behaviour).exp().detach()
        weight = ratio.clamp(max=self.knobs.cap)
        return LossOutputs(-weight * inputs.advantages * inputs.logp, {"ratio": ratio, "clipped": ratio > weight})
