"""Group baselines: a turn against the same turn of the other episodes of its problem (GRPO, RLOO)."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from configs.schema import Advantage
from tasks.train.advantages.interface import Estimated, Observed
from tasks.train.reward_shaping import turn_returns
from tasks.train.samples import Floats, Ints, Sample


def group(samples: Sequence[Sample], observed: Sequence[Observed], knobs: Advantage) -> Estimated:
    """`A = R - mean(R)` over the samples of one problem that reached one turn index; 0 where they all agree.

    R is the turn's return, its tokens' penalties included; all tokens of the turn get its advantage. With
    `leave_one_out` the mean is over the others, and a turn that nobody else reached gets 0. With `scale_by_std`
    the result is divided by the population's `std(R) + 1e-6`. By turn, for one baseline over all turns would
    reward the wrong first answers of episodes that end well. Samples whose returns are not known (`samples.known`)
    have no place here.
    Source: GRPO (arXiv 2402.03300); Dr. GRPO (2503.20783, without the division); RLOO (2402.14740).
    """
    groups = turn_groups(samples)
    returns = np.concatenate([_returns(*pair) for pair in zip(samples, observed, strict=True)])
    size = np.bincount(groups)[groups]
    centred = returns - _group_mean(groups, returns)
    spread = np.sqrt(_group_mean(groups, centred**2)) + 1e-6
    if knobs.leave_one_out:  # R - (sum - R) / (n - 1) = (R - mean) n / (n - 1)
        centred = centred * size / np.maximum(size - 1, 1)
    if knobs.scale_by_std:
        centred = centred / spread
    # A rounded mean leaves 1e-17, which is no signal.
    flat = np.where(varied(groups, returns)[groups], centred, 0.0)
    by_turn = np.split(flat, np.cumsum([len(sample.rewards) for sample in samples])[:-1])
    advantages = [turns[sample.turn_of_action] for sample, turns in zip(samples, by_turn, strict=True)]
    return Estimated(advantages, centred=True)


def _returns(sample: Sample, observed: Observed) -> Floats:
    """Returns [K] of the turns, penalties included."""
    if not observed.penalties.any():
        return sample.returns
    penalties = np.bincount(sample.turn_of_action, observed.penalties, len(sample.rewards))
    rewards = list(sample.rewards + penalties)
    return np.asarray(turn_returns(rewards, sample.turn_discount, sample.after or 0.0), np.float64)


def turn_groups(samples: Sequence[Sample]) -> Ints:
    """Number of the group of every turn, flat: the turns of one problem with one turn index share a group."""
    numbers: dict[tuple[str, int], int] = {}
    keys = ((sample.problem_id, turn) for sample in samples for turn in range(len(sample.rewards)))
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)


def varied(groups: Ints, values: Floats) -> npt.NDArray[np.bool_]:
    """For each group, whether its values differ."""
    low, high = np.full(groups.max() + 1, np.inf), np.full(groups.max() + 1, -np.inf)
    np.minimum.at(low, groups, values)
    np.maximum.at(high, groups, values)
    return low < high


def _group_mean(groups: Ints, values: Floats) -> Floats:
    """The mean of its group, for each value."""
    return (np.bincount(groups, values) / np.bincount(groups))[groups]
