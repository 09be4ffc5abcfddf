"""Training samples: the parts of a trajectory and its scores that an update needs.

Example: a trajectory with two turns and `turn_discount=0.5`. Its first answer (tokens 10, 11) is wrong, its second
(token 12) right; tokens 1, 2, 3 are the prompt, and 4, 5 the feedback.

    token_ids    1   2   3   10    11    4   5   12       turns (start, end): (3, 5), (7, 8)
    action_mask  no  no  no  yes   yes   no  no  yes      scores (reward and success): 0, 1
    logprobs     0   0   0   -0.1  -0.2  0   0   -0.3

With the default rewards (±1) its sample has token_ids=[1, 2, 3, 10, 11, 4, 5, 12], actions=[3, 4, 7],
turn_of_action=[0, 0, 1], behaviour=[-0.1, -0.2, -0.3], graded=[True, True], successes=[0, 1], rewards=[-1, 1],
returns=[-0.5, 1]. A turn with the verdict `none`, which answers nothing, is not graded and has the reward 0, or a
penalty for its length.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from configs.score import Reward
from configs.score import Score as ScoreSettings
from storage.errors import first_few
from storage.grouping import grouped
from storage.records import HIGHEST_LOGPROB, Experts, Score, Trajectory, unpack_experts
from tasks.tables.words import is_stale, is_trainable
from tasks.train import returns
from tasks.train.returns import Bools as Bools
from tasks.train.returns import Causes
from tasks.train.returns import Floats as Floats
from tasks.train.returns import Ints as Ints

Logprobs = npt.NDArray[np.float32]
MATH_VERIFY = ScoreSettings()
FAR = -9000.0
"""Smallest logprob that is trained on: servers write -9999 for minus infinity. Admission refuses those below -87.34;
old stores may have some, and objectives bound what they weigh."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The T tokens of a trajectory, of which A are action tokens, in S sequences."""

    trajectory_id: str
    problem_id: str
    token_ids: Ints  # T
    starts: Ints  # S, the start of each sequence in token_ids; [0] unless a chat template rewrote history
    actions: Ints  # A, positions of the action tokens in token_ids, rising, and none of them in starts
    experts: Experts | None = field(default=None, kw_only=True)  # T, that the trainer uses, too; None: its own choice


@dataclass(frozen=True, slots=True)
class Sample(Tokens):
    """One trajectory, ready for training, with K turns.

    Arrays [A] hold entries for action tokens only, in their order, so nothing about prompt or feedback tokens can enter
    the loss.
    """

    truncated: bool
    turn_of_action: Ints  # A, in 0..K-1
    behaviour: Logprobs  # A, recorded while sampling
    versions: Ints  # A, policy version that sampled the token
    in_loss: Bools  # A, false if `mask_truncated` leaves the token out of the loss
    graded: Bools  # K, false for turns that answer nothing, such as calls of tools
    successes: Floats  # K
    rewards: Floats  # K, shaped
    returns: Floats  # K
    turn_discount: float
    causes: Causes
    after: float = 0.0  # return after the last turn: 0 if the episode ended
    uncounted: bool = False  # the policy ended the episode, and nobody knows how many answers are missing
    source: str = ""  # of its problem
    member: str = ""  # of a mixture: then it is the source

    @property
    def earned(self) -> float:
        """What the whole episode earned: the sum of its rewards and of what follows its last turn, not discounted."""
        return float(self.rewards.sum() + self.after)

    @property
    def by_position(self) -> list[tuple[int, float]]:
        """For each turn [K] its position among the completions that the agent got, and its return."""
        return list(zip(self.causes.position.tolist(), self.returns.tolist(), strict=True))


def build_samples(
    trajectories: Iterable[Trajectory],
    scores: Iterable[Score],
    reward: Reward,
    *,
    scorers: ScoreSettings = MATH_VERIFY,
    mask_truncated: bool = False,
    replay: bool = False,
) -> list[Sample]:
    """Build a sample from each trainable trajectory (`words.is_trainable`) that graders could judge, and its scores.

    The samples are sorted by trajectory id, so the order of the input does not matter. What an agent's row says of
    itself was checked when it was admitted (`tasks.rollout.admission`); of all rows `check_sampled` asks again.

    Args:
        trajectories: scores of those that are not trainable are ignored.
        scores: one for each turn.
        reward: how scores become rewards.
        scorers: the section `score`: its `tries`, and values for what is empty in `reward`, by scorer.
        mask_truncated: leave turns that the token limit cut out of the loss. They count in the baseline of their group.
        replay: train with the experts that the engine chose.

    Raises:
        ValueError: an id occurs twice, a turn has no score or two, a reward is not finite, or experts are missing; the
            message names the trajectories.
    """
    by_turn: dict[tuple[str, int], Score] = {}
    for score in scores:
        if by_turn.setdefault((score.trajectory_id, score.turn), score) is not score:
            raise ValueError(f"two scores for turn {score.turn} of {score.trajectory_id}: give the rows of one scorer")
    failed = returns.failed_by_graders(by_turn.values())
    graded = (row for row in trajectories if row.trajectory_id not in failed and is_trainable(row))
    rows = sorted(graded, key=lambda row: row.trajectory_id)
    scored = [_scores_of(row, by_turn) for row in rows]
    _refuse_faulty(rows, scored, replay=replay)
    names = [scorers.of(row.source) for row in rows]
    given = grouped((name, score) for name, of_row in zip(names, scored, strict=True) for score in of_row)
    knobs = {
        name: returns.settled(reward, name, [score.reward for score in own if score.verdict != "none"])
        for name, own in given.items()
    }
    given_to = zip(rows, scored, names, strict=True)
    samples = bounded([_sample(row, of_row, scorers, knobs[name], mask_truncated) for row, of_row, name in given_to])
    return [_routed(sample, row) for sample, row in zip(samples, rows, strict=True)] if replay else samples


