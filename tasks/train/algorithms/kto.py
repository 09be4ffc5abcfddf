"""KTO: good episodes become likelier and bad ones less likely, each by itself, relative to a reference policy.

    r = (logp - ref)(episode), a sum over its action tokens,   z0 = max(0, mean of r over the minibatch)
    z = beta (r - z0) of a good episode, beta (z0 - r) of a bad one
    loss = mean over episodes of weight (1 - sigmoid(z)),   weight = good_weight or bad_weight

The gradient is that of a weighted cross-entropy, as with `dpo`: the tokens of a good episode have the weight
weight beta sigmoid(z) sigmoid(-z), those of a bad one its negative. z0 is a constant for the gradient. It stands for
KL(policy || reference), which the paper estimates from the answers to other prompts; here the minibatch's own episodes
are taken, whose mean of r it is where the policy played them, and which need no further pass.
Source: arXiv 2402.01306, equation 8.

Example: beta = 0.1, r = 3 of a good episode and -1 of a bad one: z0 = 1, z = 0.2 and 0.2, losses 0.450, weights
0.1 * 0.2475 and -0.1 * 0.2475.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from configs import algorithms
from tasks.train.advantages import Observed
from tasks.train.algorithms.algorithm import Algorithm, Assignment, ByIndex, Reweighed
from tasks.train.components import Component, cross_entropy
from tasks.train.samples import Sample


class KTO(Algorithm):
    knobs: algorithms.KTO
    uses = ()
    needs_current = True

    def assign(self, samples: Sequence[Sample], observed: Sequence[Observed]) -> Assignment:
        weights = [np.full(len(sample.actions), 1.0 if self.is_good(sample) else -1.0) for sample in samples]
        return Assignment([np.zeros(len(each)) for each in weights], {"ce": weights})

    def component(self, name: str) -> Component:
        return Component(cross_entropy, "sequences")

    def is_good(self, sample: Sample) -> bool:
        least = self.knobs.good_above
        return bool((sample.successes[sample.graded] > 0.5).any()) if least is None else sample.earned > least

    def reweigh(self, samples: Mapping[int, Sample], current: ByIndex, reference: ByIndex) -> Reweighed:
        if not (chosen := [index for index, sample in samples.items() if sample.in_loss.any()]):
            return {}, {}
        gained = np.array([(current[i].astype(np.float64) - reference[i])[samples[i].in_loss].sum() for i in chosen])
        z0, good = max(0.0, gained.mean()), np.array([self.is_good(samples[i]) for i in chosen])
        weights = np.where(good, self.knobs.good_weight, self.knobs.bad_weight)
        value = np.exp(-np.logaddexp(0.0, -self.knobs.beta * np.where(good, gained - z0, z0 - gained)))  # sigmoid(z)
        factors = zip(chosen, weights * self.knobs.beta * value * (1 - value), strict=True)
        told = {"policy/loss": weights * (1 - value), "kto/kl": z0, "kto/good": good, "kto/value": value}
        by_sample = {index: np.full(len(samples[index].actions), factor) for index, factor in factors}
        return by_sample, {name: float(np.mean(values)) for name, values in told.items()}
