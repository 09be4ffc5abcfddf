"""Training samples: the parts of a trajectory and its scores that an update needs.

Example: a trajectory with two turns and `turn_discount=0.5`. Its first answer (tokens 10, 11) is wrong, its second
(token 12) right; tokens 1, 2, 3 are the prompt, and 4, 5 the feedback.

    token_ids    1   2   3   10    11    4   5   12       turns (start, end): (3, 5), (7, 8)
    action_mask  no  no  no  yes   yes   no  no  yes      scores (reward and success): 0, 1
    logprobs     0   0   0   -0.1  -0.2  0   0   -0.3

With the default rewards (±1) its sample has token_ids=[1, 2, 3, 10, 11, 4, 5, 12], actions=[3, 4, 7],
turn_of_action=[0, 0, 1], behaviour=[-0.1, -0.2, -0.3], graded=[True, True], successes=[0, 1], rewards=[-1, 1],
returns=[-0.5, 1]. A turn with the verdict `none`, which answers nothing, is not graded and has the reward 0.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from configs.schema import Reward
from storage.records import LAST_TURN_CUT, Score, Trajectory
from tasks.train.reward_shaping import least_reward, turn_returns, turn_rewards

TRAINABLE = ("completed", "truncated")

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Logprobs = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]
ScoresByTurn = dict[tuple[str, int], Score]
"""Scores by trajectory and turn."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One trajectory, ready for training, with T tokens, A action tokens, K turns and S sequences.

    Arrays [A] hold entries for action tokens only, in their order, so nothing about prompt or feedback tokens can enter
    the loss.
    """

    trajectory_id: str
    problem_id: str
    truncated: bool
    token_ids: Ints  # T
    starts: Ints  # S, the start of each sequence in token_ids; [0] unless a chat template rewrote history
    actions: Ints  # A, positions of the action tokens in token_ids, rising, and none of them in starts
    turn_of_action: Ints  # A, in 0..K-1
    behaviour: Logprobs  # A, recorded while sampling
    versions: Ints  # A, policy version that sampled the token
    in_loss: Bools  # A, false if `mask_truncated` leaves the token out of the loss
    graded: Bools  # K, false for turns that answer nothing, such as calls of tools
    successes: Floats  # K
    rewards: Floats  # K, shaped
    returns: Floats  # K
    turn_discount: float
    after: float | None = 0.0  # return after the last turn: 0 if the episode ended; None: only a critic can estimate it


def build_samples(
    trajectories: Iterable[Trajectory], scores: Iterable[Score], reward: Reward, *, mask_truncated: bool = False
) -> list[Sample]:
    """Build a sample from each trainable trajectory and its scores.

    The samples are sorted by trajectory id, so the order of the input does not matter.

    A trajectory is trainable if its status is completed or truncated and it has at least one action token. Scores of
    other trajectories are ignored. With `mask_truncated`, turns that the token limit cut are left out of the loss, but
    they count in the baseline of their group.

    Raises:
        ValueError: an id occurs twice, a turn has no score or two, a logprob or reward is not finite, or a row
            contradicts itself; the message names the trajectories.
    """
    rows = sorted((row for row in trajectories if _trainable(row)), key=lambda row: row.trajectory_id)
    _refuse(
        "occur more than once",
        [row.trajectory_id for row, following in pairwise(rows) if row.trajectory_id == following.trajectory_id],
    )
    _refuse(
        "have action tokens that are not exactly the spans of their turns",
        [row.trajectory_id for row in rows if not _consistent(row)],
    )
    by_turn = _by_turn(scores)
    # Check the scores, not shaped rewards: the clip turns a NaN or infinite reward into a finite one.
    _refuse("have NaN or infinite rewards", [row.trajectory_id for row in rows if not _finite_scores(row, by_turn)])
    samples = [_sample(row, by_turn, reward, mask_truncated) for row in rows]
    bad = [sample.trajectory_id for sample in samples if not np.isfinite(sample.behaviour).all()]
    _refuse("have NaN or infinite logprobs", bad)
    return samples


def within_staleness(samples: Sequence[Sample], version: int, max_head_offpolicyness: int) -> list[Sample]:
    """Keep the samples whose tokens were all sampled at most `max_head_offpolicyness` versions before `version`.

    The version stored with each token counts, not the start time of an episode or rollout.
    """
    return [sample for sample in samples if version - int(sample.versions.min()) <= max_head_offpolicyness]


def with_known_returns(samples: Sequence[Sample]) -> list[Sample]:
    """Keep the samples with known returns: without a critic, unplayed turns of unknown number cannot be estimated."""
    return [sample for sample in samples if sample.after is not None]


def name_some(ids: Sequence[str], most: int = 5) -> str:
    """List the first few ids and the number of the others, for error messages."""
    more = f" and {len(ids) - most} more" if len(ids) > most else ""
    return ", ".join(ids[:most]) + more


def _refuse(fault: str, ids: list[str]) -> None:
    if ids:
        raise ValueError(f"these trajectories {fault}: {name_some(ids)}. Leave them out, or collect them again")


def _trainable(row: Trajectory) -> bool:
    return row.status in TRAINABLE and bool(row.turns) and any(row.action_mask)


def _consistent(row: Trajectory) -> bool:
    """Return whether the arrays are equally long and the mask is true exactly on the turns' tokens.

    No turn's token may be the first token of a sequence.
    """
    lengths = {len(row.token_ids), len(row.action_mask), len(row.logprobs), len(row.versions)}
    return (
        len(lengths) == 1
        and row.sequence_starts[0] == 0
        and not any(row.action_mask[start] for start in row.sequence_starts)
        and np.array_equal(np.flatnonzero(row.action_mask), _spans(row))
    )


def _spans(row: Trajectory) -> Ints:
    return np.concatenate([np.arange(turn.start, turn.end) for turn in row.turns])


def _by_turn(scores: Iterable[Score]) -> ScoresByTurn:
    by_turn: ScoresByTurn = {}
    for score in scores:
        key = (score.trajectory_id, score.turn)
        if key in by_turn:
            raise ValueError(f"two scores for turn {score.turn} of {score.trajectory_id}: give the rows of one scorer")
        by_turn[key] = score
    return by_turn


def _scores_of(row: Trajectory, by_turn: ScoresByTurn) -> list[Score]:
    missing = [k for k in range(len(row.turns)) if (row.trajectory_id, k) not in by_turn]
    if missing:
        raise ValueError(f"no score for turns {missing} of {row.trajectory_id}: score this data set first")
    return [by_turn[row.trajectory_id, k] for k in range(len(row.turns))]


def _finite_scores(row: Trajectory, by_turn: ScoresByTurn) -> bool:
    return all(math.isfinite(score.reward) and math.isfinite(score.success) for score in _scores_of(row, by_turn))


def _sample(row: Trajectory, by_turn: ScoresByTurn, reward: Reward, mask_truncated: bool) -> Sample:
    scores = _scores_of(row, by_turn)
    scored = [None if score.verdict == "none" else score.reward for score in scores]
    lengths = [turn.end - turn.start for turn in row.turns]
    limit = _limit(row) if reward.overlong_tokens else None
    rewards, after = turn_rewards(scored, reward, lengths, limit), _after(row, least_reward(reward, limit))
    actions, turn_of_action = _spans(row), np.repeat(np.arange(len(row.turns)), lengths)
    cut = np.array([turn.finish_reason == "length" for turn in row.turns])
    return Sample(
        trajectory_id=row.trajectory_id,
        problem_id=row.problem_id,
        truncated=row.status == "truncated",
        token_ids=np.asarray(row.token_ids, np.int64),
        starts=np.asarray(row.sequence_starts, np.int64),
        actions=actions,
        turn_of_action=turn_of_action,
        behaviour=np.asarray(row.logprobs, np.float32)[actions],
        versions=np.asarray(row.versions, np.int64)[actions],
        in_loss=~(cut[turn_of_action] & mask_truncated),
        graded=np.asarray([score.verdict != "none" for score in scores], np.bool_),
        successes=np.asarray([score.success for score in scores], np.float64),
        rewards=np.asarray(rewards, np.float64),
        returns=np.asarray(turn_returns(rewards, row.turn_discount, after or 0.0), np.float64),
        turn_discount=row.turn_discount,
        after=after,
    )


def _after(row: Trajectory, least: float) -> float | None:
    """Return the return after the last turn, or None if it is unknown.

    It is 0 for an episode that ended, even if the token limit cut its last answer, since that answer was graded. Each
    turn for which the context had no room counts as the `least` reward; otherwise the policy would gain by filling the
    context while it is wrong. If the number of those turns is unknown, the return is unknown too.

    Example: -3 after two wrong turns of five, with rewards of ±1 and turn_discount 1.
    """
    if row.status != "truncated" or row.unplayed_turns == 0:
        return 0.0
    if row.unplayed_turns > 0:
        return turn_returns([least] * row.unplayed_turns, row.turn_discount)[0]
    return 0.0 if row.reason == LAST_TURN_CUT else None  # the row was stored before unplayed turns were counted


def _limit(row: Trajectory) -> int:
    """Read the token limit of one turn from the stored sampling settings."""
    return int(json.loads(row.sampling)["max_new_tokens"])