def _refuse_faulty(rows: Sequence[Trajectory], scored: Sequence[Sequence[Score]], *, replay: bool) -> None:
    """Raise ValueError if an id occurs twice, a reward is not finite, or experts are missing; `rows` are sorted."""
    twice = [row.trajectory_id for row, following in pairwise(rows) if row.trajectory_id == following.trajectory_id]
    # Check the scores, not shaped rewards: the clip turns a NaN or infinite reward into a finite one.
    broken = [
        row.trajectory_id
        for row, of_row in zip(rows, scored, strict=True)
        if not all(math.isfinite(score.reward) and math.isfinite(score.success) for score in of_row)
    ]
    unrouted = [row.trajectory_id for row in rows if replay and not row.experts]
    for fault, ids in (
        ("occur more than once", twice),
        ("have NaN or infinite rewards", broken),
        ("have no experts of the engine, which train.routing_replay=true needs", unrouted),
    ):
        if ids:
            raise ValueError(f"these trajectories {fault}: {first_few(ids, 5)}. Leave them out, or collect them again")


def check_sampled(samples: Sequence[Sample], policy: Any, newest: float) -> None:
    """Refuse numbers that no policy can have sampled: rows of other programs and of old stores may have some.

    Args:
        samples: those of an update.
        policy: the configuration of the policy's model.
        newest: the newest version that may have sampled.

    Raises:
        ValueError: the message names the trajectories.
    """
    limits = {"token_ids": (0, policy.vocab_size - 1), "behaviour": (FAR, HIGHEST_LOGPROB), "versions": (-1, newest)}
    for column, (least, most) in {**limits, "experts": (-1, getattr(policy, "num_experts", 0) - 1)}.items():
        given = {each.trajectory_id: values for each in samples if (values := getattr(each, column)) is not None}
        if given and outside(np.concatenate([*given.values()], axis=None), least, most):
            wrong = first_few([name for name, values in given.items() if outside(values, least, most)], 5)
            limit = f"{column.replace('behaviour', 'logprobs')} outside of {least} to {most}"
            remedy = "exclude them (problems.exclusions), or collect or import them again"
            raise ValueError(f"the trajectories {wrong} have {limit}, which this policy cannot have sampled: {remedy}")


def outside(values: np.ndarray, least: float, most: float) -> bool:
    """Return whether any of the values is smaller, larger or NaN."""
    return not (least <= values.min() and values.max() <= most)


def _routed(sample: Sample, row: Trajectory) -> Sample:
    """Add the experts that the engine chose.

    Raises:
        ValueError: they are damaged.
    """
    try:
        experts = unpack_experts(row.experts)
    except ValueError as error:
        raise ValueError(f"{row.trajectory_id}: {error}") from None
    if len(experts) != len(row.token_ids):
        raise ValueError(f"{row.trajectory_id} has experts of {len(experts)} tokens, but {len(row.token_ids)} tokens")
    return replace(sample, experts=experts)


def by_problem(samples: Sequence[Tokens]) -> list[list[int]]:
    """List the indices of the samples of each problem, in the order in which problems occur."""
    return [*grouped((sample.problem_id, index) for index, sample in enumerate(samples)).values()]


def by_member(samples: Sequence[Sample]) -> list[list[int]]:
    """List the indices of the samples of each member of a mixture; without one those of all samples."""
    return [*grouped((sample.member, index) for index, sample in enumerate(samples)).values()]


