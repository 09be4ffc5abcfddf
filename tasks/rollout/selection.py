"""The selection of played episodes for training. The others are stored too, as `rejected` with a reason."""

from collections.abc import Sequence
from dataclasses import replace

from configs.schema import Rollout
from storage.records import Trajectory

_PLAYED = ("completed", "truncated")


def select_episodes(group: Sequence[Trajectory], settings: Rollout) -> list[Trajectory]:
    """Return the episodes of one problem, with those marked as rejected that training leaves out.

    A group is rejected if its success rate is out of bounds. Otherwise the best `group_size` of `generation_size`
    episodes are kept. Both rules use the environment's rewards. Keeping the best biases the group: the baseline of
    lucky episodes is too high.
    """
    rate = success_rate(group)
    low, high = settings.success_rate_lb, settings.success_rate_ub
    if rate is not None and not low <= rate <= high:
        return [_reject(row, f"success rate of its group outside [{low:g}, {high:g}]: {rate:.2f}") for row in group]
    if settings.generation_size in (None, settings.group_size):
        return list(group)
    kept = {row.trajectory_id for row in sorted(group, key=_rank)[: settings.group_size]}
    reason = f"not among the best {settings.group_size} of {settings.generation_size}"
    return [row if row.trajectory_id in kept else _reject(row, reason) for row in group]


def success_rate(group: Sequence[Trajectory]) -> float | None:
    """Return the share of right turns among all turns of the played episodes; None if no episode was played.

    The rate counts turns, as the baselines do: training can still learn from a group whose episodes all succeed, some
    of them only at the second turn.
    """
    rewards = [turn.reward for row in group if row.status in _PLAYED for turn in row.turns]
    return sum(reward > 0 for reward in rewards) / len(rewards) if rewards else None


def is_rejected(group: Sequence[Trajectory], selected: Sequence[Trajectory]) -> bool:
    """Return whether `select` rejected all played episodes of a group."""
    return success_rate(group) is not None and success_rate(selected) is None


def _rank(row: Trajectory) -> tuple[bool, float, int, int]:
    """Return a sort key, best first: played, high mean reward of its turns, short, early in the group."""
    mean = sum(turn.reward for turn in row.turns) / max(1, len(row.turns))
    return (row.status not in _PLAYED, -mean, len(row.token_ids), row.sample)


def _reject(row: Trajectory, reason: str) -> Trajectory:
    return replace(row, status="rejected", reason=reason) if row.status in _PLAYED else row
