"""GSPO: one ratio for all tokens of a sequence, because the reward is given to the sequence.

    s = (policy(sequence) / sampling(sequence))^(1/|o|) = exp(mean_t (logp_t - behaviour_t))
    loss = 1/episodes sum 1/|o| sum_t -min(s A, clip(s, 1 - eps_clip, 1 + eps_clip_higher) A)

`gspo_token` has the same numbers, but the gradient of each token is its own: s_t = s * policy_t / stop(policy_t), with
s constant. So it differs where the tokens of a sequence have different advantages, as turns do.
A sequence is one of those that a trajectory has: all turns, unless its history was rewritten.
Source: arXiv 2507.18071, equations 5 to 7, 13 and 14.

Example: log ratios 0.2 and -0.1 of a sequence give s = exp(0.05) = 1.051, which the default clip lowers to 1.0004.
"""

from collections.abc import Sequence

from torch import Tensor

from configs import algorithms
from tasks.train.advantages import Observed, against_group
from tasks.train.algorithms.algorithm import Algorithm, Assignment, by_episode
from tasks.train.components import LossInputs, LossOutputs, Normaliser
from tasks.train.losses import clipped_objective, sequence_means
from tasks.train.samples import Sample


class GSPO(Algorithm):
    knobs: algorithms.GSPO
    per: Normaliser = "sequences"

    def assign(self, samples: Sequence[Sample], observed: Sequence[Observed]) -> Assignment:
        return self.share(against_group(samples, observed, scale_by_std=True), by_episode(samples))

    def loss(self, inputs: LossInputs) -> LossOutputs:
        log_ratio = self.log_ratio(inputs, sequence_means(inputs.logp - inputs.behaviour, inputs.sequences))
        clips = self.knobs.eps_clip, self.knobs.eps_clip_higher
        objective, is_clipped = clipped_objective(log_ratio.exp(), inputs.advantages, *clips)
        return LossOutputs(-objective, {"ratio": log_ratio.detach().exp(), "clipped": is_clipped})

    def log_ratio(self, inputs: LossInputs, of_sequence: Tensor) -> Tensor:
        return of_sequence


class GSPOToken(GSPO):
    def log_ratio(self, inputs: LossInputs, of_sequence: Tensor) -> Tensor:
        return of_sequence.detach() + inputs.logp - inputs.logp.detach()
