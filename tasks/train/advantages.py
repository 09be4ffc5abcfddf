"""Advantages of action tokens: the estimators `group` and `gae`, and their normalisation.

`group` compares an episode with the other episodes of its problem (GRPO, RLOO). Example: one problem, three episodes,
rewards of ±1, `turn_discount=1`, `baseline: turn`, no penalties.

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

`gae` is generalised advantage estimation over the action tokens of multi-turn episodes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from configs.algorithm_parts import Advantage
from storage.errors import first_few
from tasks.train.returns import Causes
from tasks.train.samples import Bools, Floats, Logprobs, Sample, by_member, by_problem

_FEW = 3
"""`mixed` compares a turn with whole episodes if at most so many episodes reached it (measured: README.md)."""
_EPS = 1e-5


@dataclass(frozen=True, slots=True)
class Observed:
    """The data about the A action tokens of one sample, in addition to the turns' rewards.

    Example: Observed(penalties=[0.0, -0.1], values=[0.4, 0.5])
    """

    penalties: Floats  # A, rewards of single tokens: minus the KL penalty, or 0 without one
    values: Floats | None = None  # A, the critic's value before each token, in units of returns
    teacher: Logprobs | None = None  # A, logprobs under the teacher

    def turn_penalties(self, sample: Sample) -> Floats:
        """Return the sum of the penalties [K] of each turn's tokens."""
        return np.bincount(sample.turn_of_action, self.penalties, len(sample.rewards)).astype(np.float64)


@dataclass(frozen=True, slots=True)
class Estimated:
    """The advantages and returns of N samples: for each sample an array [A]."""

    advantages: list[Floats]  # N arrays [A]
    returns: list[Floats] | None = None  # N arrays [A], the targets of the critic
    centred: bool = False  # the advantages are already centred by group: normalisation must not shift them again
    of_penalties: list[Floats] | None = None  # N arrays [A], added to the advantages after normalisation


def group(samples: Sequence[Sample], observed: Sequence[Observed], knobs: Advantage) -> Estimated:
    """Compute `A = R - mean(R)` for each turn, where the mean is over samples of its problem; 0 if all R are equal.

    R is the return of the turn. All tokens of the turn get its advantage. `knobs.baseline` selects the samples
    (`_compared`). With `leave_one_out` the mean is over the others among them; if there are none, the advantage is 0.
    With `scale_by_std` the result is divided by `std(R) + 1e-6`, with the population's std.

    A baseline that depends on the sample through its own R alone is unbiased: the mean gradient is that of the expected
    return, times (n - 1) / n with n samples in the mean, or times 1 with `leave_one_out`.

    Advantages of the penalties are computed apart and never divided, because their small differences would otherwise
    count as much in a problem whose episodes are all right as the rewards do in others.
    Source: GRPO (arXiv 2402.03300); Dr. GRPO (2503.20783, without the division); RLOO (2402.14740).
    """
    of_task = [sample.returns for sample in samples]
    if not any(each.penalties.any() for each in observed):
        return Estimated(compare(samples, of_task, knobs), centred=True)
    returns = [
        sample.causes.returns(sample.rewards, own.turn_penalties(sample), sample.turn_discount, sample.after)
        for sample, own in zip(samples, observed, strict=True)
    ]
    of_penalties = [both - task for both, task in zip(returns, of_task, strict=True)]
    apart = compare(samples, of_penalties, knobs.model_copy(update={"scale_by_std": False}))
    return Estimated(compare(samples, of_task, knobs), centred=True, of_penalties=apart)


def against_group(
    samples: Sequence[Sample], observed: Sequence[Observed], *, scale_by_std: bool = False, leave_one_out: bool = False
) -> list[Floats]:
    """Compute the advantages [A] of `group` as published algorithms have them, not normalised."""
    knobs = Advantage(normalisation="none", scale_by_std=scale_by_std, leave_one_out=leave_one_out)
    return estimate(samples, observed, knobs).advantages


def compare(samples: Sequence[Sample], returns: Sequence[Floats], knobs: Advantage) -> list[Floats]:
    """Compute the advantages [A] of each sample's tokens from the returns [K] of its turns."""
    advantages = list(returns)
    for indices in by_problem(samples):
        causes = [samples[index].causes for index in indices]
        table, reached = _table([returns[index] for index in indices], causes)
        for index, each, held, row in zip(indices, causes, table, _less_mean(table, reached, knobs), strict=True):
            # A turn that the agent never got may have the position of one that it got: it has its own return.
            of_turns = row[each.position] + (returns[index] - held[each.position])
            advantages[index] = of_turns[samples[index].turn_of_action]
    return advantages


def _table(returns: Sequence[Floats], causes: Sequence[Causes]) -> tuple[Floats, Bools]:
    """Write the returns of the G samples of a problem into a table [G, P] of P positions; return which each reached.

    At a position that a sample did not reach, the table has the return of its latest turn before that position.

    Example: returns [0, 1] and [1] give [[0, 1], [1, 1]] and [[True, True], [True, False]].
    """
    shape = len(returns), 1 + max(0, *(int(each.position.max()) for each in causes))
    table, reached = np.zeros(shape), np.zeros(shape, np.bool_)
    for row, (values, each) in enumerate(zip(returns, causes, strict=True)):
        table[row, each.position], reached[row, each.position] = values, True
        table[row, each.position[each.got]] = values[each.got]
    last = np.maximum.accumulate(np.where(reached, np.arange(shape[1]), 0), axis=1)
    return np.take_along_axis(table, last, axis=1), reached


