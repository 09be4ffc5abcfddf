"""Advantages with mean 0 and standard deviation 1."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from tasks.ppo.samples import Floats, Sample

_EPS = 1e-5


def normalise(
    samples: Sequence[Sample], advantages: Sequence[Floats], over: Literal["none", "batch", "group"]
) -> list[Floats]:
    """`(A - mean) / (std + 1e-5)` in float64, the population's std.

    A mean over tokens is not that over turns: episodes whose group agreed, with advantages of 0, are moved away from
    it a little, as in all systems that normalise so. Mean and std are over the action tokens that the loss will see:
    of all samples, or of each problem's.
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
        mean, std = (seen.mean(), seen.std()) if len(seen) else (0.0, 0.0)
        for i in indices:
            result[i] = (advantages[i] - mean) / (std + _EPS)
    return result
