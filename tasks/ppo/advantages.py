"""Advantages of turns. An estimator is one function and one registry line."""

from collections.abc import Callable, Sequence

import numpy as np

from configs.schema import Advantage
from tasks.ppo.samples import Floats, Ints, Sample

Estimator = Callable[[Sequence[Sample], Advantage], Floats]
"""From N samples and the knobs to the advantage of every turn of every sample, flat, in the samples' order."""

_ESTIMATORS: dict[str, Estimator] = {}


def register_advantage(name: str) -> Callable[[Estimator], Estimator]:
    """Decorator that makes an estimator available as `ppo.advantage.type: name`."""

    def register(estimator: Estimator) -> Estimator:
        _ESTIMATORS[name] = estimator
        return estimator

    return register


def turn_advantages(samples: Sequence[Sample], knobs: Advantage) -> list[Floats]:
    """The advantage of each turn: for each sample an array [K].

    Raises:
        ValueError: no estimator has the name `knobs.type`.
    """
    if knobs.type not in _ESTIMATORS:
        raise ValueError(f"ppo.advantage.type={knobs.type!r} is not registered: use one of {sorted(_ESTIMATORS)}")
    flat = _ESTIMATORS[knobs.type](samples, knobs)
    return np.split(flat, np.cumsum([len(sample.returns) for sample in samples])[:-1])


@register_advantage("group")
def group(samples: Sequence[Sample], knobs: Advantage) -> Floats:
    """`A = R - mean(R)` over the samples of one problem that reached one turn index; 0 where they all agree.

    With `scale_by_std` divided by the population's `std(R) + 1e-6`. Source: GRPO (arXiv 2402.03300) and
    Dr. GRPO (2503.20783, without the division). By turn, for one baseline over all turns would reward the wrong
    first answers of episodes that end well.
    """
    groups, returns = turn_groups(samples), np.concatenate([sample.returns for sample in samples])
    centred = returns - _group_mean(groups, returns)
    if knobs.scale_by_std:
        centred = centred / (np.sqrt(_group_mean(groups, centred**2)) + 1e-6)
    return np.where(varied(groups, returns)[groups], centred, 0.0)  # a rounded mean leaves 1e-17, which is no signal


def turn_groups(samples: Sequence[Sample]) -> Ints:
    """Number of the group of every turn, flat: the turns of one problem with one turn index share a group."""
    numbers: dict[tuple[str, int], int] = {}
    keys = ((sample.problem_id, turn) for sample in samples for turn in range(len(sample.returns)))
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)


def varied(groups: Ints, values: Floats) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """For each group, whether its values differ."""
    low, high = np.full(groups.max() + 1, np.inf), np.full(groups.max() + 1, -np.inf)
    np.minimum.at(low, groups, values)
    np.maximum.at(high, groups, values)
    return low < high


def _group_mean(groups: Ints, values: Floats) -> Floats:
    """The mean of its group, for each value."""
    return (np.bincount(groups, values) / np.bincount(groups))[groups]