def _compared(reached: Bools, knobs: Advantage) -> Bools:
    """Return which samples [G, P] are in the mean of each position.

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


def gae(samples: Sequence[Sample], observed: Sequence[Observed], knobs: Advantage) -> Estimated:
    """Compute advantages and returns of action tokens from a critic's values.

    The time steps are action tokens; prompt and feedback tokens are left out. The step from the last token of a turn
    to the next turn is discounted by the episode's `turn_discount`, all other steps by `knobs.discount`. A turn's
    reward is given at its last action token, and each penalty at its own token. The value after the last turn is
    `Sample.after`.

    In an episode whose turns are no chain, no value says what follows a turn. So each turn ends with its whole return
    (`Causes.returns`), which needs `gae_lambda=1`.
    Source: GAE (arXiv 1506.02438), turn discount as in AReaL (2505.24298).

    Raises:
        ValueError: an episode is no chain, and `gae_lambda` is below 1; the message names the trajectories.
    """
    if branched := [sample.trajectory_id for sample in samples if not sample.causes.is_chain and knobs.gae_lambda < 1]:
        raise ValueError(
            f"algorithm.advantage.gae_lambda={knobs.gae_lambda:g} needs turns that follow each other, but these "
            f"trajectories have candidates, or requests at the same time: {first_few(branched, 5)}. Set "
            "algorithm.advantage.gae_lambda=1"
        )
    values = [each.values for each in observed if each.values is not None]
    if len(values) < len(samples):
        raise ValueError("algorithm.advantage.type=gae needs a critic's values: set algorithm.critic={}")
    advantages = [_backward(*each, knobs) for each in zip(samples, observed, values, strict=True)]
    return Estimated(advantages, [a + v for a, v in zip(advantages, values, strict=True)])


def _backward(sample: Sample, observed: Observed, values: Floats, knobs: Advantage) -> Floats:
    """Compute `delta_t = r_t + g_t V_{t+1} - V_t`, `A_t = delta_t + g_t lambda A_{t+1}` [A] from values [A].

    After the last token V is what follows the last turn (`Sample.after`), and A is 0.
    """
    turns = np.append(np.diff(sample.turn_of_action), 1)  # more than 1 if turns without tokens lie between
    to_next = sample.turn_discount**turns if sample.causes.is_chain else 0.0  # 0: the turn ends with its whole return
    discounts = np.where(turns > 0, to_next, knobs.discount)
    deltas = _rewards(sample, observed) + discounts * np.append(values[1:], sample.after) - values
    advantages, carried = np.zeros(len(values)), 0.0
    for t, (delta, kept) in reversed([*enumerate(zip(deltas.tolist(), discounts.tolist(), strict=True))]):
        carried = advantages[t] = delta + kept * knobs.gae_lambda * carried
    return advantages


def _rewards(sample: Sample, observed: Observed) -> Floats:
    """Compute rewards [A]: the penalties, plus at each turn's last action token its reward, or all that it earns."""
    lengths = np.bincount(sample.turn_of_action, minlength=len(sample.rewards))
    last, rewards = np.cumsum(lengths) - 1, observed.penalties.copy()
    if sample.causes.is_chain:
        np.add.at(rewards, np.maximum(last, 0), sample.rewards)
    else:
        penalties = observed.turn_penalties(sample)
        earned = sample.causes.returns(sample.rewards, penalties, sample.turn_discount, sample.after) - penalties
        rewards[last[lengths > 0]] += earned[lengths > 0]
    return rewards


def normalise(samples: Sequence[Sample], estimated: Estimated, knobs: Advantage) -> list[Floats]:
    """Compute `(A - mean) / (std + 1e-5)`, or `A / (rms + 1e-5)` for `centred` advantages, in float64.

    Mean, population std and root mean square are over the action tokens in the loss, by `knobs.normalisation`: of all
    samples (`batch`), in a mixture of those of each member, or of the samples of each problem (`group`).

    Group baselines are centred by turn already, so their mean over tokens is not subtracted: long turns dominate that
    mean, and subtracting it would raise the advantages of groups whose returns are all equal, such as long wrong
    answers of a whole group. The std is not used for them either: it is 0 if the loss has only right answers because
    the wrong ones are masked.

    With a bound, all advantages that are normalised together are divided by more if the largest in the loss would be
    above it. So they still sum to 0 and keep their ratios. Near saturation one wrong answer in 512 would otherwise get
    -21.9, and the whole step would be its own.
    Source: PPO as in AReaL (arXiv 2505.24298).
    """
    advantages = estimated.advantages
    if knobs.normalisation == "none":
        return advantages
    result = list(advantages)
    for indices in by_problem(samples) if knobs.normalisation == "group" else by_member(samples):
        in_loss = np.concatenate([advantages[i][samples[i].in_loss] for i in indices])
        mean = 0.0 if estimated.centred or not len(in_loss) else in_loss.mean()
        scale = np.sqrt(((in_loss - mean) ** 2).mean()) + _EPS if len(in_loss) else _EPS
        if knobs.bound is not None and len(in_loss):
            scale = max(scale, np.abs(in_loss - mean).max() / knobs.bound)
        for i in indices:
            result[i] = (advantages[i] - mean) / scale
    return result


def estimate(samples: Sequence[Sample], observed: Sequence[Observed], knobs: Advantage) -> Estimated:
    """Estimate advantages, normalise them by `knobs.normalisation`, and return them with the returns for a critic.

    Advantages that the estimator gives for penalties are added as they are.
    """
    estimated = (gae if knobs.type == "gae" else group)(samples, observed, knobs)
    advantages = normalise(samples, estimated, knobs)
    if estimated.of_penalties is not None:
        advantages = [task + penalty for task, penalty in zip(advantages, estimated.of_penalties, strict=True)]
    return replace(estimated, advantages=advantages)
