"""From a judge's verdicts to the rewards and returns of an episode's turns."""

from collections.abc import Sequence

from configs.schema import Reward


def turn_rewards(successes: Sequence[float], reward: Reward) -> list[float]:
    """Shaped reward of each turn: `r = clip(((success - 0.5) * 2 - bias) * scaling, ±max_clip)`.

    Source: the reward of AReaL's math agents (arXiv 2505.24298).

    Args:
        successes: [K], 1 for a right answer and 0 for a wrong one.
        reward: the knobs.
    """
    raw = (((success - 0.5) * 2 - reward.bias) * reward.scaling for success in successes)
    return [max(-reward.max_clip, min(reward.max_clip, value)) for value in raw]


def turn_returns(rewards: Sequence[float], turn_discount: float) -> list[float]:
    """Return of each turn: `R_k = r_k + turn_discount * R_{k+1}`, and 0 after the last of the K turns."""
    returns: list[float] = []
    following = 0.0
    for value in reversed(rewards):
        following = value + turn_discount * following
        returns.append(following)
    return returns[::-1]
