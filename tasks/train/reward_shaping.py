"""Rewards and returns of an episode's turns, computed from their scores."""

from collections.abc import Iterable, Sequence

from configs.score import Reward


def settled(reward: Reward, scorer: str, scored: Iterable[float]) -> Reward:
    """Fill in the empty knobs `shape` and `least` for the problems of a scorer, which gave the rewards `scored`."""
    shape, least = reward.shape_of(scorer), reward.least
    if shape == "success" or not reward.counts_unfinished:
        least = 0.0
    elif least is None:
        least = min([0.0, *scored])
    return reward.model_copy(update={"shape": shape, "least": least})


def turn_rewards(
    scored: Sequence[float | None],
    reward: Reward,
    lengths: Sequence[int] = (),
    limit: int | None = None,
    limits: Sequence[int] = (),
) -> list[float]:
    """Compute the reward of each turn: `r = clip((x - bias) * scaling - overlong, ±max_clip)`.

    x is `(scored - 0.5) * 2`, or with `reward.shape=raw` the scored reward itself. A turn that answers nothing has only
    the penalty for its length: `r = clip(-overlong, ±max_clip)`, or 0 with `unfinished=leave-out`.
    Source: the reward of AReaL's math agents (arXiv 2505.24298).

    Args:
        scored: [K], rewards of the score stage, such as 1 for a right answer and 0 for a wrong one; None: no answer.
        reward: the knobs.
        lengths: [K], tokens of each completion; needed only with a limit.
        limit: the largest number of tokens of a completion; None: no penalty for length.
        limits: [K], the same for each turn, where requests had limits of their own; empty: all have `limit`.
    """
    penalties = [0.0] * len(scored)
    if limit is not None:
        each = limits or [limit] * len(scored)
        penalties = [overlong(n, most, reward, limit) for n, most in zip(lengths, each, strict=True)]
    return [_shaped(value, penalty, reward) for value, penalty in zip(scored, penalties, strict=True)]


def _shaped(value: float | None, penalty: float, reward: Reward) -> float:
    if value is None:
        return max(-reward.max_clip, -penalty) if reward.counts_unfinished and penalty else 0.0
    x = value if reward.shape == "raw" else (value - 0.5) * 2
    return max(-reward.max_clip, min(reward.max_clip, (x - reward.bias) * reward.scaling - penalty))


def overlong(length: int, limit: int, reward: Reward, usual: int | None = None) -> float:
    """Compute the penalty for a completion of `length` tokens.

    It rises linearly from 0 to `overlong_penalty` over the last `overlong_tokens` tokens before `limit`, or over fewer
    in proportion if the limit is below the `usual` one.

    Source: the soft overlong punishment of DAPO (arXiv 2503.14476, equation 13).
    """
    rise = reward.overlong_tokens * limit / (usual or limit)
    return reward.overlong_penalty * min(1.0, max(0, length - (limit - rise)) / rise)


def least_reward(reward: Reward, limit: int | None = None) -> float:
    """Compute the reward of a turn of `limit` tokens that scored `reward.least`, as a wrong answer by default."""
    return turn_rewards([reward.least or 0.0], reward, [limit or 0], limit)[0]


def turn_returns(rewards: Sequence[float], turn_discount: float, after: float = 0.0) -> list[float]:
    """Compute the return of each turn: `R_k = r_k + turn_discount * R_{k+1}`, with `after` as R after the last turn."""
    returns: list[float] = []
    following = after
    for value in reversed(rewards):
        following = value + turn_discount * following
        returns.append(following)
    return returns[::-1]
