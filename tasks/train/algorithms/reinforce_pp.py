"""REINFORCE++: returns of tokens, normalised over the whole batch in place of a baseline, and the clip of PPO.

    R_t = R - kl_ctl sum_{i >= t} log(policy_i / version 0_i),   A = (R_t - mean) / (std + 1e-5) over the batch
    loss = mean over tokens of -min(ratio A, clip(ratio, 1 ± eps_clip) A)

Source: arXiv 2501.03262, equations 8 to 10. R is the return of the token's turn. The KL of turns that it could cause
counts, too, and not that of other candidates of its request.

Example: one token each with returns -1, 1, 1 gives A = -1.41, 0.71, 0.71.
"""

from collections.abc import Sequence

import numpy as np

from configs import algorithms
from configs.algorithms import Advantage
from tasks.train.advantages import Estimated, Observed, normalise
from tasks.train.algorithms.algorithm import Algorithm, Assignment
from tasks.train.samples import Floats, Sample

_BATCH = Advantage(normalisation="batch", bound=None)


class ReinforcePP(Algorithm):
    knobs: algorithms.ReinforcePP

    def assign(self, samples: Sequence[Sample], observed: Sequence[Observed]) -> Assignment:
        returns = [
            sample.returns[sample.turn_of_action] + _ahead(sample, given)
            for sample, given in zip(samples, observed, strict=True)
        ]
        return self.share(normalise(samples, Estimated(returns), _BATCH))


def _ahead(sample: Sample, given: Observed) -> Floats:
    """Sum up for each token [A] its penalty, those of later tokens of its turn, and of turns that it could cause."""
    ahead, turns = np.cumsum(given.penalties[::-1])[::-1], sample.turn_of_action
    if sample.causes.is_chain:
        return ahead
    firsts = np.searchsorted(turns, turns)
    caused = sample.causes.returns(np.zeros(len(sample.rewards)), given.turn_penalties(sample), 1.0, 0.0)
    return ahead - ahead[firsts] + caused[turns]
