"""From stored rows to training samples: what of a trajectory and its scores the update needs."""

import json
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


@dataclass(frozen=True, slots=True)
class Sample:
    """One trajectory, ready for training. T tokens, of them A sampled (the action tokens), K turns, S sequences.

    What belongs to action tokens is stored for these alone, in their order: nothing that happens on a prompt
    or on feedback can leak into the loss.
    """

    trajectory_id: str
    problem_id: str
    truncated: bool
    token_ids: Ints  # T
    starts: Ints  # S, where each sequence begins in token_ids; one, 0, unless a template rewrote history
    actions: Ints  # A, their positions in token_ids, rising and never in starts
    turn_of_action: Ints  # A, in 0..K-1
    behaviour: Logprobs  # A, recorded when sampling
    versions: Ints  # A, policy version that sampled the token
    in_loss: Bools  # A, false where `mask_truncated` leaves the token out of the loss
    successes: Floats  # K
    rewards: Floats  # K, shaped
    returns: Floats  # K
    turn_discount: float
    after: float | None = 0.0  # return behind the last turn: 0 at an end; None where only a critic can tell


def build_samples(
    trajectories: Iterable[Trajectory], scores: Iterable[Score], reward: Reward, *, mask_truncated: bool = False
) -> list[Sample]:
    """The trainable trajectories with their scores, sorted by id, so that the order of arrival never matters.

    Trainable: status completed or truncated, with at least one action token. Scores of other trajectories
    are ignored. With `mask_truncated` turns that the token limit cut are in no loss; in a group's baseline
    they count.

    Raises:
        ValueError: an id occurs twice, a turn has no score or two, a logprob or reward is not finite, or a row
            contradicts itself; the message names the trajectories.
    """
    rows = sorted((row for row in trajectories if _trainable(row)), key=lambda row: row.trajectory_id)
    _refuse(
        "occur more than once",
        [row.trajectory_id for row, after in pairwise(rows) if row.trajectory_id == after.trajectory_id],
    )
    _refuse(
        "have action tokens that are not exactly the spans of their turns",
        [row.trajectory_id for row in rows if not _consistent(row)],
    )
    successes = _successes(scores)
    samples = [_sample(row, successes, reward, mask_truncated) for row in rows]
    # Successes, not rewards: the clip would make a number of what is none.
    for what, name in (("behaviour", "logprobs"), ("successes", "rewards")):
        bad = [sample.trajectory_id for sample in samples if not np.isfinite(getattr(sample, what)).all()]
        _refuse(f"have NaN or infinite {name}", bad)
    return samples


def within_staleness(samples: Sequence[Sample], version: int, max_head_offpolicyness: int) -> list[Sample]:
    """Those of which no token was sampled more than `max_head_offpolicyness` versions before `version`.

    What counts is the version stored with each token, not when anything was started.
    """
    return [sample for sample in samples if version - int(sample.versions.min()) <= max_head_offpolicyness]


def known(samples: Sequence[Sample]) -> list[Sample]:
    """Those whose returns are known: without a critic, nothing stands for turns of which nobody knows the number."""
    return [sample for sample in samples if sample.after is not None]


def name_some(ids: Sequence[str], most: int = 5) -> str:
    """The first few ids and how many more there are, for error messages."""
    more = f" and {len(ids) - most} more" if len(ids) > most else ""
    return ", ".join(ids[:most]) + more


def _refuse(fault: str, ids: list[str]) -> None:
    if ids:
        raise ValueError(f"these trajectories {fault}: {name_some(ids)}. Leave them out, or collect them again")


def _trainable(row: Trajectory) -> bool:
    return row.status in TRAINABLE and bool(row.turns) and any(row.action_mask)


def _consistent(row: Trajectory) -> bool:
    """Whether the arrays have one length and the mask is true on the turns' spans alone, none at a sequence's start."""
    lengths = {len(row.token_ids), len(row.action_mask), len(row.logprobs), len(row.versions)}
    return (
        len(lengths) == 1
        and row.sequence_starts[0] == 0
        and not any(row.action_mask[start] for start in row.sequence_starts)
        and np.array_equal(np.flatnonzero(row.action_mask), _spans(row))
    )


def _spans(row: Trajectory) -> Ints:
    return np.concatenate([np.arange(turn.start, turn.end) for turn in row.turns])


def _successes(scores: Iterable[Score]) -> dict[tuple[str, int], float]:
    successes: dict[tuple[str, int], float] = {}
    for score in scores:
        key = (score.trajectory_id, score.turn)
        if key in successes:
            raise ValueError(f"two scores for turn {score.turn} of {score.trajectory_id}: give the rows of one scorer")
        successes[key] = score.success
    return successes


def _sample(row: Trajectory, scores: dict[tuple[str, int], float], reward: Reward, mask_truncated: bool) -> Sample:
    missing = [k for k in range(len(row.turns)) if (row.trajectory_id, k) not in scores]
    if missing:
        raise ValueError(f"no score for turns {missing} of {row.trajectory_id}: score this data set first")
    successes = [scores[row.trajectory_id, k] for k in range(len(row.turns))]
    lengths = [turn.end - turn.start for turn in row.turns]
    limit = _limit(row) if reward.overlong_tokens else None
    rewards, after = turn_rewards(successes, reward, lengths, limit), _after(row, least_reward(reward, limit))
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
        successes=np.asarray(successes, np.float64),
        rewards=np.asarray(rewards, np.float64),
        returns=np.asarray(turn_returns(rewards, row.turn_discount, after or 0.0), np.float64),
        turn_discount=row.turn_discount,
        after=after,
    )


def _after(row: Trajectory, least: float) -> float | None:
    """Return behind the last turn.

    Nothing follows an episode that ended, also by an answer that the token limit cut: it was judged. Turns for which
    the context had no room count as the `least` reward each; otherwise it would pay to fill the context while wrong.
    Where their number is not known, nor is the return: None.

    Example: after two wrong turns of five, with rewards of ±1 and turn_discount 1, -3.
    """
    if row.status != "truncated" or row.unplayed_turns == 0:
        return 0.0
    if row.unplayed_turns > 0:
        return turn_returns([least] * row.unplayed_turns, row.turn_discount)[0]
    return 0.0 if row.reason == LAST_TURN_CUT else None  # stored before turns were counted


def _limit(row: Trajectory) -> int:
    """The token limit of a turn when it was sampled."""
    return int(json.loads(row.sampling)["max_new_tokens"])
