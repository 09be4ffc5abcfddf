"""GSPO: one ratio for all tokens of a sequence, because the reward is given to the sequence.

    s = (policy(sequence) / proximal(sequence))^(1/|o|) = exp(mean_t (logp_t - proximal_t))
    w = min(5, (proximal(sequence) / sampling(sequence))^(1/|o|))
    loss = 1/episodes sum 1/|o| sum_t -w min(s A, clip(s, 1 - eps_clip, 1 + eps_clip_higher) A)

The proximal policy has the weights before the update, as the paper's old policy. The engine's logprobs of the same
weights differ from the trainer's by rounding, in half precision by more than these limits: so they are in w, which
nothing clips at 1.

`gspo_token` has the same numbers, but the gradient of each token is its own: s_t = s * policy_t / stop(policy_t), with
s constant. So it differs where the tokens of a sequence have different advantages, as turns do.
A sequence is one of those that a trajectory has: all turns, unless its history was rewritten.
Source: arXiv 2507.18071, equations 5 to 7, 13 and 14.

Example: log ratios 0.2 and -0.1 of a sequence give s = exp(0.05) = 1.051, which the default clip lowers to 1.0004. With
A < 0 nothing lowers it up to c_clip.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from configs import algorithms
from tasks.train.advantages import Observed, against_group
from tasks.train.algorithms.algorithm import Algorithm, Assignment, by_episode
from tasks.train.components import LossInputs, LossOutputs, Normaliser, behaviour_weights, policy_loss, sequence_means
from tasks.train.samples import Sample

_CAP = 5.0


class GSPO(Algorithm):
    knobs: algorithms.GSPO
    per: Normaliser = "sequences"

    def assign(self, samples: Sequence[Sample], observed: Sequence[Observed]) -> Assignment:
        return self.share(against_group(samples, observed, scale_by_std=True), by_episode(samples))

    @property
    def recomputes(self) -> bool:
        return True

    def loss(self, inputs: LossInputs) -> LossOutputs:
        given = inputs.proximal, inputs.behaviour, inputs.sequences
        weight = behaviour_weights(*given, cap=_CAP, level="sequence")
        log_ratio = self.log_ratio(inputs, sequence_means(inputs.logp - inputs.proximal, inputs.sequences))
        clips = self.knobs.eps_clip, self.knobs.eps_clip_higher, self.knobs.c_clip
        return policy_loss(log_ratio, torch.zeros_like(log_ratio), weight, inputs.advantages, *clips)

    def log_ratio(self, inputs: LossInputs, of_sequence: Tensor) -> Tensor:
        return of_sequence


class GSPOToken(GSPO):
    def log_ratio(self, inputs: LossInputs, of_sequence: Tensor) -> Tensor:
        return of_sequence.detach() + inputs.logp - inputs.logp.detach()
