"""Rewards and returns of an episode's turns, computed from their scores."""

from collections.abc import Sequence

from configs.schema import Reward


def turn_rewards(
    scored: Sequence[float | None], reward: Reward, lengths: Sequence[int] = (), limit: int | None = None
) -> list[float]:
    """Compute the reward of each turn: `r = clip((x - bias) * scaling - overlong, ±max_clip)`.

    x is `(scored - 0.5) * 2`, or with `reward.shape=raw` the scored reward itself; r is 0 for a turn that answers
    nothing.
    Source: the reward of AReaL's math agents (arXiv 2505.24298).

    Args:
        scored: [K], rewards of the score stage, such as 1 for a right answer and 0 for a wrong one; None: no answer.
        reward: the knobs.
        lengths: [K], tokens of each completion; needed only with a limit.
        limit: the largest number of tokens of a completion; None: no penalty for length.
    """
    penalties = [0.0] * len(scored) if limit is None else [overlong(n, limit, reward) for n in lengths]
    return [
        0.0 if value is None else _shaped(value, penalty, reward)
        for value, penalty in zip(scored, penalties, strict=True)
    ]


def _shaped(value: float, penalty: float, reward: Reward) -> float:
    x = value if reward.shape == "raw" else (value - 0.5) * 2
    return max(-reward.max_clip, min(reward.max_clip, (x - reward.bias) * reward.scaling - penalty))


def overlong(length: int, limit: int, reward: Reward) -> float:
    """Compute the penalty for a completion of `length` tokens.

    It rises linearly from 0 to `overlong_penalty` over the last `overlong_tokens` tokens before `limit`.

    Source: the soft overlong punishment of DAPO (arXiv 2503.14476, equation 13).
    """
    excess = length - (limit - reward.overlong_tokens)
    return reward.overlong_penalty * min(1.0, max(0, excess) / reward.overlong_tokens)


def least_reward(reward: Reward, limit: int | None = None) -> float:
    """Compute the reward of a wrong answer of `limit` tokens: the least of a turn, unless scorers give less than 0."""
    return turn_rewards([0.0], reward, [limit or 0], limit)[0]


def turn_returns(rewards: Sequence[float], turn_discount: float, after: float = 0.0) -> list[float]:
    """Compute the return of each turn: `R_k = r_k + turn_discount * R_{k+1}`, with `after` as R after the last turn."""
    returns: list[float] = []
    following = after
    for value in reversed(rewards):
        following = value + turn_discount * following
        returns.append(following)
    return returns[::-1]
