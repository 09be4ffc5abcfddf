"""The words about stored episodes, for rows in memory; `words.sql` has the same for tables.

A graded turn is one that answers; calls of tools and other turns with the verdict `none` are not graded. Many functions
take the successes of an episode: 1 or 0 for each graded turn, in order.

Example: an episode calls a tool, answers wrong, then right. Its successes are [0, 1]; its first turn is wrong.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, TypeVar

from storage.grouping import grouped
from storage.records import LAST_TURN_CUT, Trajectory

PLAYED = ("completed", "truncated")
"""The statuses of episodes that were neither rejected nor failed."""

_Key = TypeVar("_Key", bound=Hashable)


def is_trainable(row: Trajectory) -> bool:
    """Return whether the trajectory has action tokens and ended in a way that is trained on.

    An episode that failed by the policy's fault is trained on.
    """
    if not (row.turns and any(row.action_mask)):
        return False
    return row.fault != "set-up" and (row.status in PLAYED or (row.status == "failed" and row.fault == "policy"))


def misses_answers(row: Trajectory) -> bool:
    """Return whether the episode ended before its last answer; older programs did not count unplayed turns."""
    return row.unplayed_turns > 0 or (row.unplayed_turns < 0 and row.reason != LAST_TURN_CUT)


def is_stale(oldest: int, version: int, allowed: int) -> bool:
    """Return whether a trajectory whose oldest token is of policy version `oldest` is too old to train `version` on."""
    return version - oldest > allowed


def graded(scores: Iterable[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Return the scores of the graded turns of each trajectory, in the order of the turns.

    Raises:
        ValueError: a turn has two scores.
    """
    by_turn: dict[tuple[str, int], Mapping[str, Any]] = {}
    for score in scores:
        name, turn = score["trajectory_id"], score["turn"]
        if by_turn.setdefault((name, turn), score) is not score:
            raise ValueError(f"two scores for turn {turn} of {name}: give the rows of one scorer")
    return grouped(
        (name, by_turn[name, turn]) for name, turn in sorted(by_turn) if by_turn[name, turn]["verdict"] != "none"
    )


def first_turn(success: Sequence[float]) -> float:
    """Return the success of the first graded turn; 0 without one."""
    return float(success[0]) if len(success) else 0.0


def any_turn(success: Sequence[float]) -> float:
    """Return the best success of the graded turns; 0 without one."""
    return float(max(success, default=0.0))


def by_turn(episodes: Iterable[Sequence[float]]) -> list[list[float]]:
    """Return the numbers of the first graded turns, of the second ones, and so on, of the episodes that reached them.

    >>> by_turn([[0, 1], [1], []])
    [[0, 1], [1]]
    """
    return [[number for number in turn if number is not None] for turn in zip_longest(*episodes)]


def without_variance(earned: Iterable[tuple[_Key, Hashable]]) -> dict[_Key, bool]:
    """Return for each group and turn whether all its episodes earned the same, so that there is nothing to learn."""
    return {key: len({*values}) == 1 for key, values in grouped(earned).items()}
