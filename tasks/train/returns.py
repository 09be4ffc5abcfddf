"""Returns of the turns of an episode: shaped rewards, the completions that each pays, and what follows the last turn.

Credit: a reward pays every completion that the agent had received before the reward was given. So in a chain a turn
earns its own reward and all later ones; candidates of one request, and requests that ran at the same time, earn the
same future and not each other's past; and a reward at the end of the episode pays all. A completion that the agent no
longer waited for, and so never received, is paid what was given after it was asked for: a policy cannot escape a bad
end by writing longer than anybody waits. A penalty for a completion itself, such as for its length, falls
on it and on those that the agent had when it asked, never on candidates of the same request.

Example: a planner (P) asks two workers (A, B) at once and answers (Q). It hears A first. Both are graded when both
are there, with 1 and 0; nobody grades P and Q. In the order in which they are stored:

    turn      A  B  P  Q
    received  1  2  0  3     position among the completions that the agent got
    asked     1  1  0  3     number of completions that the agent had when it asked
    paid      3  3  0  0     number of completions that the agent had when the turn's reward was given: the reward pays
                             the completions at the positions 0, 1, 2; 0: the turn got no reward
    depth     1  1  0  2     number of turns in the longest line of causes before it, in a chain 0, 1, 2 …
    return    1  1  g  0     with the turn discount g, since the rewards of A and B come one turn deeper than P

Endings, with rewards of ±1 and a turn discount of 1:

    ending                                                    return after the last turn
    the agent ended, and the last answer was wrong             0
    the token limit cut the last answer, which was graded      0
    no room in the context for the next turn                  -1, or less (`tasks.train.samples.bounded`)
    no room for the next turn, and two more were to come      -3
    no room for the next turn, after a right answer            0
    too many requests, or sampling until the deadline         -1, or less
    an error of the agent, the environment or the engine      not trained on

If only the last answer is paid (`score.tries=last`), the missing answer is that: each of these episodes earns the least
reward, and none of its answers earns anything.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from configs.score import Reward
from storage.records import Score, Trajectory
from tasks.score.verdict import has_failed
from tasks.tables.words import misses_answers

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


def settled(reward: Reward, scorer: str, scored: Iterable[float]) -> Reward:
    """Fill in the empty knobs `shape` and `least` for the problems of a scorer, which gave the rewards `scored`."""
    shape, least = reward.shape_of(scorer), reward.least
    if shape == "success":
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
    the penalty for its length: `r = clip(-overlong, ±max_clip)`.
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
    most = math.inf if reward.max_clip is None else reward.max_clip
    if value is None:
        return max(-most, -penalty) if penalty else 0.0
    x = value if reward.shape == "raw" else (value - 0.5) * 2
    return max(-most, min(most, (x - reward.bias) * reward.scaling - penalty))


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
    backward = accumulate(reversed(rewards), lambda later, value: value + turn_discount * later, initial=after)
    return [*backward][:0:-1]


def failed_by_graders(scores: Iterable[Score]) -> dict[str, str]:
    """Return the trajectories that are left out because a grader failed on a turn, with its reason.

    All of their turns are left out, since what a turn earns includes later rewards, and the missing one is not known.
    """
    return {score.trajectory_id: score.reason for score in scores if has_failed(score.verdict, score.reason)}


def is_unfinished(row: Trajectory) -> bool:
    """Return whether the policy's own behaviour ended a trainable episode before its last answer."""
    return misses_answers(row) and (row.status == "truncated" or row.fault == "policy")


def return_after(row: Trajectory, least: float, *, once: bool = False) -> float:
    """Compute the return after the last turn of an unfinished episode.

    Each answer that is missing counts as the `least` reward; otherwise the policy would gain by filling the context, or
    by giving up, while it is wrong. If their number is unknown, one counts.

    Args:
        row: the trajectory.
        least: the least reward of a turn.
        once: whether only the last answer is paid, so that one counts whatever their number.

    Example: -3 after two wrong turns of five, with rewards of ±1 and turn_discount 1.
    """
    if row.unplayed_turns > 0 and not once:
        return turn_returns([least] * row.unplayed_turns, row.turn_discount)[0]
    return least


