"""Rejection sampling fine-tuning: cross-entropy on what was right. Repeated with new episodes it is expert iteration.

    loss = mean over chosen tokens of -logp

Chosen are turns that are right, and before them ungraded turns, such as calls of tools that led to a right answer; so
a wrong first answer is not learnt from an episode that ended well. With `distinct`, of the episodes of a problem whose
chosen tokens are the same only the first counts.
Source: arXiv 2308.01825, section 3.2 (distinct reasoning paths); expert iteration: 1705.08439.

Example: the turns wrong, call, right of an episode get the weights 0, 1, 1; the turns right, wrong get 1, 0.
"""

from collections.abc import Sequence

import numpy as np

from configs import algorithms
from tasks.train.advantages import Observed
from tasks.train.algorithms.algorithm import Algorithm, Assignment
from tasks.train.samples import Bools, Floats, Sample


class RFT(Algorithm):
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


def chosen_turns(sample: Sample) -> Bools:
    """Return which turns [K] are right, or ungraded and before a right one."""
    position, right = sample.causes.position, sample.graded & (sample.successes > 0.5)
    last = position[right].max() if right.any() else -1
    chosen: Bools = right | (~sample.graded & sample.causes.got & (position < last))
    return chosen
