"""How an episode ended: whether it is trained on, and its return after the last turn.

With `reward.unfinished=least`, rewards of ±1 and a turn discount of 1:

    ending                                                    return after the last turn
    the agent ended, and the last answer was wrong             0
    the token limit cut the last answer, which was graded      0
    no room in the context for the next turn                  -1
    no room for the next turn, and two more were to come      -3
    no room for the next turn, after a right answer            0, if nobody knows how many were to come
    too many requests, or sampling until the deadline         -1
    an error of the agent, the environment or the engine      not trained on
"""

from configs.score import Reward
from storage.records import LAST_TURN_CUT, Trajectory
from tasks.train.reward_shaping import turn_returns

_PLAYED = ("completed", "truncated")


def is_trainable(row: Trajectory, reward: Reward) -> bool:
    """Return whether the trajectory has action tokens and ended in a way that is trained on.

    An episode that failed by the policy's fault is trained on, unless `reward.unfinished=leave-out`.
    """
    if not (row.turns and any(row.action_mask)):
        return False
    if not reward.counts_unfinished:
        return row.status in _PLAYED
    return row.fault != "set-up" and (row.status in _PLAYED or (row.status == "failed" and row.fault == "policy"))


def return_after(row: Trajectory, reward: Reward, least: float, *, right: bool) -> float | None:
    """Compute the return after the last turn, or None if it is unknown.

    It is 0 for an episode that ended, even if the token limit cut its last answer, since that answer was graded. Each
    turn for which the context had no room counts as the `least` reward; otherwise the policy would gain by filling the
    context while it is wrong. If the number of those turns is unknown, or the policy ended the episode otherwise, one
    turn counts. With `reward.unfinished=leave-out` the return is then unknown.

    Args:
        row: the trajectory.
        reward: the knobs.
        least: the least reward of a turn.
        right: whether a verdict on a turn was right already, so that nothing was to follow.

    Example: -3 after two wrong turns of five, with rewards of ±1 and turn_discount 1.
    """
    if row.status == "truncated" and row.unplayed_turns > 0:
        return turn_returns([least] * row.unplayed_turns, row.turn_discount)[0]
    # A row without a count and with another reason was stored before unplayed turns were counted.
    uncounted = row.status == "truncated" and row.unplayed_turns < 0 and row.reason != LAST_TURN_CUT
    if reward.counts_unfinished:
        return least if (uncounted or row.fault == "policy") and not right else 0.0
    return None if uncounted else 0.0
