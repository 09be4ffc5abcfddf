"""Group baselines: compare a turn with the same turn of the other episodes of its problem (GRPO, RLOO).

Example: one problem, three episodes, rewards of ±1, `turn_discount=1`, default knobs, no penalties.

    episode   rewards    returns   advantage of the tokens of each turn
    a         -1,  1      0,  1     0 - (-1/3) =  0.33,   1 - 0 =  1
    b          1          1         1 - (-1/3) =  1.33
    c         -1, -1     -2, -1    -2 - (-1/3) = -1.67,  -1 - 0 = -1

The mean of the first turns is (0 + 1 - 2) / 3 = -1/3, the mean of the second turns (1 - 1) / 2 = 0. If a has two tokens
in its first turn and one in its second, its advantages are [0.33, 0.33, 1].
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from configs.schema import Advantage
from tasks.train.advantages.interface import Estimated, Observed
from tasks.train.samples import Floats, Ints, Sample


def group(samples: Sequence[Sample], observed: Sequence[Observed], knobs: Advantage) -> Estimated:
    """Compute `A = R - mean(R)` over the samples of one problem that reached one turn index; 0 if all R are equal.

    R is the return of the turn, including the penalties of its tokens. All tokens of the turn get its advantage. With
    `leave_one_out` the mean is over the other samples; a turn that no other sample reached gets 0. With `scale_by_std`
    the result is divided by `std(R) + 1e-6`, with the population's std. Each turn index has its own baseline, because
    one baseline over all turns would reward wrong first answers of episodes that end well. All samples must have known
    returns (`samples.with_known_returns`).
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
    # A rounded mean can leave differences of 1e-17 between equal returns. Set them to 0.
    flat = np.where(varied(groups, returns)[groups], centred, 0.0)
    by_turn = np.split(flat, np.cumsum([len(sample.rewards) for sample in samples])[:-1])
    advantages = [turns[sample.turn_of_action] for sample, turns in zip(samples, by_turn, strict=True)]
    return Estimated(advantages, centred=True)


def _returns(sample: Sample, observed: Observed) -> Floats:
    """Compute the returns [K] of the turns, including penalties."""
    if not observed.penalties.any():
        return sample.returns
    penalties = observed.turn_penalties(sample)
    return sample.causes.returns(sample.rewards, penalties, sample.turn_discount, sample.after or 0.0)


def turn_groups(samples: Sequence[Sample]) -> Ints:
    """Number the groups, and list the group of every turn of all samples, in order.

    Turns of one problem that are at the same place in the order in which the agent got them are in one group. Those
    that it never got are in a group of their own, where all returns are 0.
    """
    numbers: dict[tuple[str, int], int] = {}
    keys = ((sample.problem_id, place) for sample in samples for place in sample.order.tolist())
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)


def varied(groups: Ints, values: Floats) -> npt.NDArray[np.bool_]:
    """Return for each group whether its values differ."""
    low, high = np.full(groups.max() + 1, np.inf), np.full(groups.max() + 1, -np.inf)
    np.minimum.at(low, groups, values)
    np.maximum.at(high, groups, values)
    return low < high


def _group_mean(groups: Ints, values: Floats) -> Floats:
    """Compute for each value the mean of its group."""
    return (np.bincount(groups, values) / np.bincount(groups))[groups]
