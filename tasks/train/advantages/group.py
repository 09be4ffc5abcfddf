"""Group baselines: compare an episode with the other episodes of its problem (GRPO, RLOO).

Example: one problem, three episodes, rewards of ±1, `turn_discount=1`, `baseline: turn`, no penalties.

    episode   rewards    returns   advantage of the tokens of each turn
    a         -1,  1      0,  1     0 - (-1/3) =  0.33,   1 - 0 =  1
    b          1          1         1 - (-1/3) =  1.33
    c         -1, -1     -2, -1    -2 - (-1/3) = -1.67,  -1 - 0 = -1

The mean of the first turns is (0 + 1 - 2) / 3 = -1/3, the mean of the second turns (1 - 1) / 2 = 0. If a has two tokens
in its first turn and one in its second, its advantages are [0.33, 0.33, 1].

This baseline compares a turn that no other episode reached with itself, so the advantage is 0, and a strategy that is
rare learns nothing beyond its first turn. The baseline `mixed` compares such a turn with whole episodes. Two examples
of eight episodes that are rewarded at their end, with `leave_one_out`:

    episode                                     returns         turn            mixed
    seven answer at once, wrong                 [-1]            [-0.29]         [-0.29]
    one calls a tool three times, then right    [1] * 4         [2, 0, 0, 0]    [2] * 4

    seven answer at once, right                 [1]             [0.29]          [0.29]
    one calls a tool eight times, then wrong    [-1] * 9        [-2, 0 x 8]     [-2] * 9
"""

from collections.abc import Sequence

import numpy as np

from configs.train import Advantage
from tasks.train.advantages.interface import Estimated, Observed
from tasks.train.credit import Causes
from tasks.train.samples import Bools, Floats, Ints, Sample

_FEW = 3
"""`mixed` compares a turn with whole episodes if at most so many episodes reached it (measured: README.md)."""


def group(samples: Sequence[Sample], observed: Sequence[Observed], knobs: Advantage) -> Estimated:
    """Compute `A = R - mean(R)` for each turn, where the mean is over samples of its problem; 0 if all R are equal.

    R is the return of the turn. All tokens of the turn get its advantage. `knobs.baseline` selects the samples
    (`_compared`). With `leave_one_out` the mean is over the others among them; if there are none, the advantage is 0.
    With `scale_by_std` the result is divided by `std(R) + 1e-6`, with the population's std. All samples must have known
    returns (`samples.with_known_returns`).

    A baseline that depends on the sample through its own R alone is unbiased: the mean gradient is that of the expected
    return, times (n - 1) / n with n samples in the mean, or times 1 with `leave_one_out`.

    With `scale_penalties` R includes the penalties of the turn's tokens. Without it, advantages of the penalties are
    computed apart and never divided, because their small differences would otherwise count as much in a problem whose
    episodes are all right as the rewards do in others.
    Source: GRPO (arXiv 2402.03300); Dr. GRPO (2503.20783, without the division); RLOO (2402.14740).
    """
    returns = [_returns(*pair) for pair in zip(samples, observed, strict=True)]
    if knobs.scale_penalties or not any(each.penalties.any() for each in observed):
        return Estimated(_compare(samples, returns, knobs), centred=True)
    of_task = [sample.returns for sample in samples]
    of_penalties = [both - task for both, task in zip(returns, of_task, strict=True)]
    undivided = knobs.model_copy(update={"scale_by_std": False})
    apart = _compare(samples, of_penalties, undivided)
    return Estimated(_compare(samples, of_task, knobs), centred=True, of_penalties=apart)


def _returns(sample: Sample, observed: Observed) -> Floats:
    """Compute the returns [K] of the turns, including penalties."""
    if not observed.penalties.any():
        return sample.returns
    penalties = observed.turn_penalties(sample)
    return sample.causes.returns(sample.rewards, penalties, sample.turn_discount, sample.after or 0.0)


