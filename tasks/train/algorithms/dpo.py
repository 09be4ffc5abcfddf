"""DPO: the better of two episodes of a problem becomes likelier than the worse, relative to a reference policy.

    z = beta [ (logp - ref)(better) - (logp - ref)(worse) ],   sums over the action tokens of an episode
    loss = mean over pairs of -log sigmoid(z)

Its gradient is that of a weighted cross-entropy: the tokens of the better episode have the weight beta sigmoid(-z),
those of the worse one its negative. So before each step a pass without gradient computes z, and pairs may be cut up
among micro-batches and ranks. In each group the episode that earned most (`Sample.earned`) is paired with the one that
earned least, the second with the second to last, and so on while they earned different amounts. Source: arXiv
2305.18290, equation 7.

Example: beta = 0.1, (logp - ref) = 2 and -1: z = 0.3, loss 0.554, weights 0.1 * 0.426 and -0.1 * 0.426.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from configs import algorithms
from storage.grouping import grouped
from tasks.train.advantages import Observed
from tasks.train.algorithms.algorithm import Algorithm, Assignment, ByIndex, Reweighed
from tasks.train.components import Component, cross_entropy
from tasks.train.samples import Floats, Sample


class DPO(Algorithm):
    knobs: algorithms.DPO
    uses = ()
    needs_current = True

    def assign(self, samples: Sequence[Sample], observed: Sequence[Observed]) -> Assignment:
        weights = [np.zeros(len(sample.actions)) for sample in samples]
        for better, worse in pairs(dict(enumerate(samples))):
            weights[better][:], weights[worse][:] = 1.0, -1.0
        return Assignment([np.zeros(len(each)) for each in weights], {"ce": weights})

    def component(self, name: str) -> Component:
        return Component(cross_entropy, "sequences", 2.0)  # a pair has two

    def reweigh(self, samples: Mapping[int, Sample], current: ByIndex, reference: ByIndex) -> Reweighed:
        factors, losses, margins = dict[int, Floats](), list[float](), list[float]()

        def gained(index: int) -> float:
            kept = samples[index].in_loss
            return float((current[index][kept].astype(np.float64) - reference[index][kept]).sum())

        for better, worse in pairs(samples):
            z = self.knobs.beta * (gained(better) - gained(worse))
            losses.append(float(np.logaddexp(0.0, -z)))
            margins.append(z)
            factor = self.knobs.beta * np.exp(-np.logaddexp(0.0, z))  # beta sigmoid(-z)
            for index in (better, worse):
                factors[index] = np.full(len(samples[index].actions), factor)
        if not losses:
            return factors, {}
        told = {
            "policy/loss": np.mean(losses),
            "dpo/loss": np.mean(losses),
            "dpo/margin": np.mean(margins),
            "dpo/preferred": np.mean(np.array(margins) > 0),
        }
        return factors, {key: float(value) for key, value in told.items()} | {"dpo/pairs": float(len(losses))}


def pairs(samples: Mapping[int, Sample]) -> Iterator[tuple[int, int]]:
    """Yield the indices of the better and the worse episode of each pair. An episode is in one pair at most."""
    groups = grouped((sample.problem_id, index) for index, sample in samples.items() if sample.in_loss.any())
    for group in groups.values():
        ranked = sorted(group, key=lambda index: (-samples[index].earned, samples[index].trajectory_id))
        for better, worse in zip(ranked[: len(ranked) // 2], reversed(ranked), strict=False):
            if samples[better].earned > samples[worse].earned:
                yield better, worse
