"""Masked importance sampling: a token that trainer and sampler disagree about, in either direction, has no loss.

    A = R - mean(R)
    loss = mean over tokens of -ratio A if floor <= ratio <= cap, else 0

With `level: sequence` the geometric mean of the ratios decides for all tokens of a sequence. Masked tokens count in
the mean. Source: IcePop (Ling team, "Small leak can sink a great ship", 2025); sequence masks: Liu et al., "When speed
kills stability" (2025).

Example: A = 1 and ratios 0.4, 1.1 and 6 give 0, -1.1 and 0. Their geometric mean is 1.38, so with `sequence` all count.
"""

from collections.abc import Sequence

from configs import algorithms
from tasks.train.advantages import Observed, against_group
from tasks.train.algorithms.algorithm import Algorithm, Assignment
from tasks.train.components import LossInputs, LossOutputs
from tasks.train.losses import sequence_means
from tasks.train.samples import Sample


class MIS(Algorithm):
    knobs: algorithms.MIS

    def assign(self, samples: Sequence[Sample], observed: Sequence[Observed]) -> Assignment:
        return self.share(against_group(samples, observed))

    def loss(self, inputs: LossInputs) -> LossOutputs:
        log_ratio = inputs.logp - inputs.behaviour
        ratio = log_ratio.exp()
        decides = ratio if self.knobs.level == "token" else sequence_means(log_ratio, inputs.sequences).exp()
        kept = (decides >= self.knobs.floor) & (decides <= self.knobs.cap)
        # A product with 0 would be NaN where the ratio overflows.
        loss = -inputs.advantages * log_ratio.where(kept, 0.0).exp() * kept
        return LossOutputs(loss, {"ratio": ratio.detach(), "clipped": ~kept})
