"""Algorithms whose loss is a weighted log-likelihood (component `ce`), and which need no logprobs of sampling.

`DPO` and `KTO` compare the policy with a reference policy. The gradients of their losses are those of a weighted
cross-entropy. So before each step a pass without gradient computes the weights, and the episodes of a pair may be in
other micro-batches, or on other ranks.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from configs import algorithms
from storage.grouping import grouped
from tasks.train.advantages import Observed
from tasks.train.algorithms.algorithm import Algorithm, Assignment, ByIndex, Reweighed
from tasks.train.components import Component, cross_entropy
from tasks.train.samples import Bools, Floats, Sample


class RFT(Algorithm):
    """Rejection sampling fine-tuning: cross-entropy on what was right. Repeated with new episodes: expert iteration.

        loss = mean over chosen tokens of -logp

    Chosen are turns that are right, and before them ungraded turns, such as calls of tools that led to a right answer;
    so a wrong first answer is not learnt from an episode that ended well. With `distinct`, of the episodes of a problem
    whose chosen tokens are the same only the first counts.
    Source: arXiv 2308.01825, section 3.2 (distinct reasoning paths); expert iteration: 1705.08439.

    Example: the turns wrong, call, right of an episode get the weights 0, 1, 1; the turns right, wrong get 1, 0.
    """

    knobs: algorithms.RFT
    uses = ()

    def assign(self, samples: Sequence[Sample], observed: Sequence[Observed]) -> Assignment:
        weights, seen = list[Floats](), set[tuple[str, bytes]]()
        for sample in samples:
            chosen = chosen_turns(sample)[sample.turn_of_action]
            key = sample.problem_id, sample.token_ids[sample.actions[chosen]].tobytes()
            weights.append((chosen & (not self.knobs.distinct or key not in seen)).astype(np.float64))
            seen.add(key)
        return Assignment([np.zeros(len(each)) for each in weights], {"ce": weights})


class DPO(Algorithm):
    """DPO: the better of two episodes of a problem becomes likelier than the worse, relative to a reference policy.

        z = beta [ (logp - ref)(better) - (logp - ref)(worse) ],   sums over the action tokens of an episode
        loss = mean over pairs of -log sigmoid(z)

    In each group the episode that earned most (`Sample.earned`) is paired with the one that earned least, the second
    with the second to last, and so on while they earned different amounts. The tokens of the better episode have the
    weight beta sigmoid(-z), those of the worse one its negative. Source: arXiv 2305.18290, equation 7.

    Example: beta = 0.1, (logp - ref) = 2 and -1: z = 0.3, loss 0.554, weights 0.1 * 0.426 and -0.1 * 0.426.
    """

    knobs: algorithms.DPO
    uses = ()
    needs_current = True

    def assign(self, samples: Sequence[Sample], observed: Sequence[Observed]) -> Assignment:
        weights = [np.zeros(len(sample.actions)) for sample in samples]
        for better, worse in pairs(dict(enumerate(samples))):
            weights[better][:], weights[worse][:] = 1.0, -1.0
        return Assignment([np.zeros(len(each)) for each in weights], {"ce": weights})

    def component(self, name: str) -> Component:
        return Component(cross_entropy, "episodes", 2.0)  # a pair has two

    def reweigh(self, samples: Mapping[int, Sample], current: ByIndex, reference: ByIndex) -> Reweighed:
        gained, chosen = _gained(samples, current, reference), list(pairs(samples))
        z = np.array([self.knobs.beta * (gained[better] - gained[worse]) for better, worse in chosen])
        factors = self.knobs.beta * np.exp(-np.logaddexp(0.0, z))  # beta sigmoid(-z)
        both = [(index, factor) for pair, factor in zip(chosen, factors, strict=True) for index in pair]
        by_sample = {index: np.full(len(samples[index].actions), factor) for index, factor in both}
        if not chosen:
            return by_sample, {}
        loss = float(np.mean(np.logaddexp(0.0, -z)))
        means = {"dpo/margin": float(z.mean()), "dpo/preferred": float((z > 0).mean())}
        return by_sample, {"policy/loss": loss, "dpo/loss": loss, **means, "dpo/pairs": float(len(chosen))}


class KTO(Algorithm):
    """KTO: good episodes become likelier and bad ones less likely, each by itself, relative to a reference policy.

        r = (logp - ref)(episode), a sum over its action tokens,   z0 = max(0, mean of r over the minibatch)
        z = beta (r - z0) of a good episode, beta (z0 - r) of a bad one
        loss = mean over episodes of weight (1 - sigmoid(z)),   weight = good_weight or bad_weight

    The tokens of a good episode have the weight `weight * beta * sigmoid(z) * sigmoid(-z)`, those of a bad one its
    negative. z0 is a constant for the gradient. It stands for KL(policy || reference), which the paper estimates from
    the answers to other prompts; here it is the mean of r of the minibatch's own episodes, which the policy played and
    which need no further pass. Source: arXiv 2402.01306, equation 8.

    Example: beta = 0.1, r = 3 of a good episode and -1 of a bad one: z0 = 1, z = 0.2 and 0.2, losses 0.450, weights
    0.1 * 0.2475 and -0.1 * 0.2475.
    """

    knobs: algorithms.KTO
    uses = ()
    needs_current = True

    def assign(self, samples: Sequence[Sample], observed: Sequence[Observed]) -> Assignment:
        weights = [np.full(len(sample.actions), 1.0 if self.is_good(sample) else -1.0) for sample in samples]
        return Assignment([np.zeros(len(each)) for each in weights], {"ce": weights})

    def component(self, name: str) -> Component:
        return Component(cross_entropy, "episodes")

    def is_good(self, sample: Sample) -> bool:
        least = self.knobs.good_above
        return bool((sample.successes[sample.graded] > 0.5).any()) if least is None else sample.earned > least

    def reweigh(self, samples: Mapping[int, Sample], current: ByIndex, reference: ByIndex) -> Reweighed:
        if not (of_samples := _gained(samples, current, reference)):
            return {}, {}
        gained, good = np.array([*of_samples.values()]), np.array([self.is_good(samples[i]) for i in of_samples])
        z0 = max(0.0, gained.mean())
        weights = np.where(good, self.knobs.good_weight, self.knobs.bad_weight)
        value = np.exp(-np.logaddexp(0.0, -self.knobs.beta * np.where(good, gained - z0, z0 - gained)))  # sigmoid(z)
        factors = zip(of_samples, weights * self.knobs.beta * value * (1 - value), strict=True)
        metrics = {"policy/loss": weights * (1 - value), "kto/kl": z0, "kto/good": good, "kto/value": value}
        by_sample = {index: np.full(len(samples[index].actions), factor) for index, factor in factors}
        return by_sample, {name: float(np.mean(values)) for name, values in metrics.items()}


def chosen_turns(sample: Sample) -> Bools:
    """Return which turns [K] are right, or ungraded and before a right one."""
    position, right = sample.causes.position, sample.graded & (sample.successes > 0.5)
    last = position[right].max() if right.any() else -1
    chosen: Bools = right | (~sample.graded & sample.causes.got & (position < last))
    return chosen


def pairs(samples: Mapping[int, Sample]) -> Iterator[tuple[int, int]]:
    """Yield the indices of the better and the worse episode of each pair. An episode is in one pair at most."""
    groups = grouped((sample.problem_id, index) for index, sample in samples.items() if sample.in_loss.any())
    for group in groups.values():
        ranked = sorted(group, key=lambda index: (-samples[index].earned, samples[index].trajectory_id))
        for better, worse in zip(ranked[: len(ranked) // 2], reversed(ranked), strict=False):
            if samples[better].earned > samples[worse].earned:
                yield better, worse


def _gained(samples: Mapping[int, Sample], current: ByIndex, reference: ByIndex) -> dict[int, float]:
    """Sum up logp - ref over the action tokens in the loss, for each sample that has some."""
    gained = {index: current[index].astype(np.float64) - reference[index] for index in samples}
    return {i: float(gained[i][sample.in_loss].sum()) for i, sample in samples.items() if sample.in_loss.any()}
