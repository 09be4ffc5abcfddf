"""Advantages brought to one scale."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from tasks.train.samples import Floats, Sample

_EPS = 1e-5


def normalise(
    samples: Sequence[Sample],
    advantages: Sequence[Floats],
    over: Literal["none", "batch", "group"],
    *,
    centred: bool = False,
) -> list[Floats]:
    """`(A - mean) / (std + 1e-5)` in float64, the population's std; of `centred` advantages `A / (rms + 1e-5)`.

    Mean, std and root mean square are over the action tokens that the loss will see: of all samples, or of each
    problem's. Group baselines are centred already, by turn. The mean over their tokens is that of long turns above
    all: subtracted, it would push up groups that agree, such as long wrong answers that all their group gave. Nor is
    the std of use there: it is 0 where the loss sees right answers only, because the wrong ones are masked.
    Source: PPO as in AReaL (arXiv 2505.24298).
    """
    if over == "none":
        return list(advantages)
    groups: dict[str, list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(sample.problem_id if over == "group" else "", []).append(index)
    result = list(advantages)
    for indices in groups.values():
        seen = np.concatenate([advantages[i][samples[i].in_loss] for i in indices])
        mean = 0.0 if centred or not len(seen) else seen.mean()
        scale = np.sqrt(((seen - mean) ** 2).mean()) if len(seen) else 0.0
        for i in indices:
            result[i] = (advantages[i] - mean) / (scale + _EPS)
    return result