def bounded(samples: list[Sample]) -> list[Sample]:
    """Lower what episodes earn that the policy ended, if nobody knows how many answers are missing.

    Such an episode earns no more than the worst other one of its group, neither in all nor from its last turn on, where
    it gave up. Otherwise an agent that gives three answers would pay a policy for giving up: -1 instead of -3.

    Example, with rewards of ±1: one episode is wrong, wrong and right (-1), one three times wrong (-3), and one gives
    up in its second turn, after a wrong answer (-2). From its second turn on the second one earned -2, so this is what
    the third one gets for giving up: -3 in all.
    """
    result = list(samples)
    for indices in by_problem(samples) if any(sample.uncounted for sample in samples) else ():
        worst = min(samples[index].earned for index in indices)
        from_turn = grouped(pair for index in indices for pair in samples[index].by_position)
        for index in indices:
            sample = samples[index]
            if sample.uncounted:
                last = sample.causes.latest
                of_turn = min(from_turn[int(sample.causes.position[last])]) - float(sample.returns[last])
                steps = sample.turn_discount if sample.graded[last] else 1.0  # to what follows the turn
                lacking = [worst - sample.earned, *([of_turn / steps] if steps else [])]
                result[index] = _with_ending(sample, min(lacking))
    return result


def _with_ending(sample: Sample, amount: float) -> Sample:
    """Add to what follows the last turn or, where the last turn is the answer that is missing, to its reward."""
    causes, rewards, paid, after = sample.causes, sample.rewards.copy(), sample.causes.paid.copy(), sample.after
    if causes.got[causes.latest] and not sample.graded[causes.latest]:
        rewards[causes.latest] += amount
        paid[causes.latest] = causes.got.sum()  # when the agent had all its completions
        causes = replace(causes, paid=paid)
    else:
        after += amount
    earned = causes.returns(rewards, np.zeros(len(rewards)), sample.turn_discount, after)
    return replace(sample, causes=causes, rewards=rewards, after=after, returns=earned)


def within_staleness(samples: Sequence[Sample], version: int, max_head_offpolicyness: int) -> list[Sample]:
    """Keep the samples whose tokens were all sampled at most `max_head_offpolicyness` versions before `version`.

    The version stored with each token counts, not the start time of an episode or rollout.
    """
    return [sample for sample in samples if not is_stale(int(sample.versions.min()), version, max_head_offpolicyness)]


def _scores_of(row: Trajectory, by_turn: Mapping[tuple[str, int], Score]) -> list[Score]:
    missing = [k for k in range(len(row.turns)) if (row.trajectory_id, k) not in by_turn]
    if missing:
        raise ValueError(f"no score for turns {missing} of {row.trajectory_id}: score this data set first")
    return [by_turn[row.trajectory_id, k] for k in range(len(row.turns))]


def _sample(row: Trajectory, scores: Sequence[Score], scorers: ScoreSettings, reward: Reward, masks: bool) -> Sample:
    """Build a sample; `reward` has the knobs for the problems of its scorer."""
    last = scorers.pays_last(row.source)
    graded = np.array([score.verdict != "none" for score in scores], np.bool_)
    causes = returns.causes_of(row, graded)
    graded &= causes.got
    successes = np.array([score.success for score in scores], np.float64)
    # The limit of the length of one turn, by the stored sampling settings.
    limit = int(json.loads(row.sampling)["max_new_tokens"]) if reward.overlong_tokens else None
    # An answer that met a limit of a custom scorer, or that it failed on, gets the least reward at most.
    own = reward.shape == "raw" and scorers.of(row.source) != "environment"
    failed, least = ("timeout", "error") if own else (), reward.least or 0.0
    judged = reward.shape == "success" or last  # a success says that nothing is missing
    ended = returns.is_unfinished(row) and not (judged and bool((successes[graded] > 0.5).any()))
    paid = graded & (causes.paid == causes.paid[graded].max(initial=0)) & (not ended) if last else graded
    scored = [
        (min(score.reward, least) if score.verdict in failed else score.reward) if is_paid else None
        for score, is_paid in zip(scores, paid, strict=True)
    ]
    lengths = [turn.end - turn.start for turn in row.turns]
    rewards = np.array(returns.turn_rewards(scored, reward, lengths, limit, row.limits), np.float64)
    after = returns.return_after(row, returns.least_reward(reward, limit), once=last) if ended else 0.0
    actions = np.concatenate([np.arange(turn.start, turn.end) for turn in row.turns])
    turn_of_action = np.repeat(np.arange(len(row.turns)), lengths)
    cut = np.array([turn.finish_reason == "length" for turn in row.turns])
    sample = Sample(
        trajectory_id=row.trajectory_id,
        problem_id=row.problem_id,
        truncated=row.status == "truncated",
        token_ids=np.asarray(row.token_ids, np.int64),
        starts=np.asarray(row.sequence_starts, np.int64),
        actions=actions,
        turn_of_action=turn_of_action,
        behaviour=np.asarray(row.logprobs, np.float32)[actions],
        versions=np.asarray(row.versions, np.int64)[actions],
        in_loss=~(cut & masks)[turn_of_action],
        graded=graded,
        successes=successes,
        rewards=rewards,
        returns=causes.returns(rewards, np.zeros(len(rewards)), row.turn_discount, 0.0),
        turn_discount=row.turn_discount,
        causes=causes,
        uncounted=ended and row.unplayed_turns <= 0,
        source=row.source,
    )
    return _with_ending(sample, after) if after else sample
