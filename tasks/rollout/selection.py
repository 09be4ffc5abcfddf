"""Which of the episodes that were played are trained on. The others are kept, as `rejected` with a reason."""

from collections.abc import Sequence
from dataclasses import replace

from configs.schema import Rollout
from storage.records import Trajectory

_PLAYED = ("completed", "truncated")


def select(group: Sequence[Trajectory], settings: Rollout) -> list[Trajectory]:
    """The episodes of one problem with those marked that are not trained on.

    First the group is judged by its success rate, then the best `group_size` of `generation_size` are taken. Both
    go by what the environment said. Keeping the best biases the group: its baseline is that of good luck.
    """
    rate = success_rate(group)
    low, high = settings.success_rate_lb, settings.success_rate_ub
    if rate is not None and not low <= rate <= high:
        return [_reject(row, f"success rate of its group outside [{low:g}, {high:g}]: {rate:.2f}") for row in group]
    if settings.generation_size in (None, settings.group_size):
        return list(group)
    kept = {row.trajectory_id for row in sorted(group, key=_goodness)[: settings.group_size]}
    reason = f"not among the best {settings.group_size} of {settings.generation_size}"
    return [row if row.trajectory_id in kept else _reject(row, reason) for row in group]


def success_rate(group: Sequence[Trajectory]) -> float | None:
    """Right turns over all turns of the episodes that were played; None where none was.

    By turn, as the baselines are: a group whose episodes all succeed, but some at the second turn only, still has
    something to learn from.
    """
    rewards = [turn.reward for row in group if row.status in _PLAYED for turn in row.turns]
    return sum(reward > 0 for reward in rewards) / len(rewards) if rewards else None


def is_rejected(group: Sequence[Trajectory], selected: Sequence[Trajectory]) -> bool:
    """Whether `select` left nothing of a group that was played."""
    return success_rate(group) is not None and success_rate(selected) is None


def _goodness(row: Trajectory) -> tuple[bool, float, int, int]:
    """Best first: played, right most of its turns, short, early in the group."""
    mean = sum(turn.reward for turn in row.turns) / max(1, len(row.turns))
    return (row.status not in _PLAYED, -mean, len(row.token_ids), row.sample)


def _reject(row: Trajectory, reason: str) -> Trajectory:
    return replace(row, status="rejected", reason=reason) if row.status in _PLAYED else row