def turn_groups(samples: Sequence[Sample]) -> Ints:
    """Number the groups, and list the group of every turn of all samples, in order.

    Turns of one problem that are at the same place in the order in which the agent got them are in one group.
    """
    numbers: dict[tuple[str, int], int] = {}
    keys = ((sample.problem_id, place) for sample in samples for place in sample.order.tolist())
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)


def varied(groups: Ints, values: Floats) -> Bools:
    """Return for each group whether its values differ."""
    low, high = np.full(groups.max() + 1, np.inf), np.full(groups.max() + 1, -np.inf)
    np.minimum.at(low, groups, values)
    np.maximum.at(high, groups, values)
    return low < high


def _compare(samples: Sequence[Sample], returns: Sequence[Floats], knobs: Advantage) -> list[Floats]:
    """Compute the advantages [A] of each sample's tokens from the returns [K] of its turns."""
    problems: dict[str, list[int]] = {}
    for index, sample in enumerate(samples):
        problems.setdefault(sample.problem_id, []).append(index)
    advantages = list(returns)
    for indices in problems.values():
        causes = [samples[index].causes for index in indices]
        table, reached = _table([returns[index] for index in indices], causes)
        for index, each, held, row in zip(indices, causes, table, _less_mean(table, reached, knobs), strict=True):
            # A turn that the agent never got may share its place with one that it got: it has its own return.
            of_turns = row[each.order] + (returns[index] - held[each.order])
            advantages[index] = of_turns[samples[index].turn_of_action]
    return advantages


def _table(returns: Sequence[Floats], causes: Sequence[Causes]) -> tuple[Floats, Bools]:
    """Write the returns of the G samples of a problem into a table [G, P], and return which places each sample reached.

    At a place that a sample did not reach, the table has the return of its last turn before that place.

    Example: returns [0, 1] and [1] give [[0, 1], [1, 1]] and [[True, True], [True, False]].
    """
    shape = len(returns), 1 + max(0, *(int(each.order.max()) for each in causes))
    table, reached = np.zeros(shape), np.zeros(shape, np.bool_)
    for row, (values, each) in enumerate(zip(returns, causes, strict=True)):
        table[row, each.order], reached[row, each.order] = values, True
        table[row, each.order[each.got]] = values[each.got]
    last = np.maximum.accumulate(np.where(reached, np.arange(shape[1]), 0), axis=1)
    return np.take_along_axis(table, last, axis=1), reached


def _compared(reached: Bools, knobs: Advantage) -> Bools:
    """Return which samples [G, P] are in the mean of each place.

    `turn`: those that reached it, because the mean over all would reward wrong first answers of episodes that end well.
    `episode`: all that reached any. `mixed`: those that reached it, but as for `episode` if they are few.
    """
    if knobs.baseline == "turn":
        return reached
    every: Bools = np.broadcast_to(reached.any(1, keepdims=True), reached.shape)
    return every if knobs.baseline == "episode" else np.where(reached.sum(0) > _FEW, reached, every)


def _less_mean(returns: Floats, reached: Bools, knobs: Advantage) -> Floats:
    """Compute the advantages [G, P] of returns [G, P], as `group` describes."""
    compared = _compared(reached, knobs)
    size = np.maximum(compared.sum(0), 1)
    centred = returns - np.where(compared, returns, 0.0).sum(0) / size
    spread = np.sqrt(np.where(compared, centred**2, 0.0).sum(0) / size) + 1e-6
    if knobs.leave_one_out:  # R - (sum - R) / (n - 1) = (R - mean) n / (n - 1)
        centred = centred * size / np.maximum(size - 1, 1)
    if knobs.scale_by_std:
        centred = centred / spread
    # A rounded mean can leave differences of 1e-17 between equal returns. Set them to 0.
    low, high = (np.where(compared, returns, fill) for fill in (np.inf, -np.inf))
    return np.where(low.min(0) < high.max(0), centred, 0.0)