@dataclass(frozen=True)  # without slots, since it keeps `is_chain`
class Causes:
    """The order of requests, answers and rewards in an episode of K turns, of which the agent received N."""

    position: Ints  # K, of the turn among the completions that the agent got, or would have had if it never got it
    asked: Ints  # K, number of completions that the agent had when it asked; 0..K-1 in a chain
    got: Bools  # K, whether the agent got it
    depth: Ints  # K, number of turns in the longest line of causes before it; 0..K-1 in a chain
    paid: Ints  # K, number of completions that the agent had when the turn's reward was given; 0: none was given

    @cached_property
    def is_chain(self) -> bool:
        """Return whether each turn was asked for, received and paid before the next one, in the stored order."""
        numbers = np.arange(len(self.position))
        in_turn = all(np.array_equal(column, numbers) for column in (self.position, self.asked, self.depth))
        return in_turn and bool(self.got.all() and ((self.paid == 0) | (self.paid == numbers + 1)).all())

    @property
    def latest(self) -> int:
        """Return the turn that the agent got last or, if the end came before it got one more, that one."""
        return int(self.position.argmax())

    def returns(self, rewards: Floats, penalties: Floats, discount: float, after: float) -> Floats:
        """Compute the returns [K] from the rewards [K] and penalties [K] of the turns.

        A reward is discounted by `discount` as often as the deepest turn that the agent had when the reward was given
        is deeper than the turn that earns it. A penalty is due for its turn and for those that the agent had when it
        asked; so is the reward of a turn that nobody paid (`paid` is 0), which is a penalty for its length. `after`
        comes one turn deeper than the deepest. In a chain: `R_k = r_k + p_k + discount * R_{k+1}`, with `after` as R
        after the last.
        """
        if self.is_chain:
            return np.array(turn_returns((rewards + penalties).tolist(), discount, after))
        turns = [turn for turn in np.argsort(self.position, kind="stable").tolist() if self.got[turn]]  # N, as received
        own = penalties + np.where(self.paid > 0, 0.0, rewards)
        # Each turn is one deeper than the deepest of those that the agent had when it asked.
        due = np.bincount(self.paid, rewards, len(turns) + 1) + np.bincount(self.asked, discount * own, len(turns) + 1)
        deepest = np.maximum.accumulate(self.depth[turns]).tolist()  # N, depth of the deepest turn received so far
        deepest.append(deepest[-1] + 1 if turns else 0)
        ahead = [after] * (len(turns) + 1)  # N + 1, return when the agent gets its k-th completion, and after the last
        for k in range(len(turns) - 1, -1, -1):
            ahead[k] = due[k + 1] + discount ** (deepest[k + 1] - deepest[k]) * ahead[k + 1]
        # A turn that the agent never got may be deeper than what came next: until it is reached nothing is discounted.
        at_once = np.bincount(self.paid, rewards, len(turns) + 1) + np.bincount(self.asked, own, len(turns) + 1)

        def earned_by(k: int, depth: int) -> float:
            level = next(n for n in range(k, len(deepest)) if deepest[n] >= depth)
            return float(at_once[k + 1 : level + 1].sum() + discount ** (deepest[level] - depth) * ahead[level])

        earned = [earned_by(k, depth) for k, depth in zip(self.position.tolist(), self.depth.tolist(), strict=True)]
        result: Floats = np.array(earned) + own
        return result


@cache
def chain(turns: int) -> Causes:
    """Return the causes of a chain: each turn was asked for when the one before it had been received and paid.

    All chains of as many turns share one object, whose arrays cannot be written.
    """
    numbers, got, paid = np.arange(turns, dtype=np.int64), np.ones(turns, np.bool_), np.arange(1, turns + 1)
    for array in (numbers, got, paid):
        array.flags.writeable = False
    return Causes(numbers, numbers, got, numbers, paid)


def causes_of(row: Trajectory, graded: Bools) -> Causes:
    """Return the causes of an episode's turns, by its columns `received`, `asked` and `paid`.

    A graded turn [K] for which no reward was given while the agent ran is paid at the end. Without the columns the
    episode is a chain.
    """
    if not row.received:
        return chain(len(row.turns))
    received, paid, asked = (np.array(column, np.int64) for column in (row.received, row.paid, row.asked))
    got = received >= 0
    given = np.where((paid == 0) & graded, got.sum(), paid)
    return Causes(np.where(got, received, asked), asked, got, _depth(received, row.asked), np.where(got, given, 0))


def in_order(row: Trajectory) -> bool:
    """Return whether the columns `received`, `asked` and `paid` are empty, or describe an order that is possible."""
    turns, got = len(row.turns), [position for position in row.received if position >= 0]
    columns = row.received, row.asked, row.paid
    return not any(columns) or (
        all(len(column) == turns for column in columns)
        and sorted(got) == list(range(len(got)))
        and min(row.received) >= -1
        and all(
            0 <= asked <= (received if received >= 0 else len(got)) and (paid == 0 or 0 <= received < paid <= len(got))
            for received, asked, paid in zip(*columns, strict=True)
        )
    )


def _depth(received: Ints, asked: list[int]) -> Ints:
    """Count the turns [K] in the longest line of causes before each turn."""
    depth, deepest = np.zeros_like(received), [-1]  # of the first 0, 1, 2 … completions that the agent got
    for turn in np.argsort(np.where(received < 0, len(asked), received)).tolist():  # those that it never got come last
        depth[turn] = deepest[asked[turn]] + 1
        deepest.append(max(deepest[-1], int(depth[turn])))
    return depth
