"""The selection of played episodes for training. The others are stored too, as `rejected` with a reason."""

from collections.abc import Sequence
from dataclasses import replace

from configs.schema import Rollout
from storage.records import Trajectory, Turn
from tasks.score.environment import heard

_PLAYED = ("completed", "truncated")


def select_episodes(group: Sequence[Trajectory], settings: Rollout, *, unfinished: bool = False) -> list[Trajectory]:
    """Return the episodes of one problem, with those marked as rejected that training leaves out.

    A group is rejected if its success rate is out of bounds. Otherwise the best `group_size` of `generation_size`
    episodes are kept. Both rules use what the environment said. Keeping the best biases the group: the baseline of
    lucky episodes is too high.

    With `unfinished`, an episode that failed by the policy's fault was played, too, and the lack of a verdict counts as
    a wrong turn. Otherwise a policy could make the groups look right in which it is wrong.
    """
    rate = success_rate(group, unfinished=unfinished)
    low, high = settings.success_rate_lb, settings.success_rate_ub
    if rate is not None and not low <= rate <= high:
        reason = f"success rate of its group outside [{low:g}, {high:g}]: {rate:.2f}"
        return [_reject(row, reason, unfinished) for row in group]
    if settings.generation_size in (None, settings.group_size):
        return list(group)
    ranked = sorted(group, key=lambda row: _rank(row, unfinished))
    kept = {row.trajectory_id for row in ranked[: settings.group_size]}
    reason = f"not among the best {settings.group_size} of {settings.generation_size}"
    return [row if row.trajectory_id in kept else _reject(row, reason, unfinished) for row in group]


def success_rate(group: Sequence[Trajectory], *, unfinished: bool = False) -> float | None:
    """Return the share of right turns among all graded turns of the played episodes; None if there is none.

    The rate counts turns, as the baselines do: training can still learn from a group whose episodes all succeed, some
    of them only at the second turn.
    """
    right = [is_right(turn) for row in group if _is_played(row, unfinished) for turn in answered(row)]
    right += [False for row in group if unfinished and row.fault == "policy" and _is_played(row, unfinished)]
    return sum(right) / len(right) if right else None


def answered(row: Trajectory) -> list[Turn]:
    """Return the graded turns: all but those that answer nothing, such as calls of tools."""
    calls = set(row.ungraded)
    return [turn for index, turn in enumerate(row.turns) if index not in calls and turn.verdict != "none"]


def is_right(turn: Turn) -> bool:
    """Return whether a turn is right for its environment; the scorer, which decides in training, comes later."""
    return heard(turn.verdict, turn.reward) == "correct"


def is_rejected(group: Sequence[Trajectory], selected: Sequence[Trajectory], *, unfinished: bool = False) -> bool:
    """Return whether `select_episodes` rejected all played episodes of a group."""
    before, after = (success_rate(rows, unfinished=unfinished) for rows in (group, selected))
    return before is not None and after is None


def _is_played(row: Trajectory, unfinished: bool) -> bool:
    return row.status in _PLAYED or (unfinished and row.status == "failed" and row.fault == "policy")


def _rank(row: Trajectory, unfinished: bool) -> tuple[bool, float, int, int]:
    """Return a sort key, best first: played, high mean reward of its graded turns, short, early in the group."""
    turns = answered(row)
    mean = sum(turn.reward for turn in turns) / max(1, len(turns))
    return (not _is_played(row, unfinished), -mean, len(row.token_ids), row.sample)


def _reject(row: Trajectory, reason: str, unfinished: bool) -> Trajectory:
    return replace(row, status="rejected", reason=reason) if _is_played(row, unfinished) else row
