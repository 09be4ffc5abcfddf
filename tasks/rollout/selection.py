"""The selection of played episodes for training. The others are stored too, as `rejected` with a reason."""

from collections.abc import Sequence
from dataclasses import replace

from configs.schema import Rollout
from storage.records import Trajectory, Turn
from tasks.score.environment import heard

_PLAYED = ("completed", "truncated")


def select_episodes(group: Sequence[Trajectory], settings: Rollout) -> list[Trajectory]:
    """Return the episodes of one problem, with those marked as rejected that training leaves out.

    A group is rejected if its success rate is out of bounds. Otherwise the best `group_size` of `generation_size`
    episodes are kept. Both rules use what the environment said. Keeping the best biases the group: the baseline of
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
    """Return the share of right turns among all graded turns of the played episodes; None if there is none.

    The rate counts turns, as the baselines do: training can still learn from a group whose episodes all succeed, some
    of them only at the second turn.
    """
    right = [is_right(turn) for row in group if row.status in _PLAYED for turn in answered(row)]
    return sum(right) / len(right) if right else None


def answered(row: Trajectory) -> list[Turn]:
    """Return the graded turns: all but those that answer nothing, such as calls of tools."""
    calls = set(row.ungraded)
    return [turn for index, turn in enumerate(row.turns) if index not in calls and turn.verdict != "none"]


def is_right(turn: Turn) -> bool:
    """Return whether a turn is right for its environment; the scorer, which decides in training, comes later."""
    return heard(turn.verdict, turn.reward) == "correct"


def is_rejected(group: Sequence[Trajectory], selected: Sequence[Trajectory]) -> bool:
    """Return whether `select` rejected all played episodes of a group."""
    return success_rate(group) is not None and success_rate(selected) is None


def _rank(row: Trajectory) -> tuple[bool, float, int, int]:
    """Return a sort key, best first: played, high mean reward of its graded turns, short, early in the group."""
    turns = answered(row)
    mean = sum(turn.reward for turn in turns) / max(1, len(turns))
    return (row.status not in _PLAYED, -mean, len(row.token_ids), row.sample)


def _reject(row: Trajectory, reason: str) -> Trajectory:
    return replace(row, status="rejected", reason=reason) if row.status in _PLAYED else row
