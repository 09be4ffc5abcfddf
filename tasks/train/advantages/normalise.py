"""Normalisation: bring advantages to one scale."""

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
    bound: float | None = None,
) -> list[Floats]:
    """Compute `(A - mean) / (std + 1e-5)`, or `A / (rms + 1e-5)` for `centred` advantages, in float64.

    Mean, population std and root mean square are over the action tokens in the loss: of all samples (`batch`), or of
    the samples of each problem (`group`).

    Group baselines are centred by turn already, so their mean over tokens is not subtracted: long turns dominate that
    mean, and subtracting it would raise the advantages of groups whose returns are all equal, such as long wrong
    answers of a whole group. The std is not used for them either: it is 0 if the loss has only right answers because
    the wrong ones are masked.

    With a bound, all advantages that are normalised together are divided by more if the largest in the loss would be
    above it. So they still sum to 0 and keep their ratios. Near saturation one wrong answer in 512 would otherwise get
    -21.9, and the whole step would be its own.
    Source: PPO as in AReaL (arXiv 2505.24298).
    """
    if over == "none":
        return list(advantages)
    groups: dict[str, list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(sample.problem_id if over == "group" else "", []).append(index)
    result = list(advantages)
    for indices in groups.values():
        in_loss = np.concatenate([advantages[i][samples[i].in_loss] for i in indices])
        mean = 0.0 if centred or not len(in_loss) else in_loss.mean()
        scale = np.sqrt(((in_loss - mean) ** 2).mean()) + _EPS if len(in_loss) else _EPS
        if bound is not None and len(in_loss):
            scale = max(scale, np.abs(in_loss - mean).max() / bound)
        for i in indices:
            result[i] = (advantages[i] - mean) / scale
    return result
