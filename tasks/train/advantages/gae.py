"""Generalised advantage estimation over the action tokens of multi-turn episodes."""

from collections.abc import Sequence

import numpy as np

from configs.train import Advantage
from tasks.train.advantages.interface import Estimated, Observed
from tasks.train.samples import Floats, Sample, name_some


def gae(samples: Sequence[Sample], observed: Sequence[Observed], knobs: Advantage) -> Estimated:
    """Compute advantages and returns of action tokens from a critic's values.

    The time steps are action tokens; prompt and feedback tokens are left out. The step from the last token of a turn
    to the next turn is discounted by the episode's `turn_discount`, all other steps by `knobs.discount`. A turn's
    reward is given at its last action token, and each penalty at its own token. The value after the last turn is
    `bootstrap`.

    In an episode whose turns are no chain, no value says what follows a turn. So each turn ends with its whole return
    (`Causes.returns`), which needs `gae_lambda=1`.
    Source: GAE (arXiv 1506.02438), turn discount as in AReaL (2505.24298).

    Raises:
        ValueError: an episode is no chain, and `gae_lambda` is below 1; the message names the trajectories.
    """
    _refuse_branches(samples, knobs)
    rewards = [_rewards(*pair) for pair in zip(samples, observed, strict=True)]
    values = [_values(*pair) for pair in zip(samples, observed, strict=True)]
    following = [np.append(v[1:], o.bootstrap) for v, o in zip(values, observed, strict=True)]
    discounts = [_discounts(sample, knobs.discount) for sample in samples]
    table = backward(_stack(rewards), _stack(values), _stack(following), _stack(discounts), knobs.gae_lambda)  # [B, A]
    advantages = [row[: len(sample.actions)] for row, sample in zip(table, samples, strict=True)]
    return Estimated(advantages, [a + v for a, v in zip(advantages, values, strict=True)])


def backward(rewards: Floats, values: Floats, following: Floats, discounts: Floats, gae_lambda: float) -> Floats:
    """Compute `delta_t = r_t + g_t V_{t+1} - V_t`, `A_t = delta_t + g_t lambda A_{t+1}`, all [B, A].

    All inputs are padded with 0 at the right, and the advantages of the padding are 0.

    Args:
        rewards: r_t.
        values: V_t.
        following: V_{t+1}; at the last token the bootstrap value, or 0.
        discounts: g_t.
        gae_lambda: lambda.
    """
    deltas = rewards + discounts * following - values
    advantages = np.zeros_like(deltas)
    carried = np.zeros(len(deltas))
    for t in range(deltas.shape[1] - 1, -1, -1):
        carried = deltas[:, t] + discounts[:, t] * gae_lambda * carried
        advantages[:, t] = carried
    return advantages


def _refuse_branches(samples: Sequence[Sample], knobs: Advantage) -> None:
    branched = [sample.trajectory_id for sample in samples if not sample.causes.is_chain]
    if branched and knobs.gae_lambda < 1:
        raise ValueError(
            f"ppo.advantage.gae_lambda={knobs.gae_lambda:g} needs turns that follow each other, but these trajectories "
            f"have candidates, or requests at the same time: {name_some(branched)}. Set ppo.advantage.gae_lambda=1"
        )


def _rewards(sample: Sample, observed: Observed) -> Floats:
    """Compute rewards [A]: the penalties, plus at each turn's last action token its reward, or all that it earns."""
    lengths = np.bincount(sample.turn_of_action, minlength=len(sample.rewards))
    last, rewards = np.cumsum(lengths) - 1, observed.penalties.copy()
    if sample.causes.is_chain:
        np.add.at(rewards, np.maximum(last, 0), sample.rewards)
    else:
        penalties = observed.turn_penalties(sample)
        earned = sample.causes.returns(sample.rewards, penalties, sample.turn_discount, observed.bootstrap) - penalties
        rewards[last[lengths > 0]] += earned[lengths > 0]
    return rewards


def _values(sample: Sample, observed: Observed) -> Floats:
    if observed.values is None:
        raise ValueError(
            f"ppo.advantage.type=gae needs a critic's values of {sample.trajectory_id}: set ppo.critic={{}}"
        )
    return observed.values


def _discounts(sample: Sample, discount: float) -> Floats:
    """Compute the discount [A] of the step after each token: 0 after a turn that ends with its whole return."""
    turns = np.append(np.diff(sample.turn_of_action), 1)  # more than 1 if turns without tokens lie between
    return np.where(turns > 0, sample.turn_discount**turns if sample.causes.is_chain else 0.0, discount)


def _stack(arrays: Sequence[Floats]) -> Floats:
    """Stack B arrays into [B, A], padded with 0 at the right."""
    table = np.zeros((len(arrays), max(len(array) for array in arrays)))
    for row, array in zip(table, arrays, strict=True):
        row[: len(array)] = array
    return table
