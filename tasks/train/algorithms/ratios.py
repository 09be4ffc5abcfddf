"""Algorithms that limit a ratio in another way than the clip of PPO does for single tokens."""

import math
from collections.abc import Sequence

import torch

from configs import algorithms
from tasks.train.advantages import Observed, against_group
from tasks.train.algorithms.algorithm import Algorithm, Assignment, by_episode
from tasks.train.components import LossInputs, LossOutputs, Normaliser, behaviour_weights, policy_loss, sequence_means
from tasks.train.samples import Floats, Sample


class GSPO(Algorithm):
    """GSPO: one ratio for all tokens of a sequence, because the reward is given to the sequence.

        s = (policy(sequence) / proximal(sequence))^(1/|o|) = exp(mean_t (logp_t - proximal_t))
        w = min(5, (proximal(sequence) / sampling(sequence))^(1/|o|))
        loss = 1/episodes sum 1/|o| sum_t -w min(s A, clip(s, 1 - eps_clip, 1 + eps_clip_higher) A)

    The proximal policy has the weights before the update, as the paper's old policy. The engine's logprobs of the same
    weights differ from the trainer's by rounding, in half precision by more than these limits: so they are in w, which
    nothing clips at 1. A sequence is one of those that a trajectory has: all turns, unless its history was rewritten.
    With `gspo_token` the gradient of each token is its own: s_t = s * policy_t / stop(policy_t), with s constant. So it
    differs where the tokens of a sequence have different advantages, as turns do.
    Source: arXiv 2507.18071, equations 5 to 7, and 13 and 14.

    Example: log ratios 0.2 and -0.1 of a sequence give s = exp(0.05) = 1.051, which the default clip lowers to 1.0004.
    With A < 0 nothing lowers it up to c_clip.
    """

    knobs: algorithms.GSPO
    per: Normaliser = "episodes"
    recomputes = True

    def assign(self, samples: Sequence[Sample], observed: Sequence[Observed]) -> Assignment:
        return self.share(against_group(samples, observed, scale_by_std=True), by_episode(samples))

    def loss(self, inputs: LossInputs) -> LossOutputs:
        weight = behaviour_weights(inputs.proximal, inputs.behaviour, inputs.sequences, cap=5.0, level="sequence")
        log_ratio = sequence_means(inputs.logp - inputs.proximal, inputs.sequences)
        if self.knobs.type == "gspo_token":
            log_ratio = log_ratio.detach() + inputs.logp - inputs.logp.detach()
        clips = self.knobs.eps_clip, self.knobs.eps_clip_higher, self.knobs.c_clip
        return policy_loss(log_ratio, torch.zeros_like(log_ratio), weight, inputs.advantages, *clips)


class CISPO(Algorithm):
    """CISPO: the ratio, up to a cap, is a constant weight of the log-likelihood, so every token keeps its gradient.

        A = (R - mean(R)) / std(R)
        loss = mean over tokens of -stop(min(ratio, cap)) A logp

    Source: MiniMax-M1 (arXiv 2506.13585), equations 4 and 5, where only the upper limit is used; the cap is ScaleRL's
    (2510.13786).

    Example: A = 1, ratio 8 and logp = -2 give 5 * 2 = 10, with the gradient -5 for logp; PPO's clip gives no gradient.
    """

    knobs: algorithms.CISPO

    def assign(self, samples: Sequence[Sample], observed: Sequence[Observed]) -> Assignment:
        return self.share(against_group(samples, observed, scale_by_std=True))

    def loss(self, inputs: LossInputs) -> LossOutputs:
        ratio = (inputs.logp - inputs.behaviour).exp().detach()
        weight = ratio.clamp(max=self.knobs.cap)
        return LossOutputs(-weight * inputs.advantages * inputs.logp, {"ratio": ratio, "clipped": ratio > weight})


class MIS(Algorithm):
    """Masked importance sampling: a token on which trainer and sampler disagree, in either direction, has no loss.

        A = R - mean(R)
        loss = mean over tokens of -ratio A if floor <= ratio <= cap, else 0

    With `level: sequence` the geometric mean of the ratios decides for all tokens of a sequence. Masked tokens count in
    the mean. Source: IcePop (Ling team, "Small leak can sink a great ship", 2025); sequence masks: Liu et al., "When
    speed kills stability" (2025).

    Example: A = 1 and ratios 0.4, 1.1 and 6 give 0, -1.1 and 0. Their geometric mean is 1.38, so with `sequence` all
    count.
    """

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


class OPD(Algorithm):
    """On-policy distillation: the policy plays, and a teacher says of each token how much likelier it finds it.

        A = log teacher - log behaviour
        loss = mean over tokens of -min(ratio, c_clip) A

    The mean of -A over the policy's own tokens is the reverse KL(policy ‖ teacher), whose gradient this is; rewards do
    not count. Source: arXiv 2306.13649 (GKD); in this form: Thinking Machines, "On-policy distillation" (2025).

    Example: a token with probability 0.5 when sampled, to which the teacher gives 0.9, has A = log 1.8 = 0.59.
    """

    knobs: algorithms.OPD

    def assign(self, samples: Sequence[Sample], observed: Sequence[Observed]) -> Assignment:
        advantages = list[Floats]()
        for sample, given in zip(samples, observed, strict=True):
            if given.teacher is None:
                raise ValueError("algorithm.type=opd needs a teacher: set models.teacher.checkpoint=RUN@N or .path")
            advantages.append(given.teacher.astype("float64") - sample.behaviour)
        return self.share(advantages)

    def loss(self, inputs: LossInputs) -> LossOutputs:
        log_ratio, most = inputs.logp - inputs.behaviour, math.log(self.knobs.c_clip or math.inf)
        ratio = log_ratio.clamp(max=most).exp()  # nothing overflows before it is clipped
        metrics = {"ratio": log_ratio.detach().exp(), "clipped": log_ratio > most, "teacher_kl": -inputs.advantages}
        return LossOutputs(-ratio * inputs.advantages, metrics)
