"""Algorithms that compare an episode with others, by its returns R, and have the clip of PPO or none.

`clipped(ratio A)` is the loss of the base class: `min(ratio A, clip(ratio, 1 - eps_clip, 1 + eps_clip_higher) A)`.
"""

from collections.abc import Sequence

import numpy as np

from configs.algorithm_parts import Advantage
from tasks.train.advantages import Estimated, Observed, against_group, compare, normalise
from tasks.train.algorithms.algorithm import Algorithm, Assignment, by_episode
from tasks.train.components import LossInputs, LossOutputs, Normaliser
from tasks.train.samples import Floats, Sample


class GRPO(Algorithm):
    """GRPO: advantages in units of the group's spread, and the mean over episodes of the mean over each one's tokens.

        A = (R - mean(R)) / std(R)
        loss = 1/episodes sum 1/|o| sum_t [ -clipped(ratio A) + kl_ctl KL(policy ‖ version 0) ]

    Source: arXiv 2402.03300, equations 3 and 4, with the k3 estimate of the KL.

    Example: returns -1, -1, 1, 1 of a group give A = -1, -1, 1, 1; returns -1, -1, 2 give -0.71, -0.71, 1.41.
    """

    per: Normaliser = "episodes"

    def assign(self, samples: Sequence[Sample], observed: Sequence[Observed]) -> Assignment:
        return self.share(against_group(samples, observed, scale_by_std=True), by_episode(samples))


class DrGRPO(Algorithm):
    """Dr. GRPO: GRPO without the divisions that favour easy and hard problems, and long wrong answers.

        A = R - mean(R)
        loss = 1/episodes sum 1/L sum_t -clipped(ratio A),   L = sampling.max_new_tokens

    Source: arXiv 2503.20783, section 3.2.

    Example: returns -1, -1, -1, 1 of a group give A = -0.5, -0.5, -0.5, 1.5. With L = 100, a wrong answer of 50 tokens
    has twice the loss of one of 25.
    """

    per: Normaliser = "episodes"

    def assign(self, samples: Sequence[Sample], observed: Sequence[Observed]) -> Assignment:
        weights = [np.full(len(sample.actions), 1 / self.max_new_tokens) for sample in samples]
        return self.share(against_group(samples, observed), weights)


class DAPO(Algorithm):
    """DAPO: a clip that is wider above, so that rare tokens can become likely, and the mean over all tokens.

        A = (R - mean(R)) / std(R)
        loss = mean over tokens of -clipped(ratio A)

    Source: arXiv 2503.14476, equation 8. Its dynamic sampling is `rollout.reject_equal`, which is required; its soft
    punishment of long answers is `reward.overlong_tokens`. Only a scorer that repeats the environment's verdict is
    known while episodes are played: with a judge no group is replaced, and a group whose rewards agree has advantages
    of 0.

    Example: A = 1 and ratio 1.25 give -1.25, where a clip of 0.2 gives -1.2 and no gradient.
    """

    def assign(self, samples: Sequence[Sample], observed: Sequence[Observed]) -> Assignment:
        return self.share(against_group(samples, observed, scale_by_std=True))


class RLOO(Algorithm):
    """RLOO: REINFORCE on whole episodes, each compared with the mean of the others of its group.

        A = R - (sum of the others' R) / (n - 1),   R with -kl_ctl log(policy / version 0) of each token
        loss = 1/episodes sum sum_t -A logp

    Source: arXiv 2402.14740, equation 6, with the KL in the reward (k1). Nothing corrects for the steps of an update
    after its first one: the paper takes one for each batch (`train.minibatches=1`).

    Example: returns -1, 1, 1 of a group give A = -2, 1, 1.
    """

    per: Normaliser = "episodes"

    def assign(self, samples: Sequence[Sample], observed: Sequence[Observed]) -> Assignment:
        return self.share(against_group(samples, observed, leave_one_out=True))

    def loss(self, inputs: LossInputs) -> LossOutputs:
        return LossOutputs(-inputs.advantages * inputs.logp)


class MaxRL(Algorithm):
    """MaxRL: the gradient of the log of the success rate, which weighs hard problems as maximum likelihood does.

        A = (s - p) / p,   p = mean(s) over the group; 0 where nothing is right
        loss = mean over tokens of -clipped(ratio A)

    s is 1 for the tokens of a turn if it or a later one is right, and p its mean over the episodes that are compared.
    Source: arXiv 2602.02710, equation 10, with the policy loss of GRPO.

    Example: one right answer of four gives A = 3 to it and -1 to the others; three of four give 0.33 and -1.
    """

    def assign(self, samples: Sequence[Sample], observed: Sequence[Observed]) -> Assignment:
        successes, advantages = [_right_ahead(sample) for sample in samples], list[Floats]()
        for sample, of_turns, centred in zip(samples, successes, compare(samples, successes, Advantage()), strict=True):
            rate = of_turns[sample.turn_of_action] - centred  # p
            advantages.append(np.divide(centred, rate, out=np.zeros(len(rate)), where=rate > 1e-9))
        return self.share(advantages)


class ReinforcePP(Algorithm):
    """REINFORCE++: returns of tokens, normalised over the whole batch in place of a baseline, and the clip of PPO.

        R_t = R - kl_ctl sum_{i >= t} log(policy_i / version 0_i),   A = (R_t - mean) / (std + 1e-5) over the batch
        loss = mean over tokens of -clipped(ratio A)

    Source: arXiv 2501.03262, equations 8 to 10. R is the return of the token's turn. The KL of turns that it could
    cause counts, too, and not that of other candidates of its request.

    Example: one token each with returns -1, 1, 1 gives A = -1.41, 0.71, 0.71.
    """

    def assign(self, samples: Sequence[Sample], observed: Sequence[Observed]) -> Assignment:
        returns = [
            sample.returns[sample.turn_of_action] + _penalties_ahead(sample, given)
            for sample, given in zip(samples, observed, strict=True)
        ]
        return self.share(normalise(samples, Estimated(returns), Advantage(normalisation="batch", bound=None)))


def _right_ahead(sample: Sample) -> Floats:
    """Return for each turn [K] whether it, or one that the agent got after it, is right."""
    position = sample.causes.position
    right = position[sample.graded & (sample.successes > 0.5)]
    return (position <= (right.max() if right.size else -1)).astype(np.float64)


def _penalties_ahead(sample: Sample, given: Observed) -> Floats:
    """Sum up for each token [A] its penalty, those of later tokens of its turn, and of turns that it could cause."""
    ahead, turns = np.cumsum(given.penalties[::-1])[::-1], sample.turn_of_action
    if sample.causes.is_chain:
        return ahead
    firsts = np.searchsorted(turns, turns)
    caused = sample.causes.returns(np.zeros(len(sample.rewards)), given.turn_penalties(sample), 1.0, 0.0)
    return ahead - ahead[firsts] + caused[turns]
