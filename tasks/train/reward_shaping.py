"""Rewards and returns of an episode's turns, computed from their scores."""

from collections.abc import Sequence

from configs.schema import Reward


def turn_rewards(
    successes: Sequence[float], reward: Reward, lengths: Sequence[int] = (), limit: int | None = None
) -> list[float]:
    """Compute the reward of each turn: `r = clip(((success - 0.5) * 2 - bias) * scaling - overlong, ±max_clip)`.

    Source: the reward of AReaL's math agents (arXiv 2505.24298).

    Args:
        successes: [K], 1 for a right answer and 0 for a wrong one.
        reward: the knobs.
        lengths: [K], tokens of each completion; needed only with a limit.
        limit: the largest number of tokens of a completion; None: no penalty for length.
    """
    penalties = [0.0] * len(successes) if limit is None else [overlong(n, limit, reward) for n in lengths]
    raw = (
        ((success - 0.5) * 2 - reward.bias) * reward.scaling - penalty
        for success, penalty in zip(successes, penalties, strict=True)
    )
    return [max(-reward.max_clip, min(reward.max_clip, value)) for value in raw]


def overlong(length: int, limit: int, reward: Reward) -> float:
    """Compute the penalty for a completion of `length` tokens.

    It rises linearly from 0 to `overlong_penalty` over the last `overlong_tokens` tokens before `limit`.

    Source: the soft overlong punishment of DAPO (arXiv 2503.14476, equation 13).
    """
    excess = length - (limit - reward.overlong_tokens)
    return reward.overlong_penalty * min(1.0, max(0, excess) / reward.overlong_tokens)


def least_reward(reward: Reward, limit: int | None = None) -> float:
    """Compute the reward of a wrong answer of `limit` tokens. It is the smallest reward that a turn can have."""
    return turn_rewards([0.0], reward, [limit or 0], limit)[0]


def turn_returns(rewards: Sequence[float], turn_discount: float, after: float = 0.0) -> list[float]:
    """Compute the return of each turn: `R_k = r_k + turn_discount * R_{k+1}`, with `after` as R after the last turn."""
    returns: list[float] = []
    following = after
    for value in reversed(rewards):
        following = value + turn_discount * following
        returns.append(following)
    return returns[::-1]
