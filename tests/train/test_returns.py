"""Rewards and returns of turns by hand, and endings.

An episode that the policy ended without a verdict earns the least, and one that an error ended nothing.
"""

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs import ConfigError, load
from configs.score import Reward
from configs.score import Score as Scoring
from storage.records import LAST_TURN_CUT, Fault, Score, Status
from tasks.train.returns import least_reward, overlong, turn_rewards
from tasks.train.samples import build_samples
from tests.support.train_helpers import make_scores, make_trajectory


def test_a_turn_that_answers_nothing_earns_nothing() -> None:
    """A call of a tool is no wrong answer: without a score its reward is 0 or, if it is too long, the penalty."""
    reward = Reward(bias=0.5, overlong_tokens=20)
    assert turn_rewards([None, 1.0, None], reward, [100, 10, 10], limit=100) == [-1.0, 0.5, 0.0]


@given(st.lists(st.one_of(st.none(), st.floats(-10, 10)), max_size=6))
def test_raw_rewards_are_those_of_the_scorer(scored: list[float | None]) -> None:
    """With shape raw a reward stays as it is but for bias, scaling and clip."""
    assert turn_rewards(scored, Reward(shape="raw")) == [value or 0.0 for value in scored]
    assert turn_rewards([250.0, -1e6], Reward(shape="raw")) == [250.0, -1e6]  # taken as they are
    shaped = turn_rewards(scored, Reward(shape="raw", bias=1.0, scaling=2.0, max_clip=4.0))
    assert shaped == [0.0 if value is None else max(-4.0, min(4.0, (value - 1) * 2)) for value in scored]
    assert least_reward(Reward(shape="raw")) == 0


def test_overlong_penalty_by_hand() -> None:
    """Limit 100, last 20 tokens: no penalty up to 80, half at 90, all at 100; subtracted before the clip.

    A request with a lower limit of its own has the rise in proportion.
    """
    reward = Reward(overlong_tokens=20, overlong_penalty=0.5)
    assert [overlong(length, 100, reward) for length in (1, 80, 90, 100)] == [0, 0, 0.25, 0.5]
    assert turn_rewards([1.0, 0.0], reward, [90, 100], limit=100) == [0.75, -1.5]
    assert turn_rewards([0.0], Reward(overlong_tokens=20, max_clip=1.2), [100], limit=100) == [-1.2]
    assert turn_rewards([1.0], reward) == [1.0]
    lengths, limits = [80, 90, 40, 45, 50, 1], [100, 100, 50, 50, 50, 1]
    shaped = turn_rewards([1.0] * 6, Reward(overlong_tokens=20), lengths, 100, limits)
    assert shaped == pytest.approx([1.0, 0.5, 1.0, 0.5, 0.0, 0.0])


OVERLONG = Reward(overlong_tokens=30, overlong_penalty=2.0)


@pytest.mark.parametrize("reward", [Reward(), Reward(bias=0.5, scaling=3), OVERLONG], ids=str)
@given(st.sampled_from([0.0, 1.0]), st.integers(0, 100))
def test_leaving_turns_unplayed_never_pays(reward: Reward, success: float, length: int) -> None:
    """Unplayed turns count with the least reward, and no turn that is played earns less."""
    limit = 100 if reward.overlong_tokens else None
    assert turn_rewards([success], reward, [length], limit) >= [least_reward(reward, limit)]


ENVIRONMENT = Scoring(type="environment")


def after(*successes: float, reward: Reward | None = None, **columns: Any) -> float:
    """Compute the return after the last turn of a trajectory."""
    row = make_trajectory("t", [[10]] * len(successes), **{"status": "truncated", **columns})
    (sample,) = build_samples([row], make_scores("t", *successes), reward or Reward())
    return sample.after


def test_nothing_follows_an_answer_that_was_scored() -> None:
    """A scored answer that the token limit cut ends the episode; a value on top of its verdict would pay twice."""
    assert after(1, status="completed") == 0
    assert after(1, finish_reason="length", unplayed_turns=0) == 0
    assert after(1, finish_reason="length", reason=LAST_TURN_CUT) == 0  # of stores that lack the column


def test_turns_without_room_count_as_wrong_ones() -> None:
    """Five wrong turns earn -5; two that fill the context earn no more, stored or discounted."""
    assert after(0, 0, unplayed_turns=3, fault="policy") == -3
    assert after(0, 0, unplayed_turns=3, turn_discount=0.5) == -1.75
    rows = [make_trajectory("long", [[10], [11]], status="truncated", unplayed_turns=3)]
    rows.append(make_trajectory("short", [[10]] * 5))
    scores = make_scores("long", *[0] * 2) + make_scores("short", *[0] * 5)
    long, short = build_samples(rows, scores, Reward())
    assert long.returns.tolist() == short.returns[:2].tolist() == [-5, -4]


def test_an_unknown_number_of_turns_without_room_counts_once() -> None:
    """Filling the context, too many requests and the deadline are worth no more than one more wrong answer."""
    assert after(0, 0) == -1  # of stores that lack the fault
    assert after(0, 0, fault="policy") == after(0, 0, fault="policy", status="failed") == -1
    assert after(0, fault="policy", reward=Reward(bias=0.5, scaling=2)) == -3
    assert after(0, 0, finish_reason="length") == -1  # the agent asked for another turn


def test_an_episode_that_was_right_already_owes_nothing() -> None:
    """What follows a right answer had no purpose. Where an environment pays every step, no verdict says so."""
    assert after(0, 1, fault="policy") == 0
    paid = [replace(score, reward=0.1, success=1.0) for score in make_scores("t", 0, 0)]
    row = make_trajectory("t", [[10], [11]], status="truncated", fault="policy")
    (sample,) = build_samples([row], paid, Reward(least=-1), scorers=ENVIRONMENT)
    assert sample.after == -1


STATUSES: list[Status] = ["completed", "truncated", "rejected", "failed"]
FAULTS: list[Fault] = ["", "policy", "set-up"]


def test_the_fault_decides_what_is_trained_on() -> None:
    """Failures by the policy's fault are trained on, rejected groups and what an error ended are not."""
    rows = [
        make_trajectory(f"{status} {fault}".strip(), [[10]], status=status, fault=fault)
        for status, fault in itertools.product(STATUSES, FAULTS)
    ]
    scores = [score for row in rows for score in make_scores(row.trajectory_id, 0)]
    played = {"completed", "completed policy", "truncated", "truncated policy"}
    assert {sample.trajectory_id for sample in build_samples(rows, scores, Reward())} == played | {"failed policy"}


def test_the_least_reward_is_that_of_the_scorer() -> None:
    """A wrong answer where verdicts are given; else the lowest score of the update, or 0; or as the knob says."""
    rows = [make_trajectory("hole", [[10]]), make_trajectory("lost", [[10]], status="truncated")]
    for lowest, knob, least in ((-1, None, -1), (0.5, None, 0), (-1, -3.0, -3)):
        scores = [Score("hole", 0, "wrong", 0.0, "", "", "", lowest), Score("lost", 0, "none", 0.0, "", "", "", 0.0)]
        _, lost = build_samples(rows, scores, Reward(least=knob), scorers=ENVIRONMENT)
        assert (lost.earned, lost.returns.tolist()) == (least, [least])


def test_each_scorer_has_its_own_shape_and_least_reward() -> None:
    """One data set may hold sums, which are judged, and games, which are rewarded."""
    scorers = Scoring(type={"default": "math-verify", "game": "environment"})
    rows = [make_trajectory(name, [[10]], problem=name, source=name, status="truncated") for name in ("game", "sum")]
    scores = [Score(name, 0, "wrong", 0.0, "", "", "", value) for name, value in (("game", -7.0), ("sum", 0.0))]
    game, of_sums = build_samples(rows, scores, Reward(), scorers=scorers)
    assert (game.rewards.tolist(), game.after) == ([-7], -7)
    assert (of_sums.rewards.tolist(), of_sums.after) == ([-1], -1)
    (own,) = build_samples(rows[:1], scores[:1], Reward(), scorers=Scoring(type="my.module:score"))
    assert own.earned == -7


def test_a_least_reward_without_effect_is_refused() -> None:
    """Where all scorers give verdicts, the least reward is that of a wrong answer."""
    given = ["reward.least=-2", "score.type=environment"]
    with pytest.raises(ConfigError, match="least=-2.0 has no effect where all scorers give verdicts"):
        load("smoke", given[:1])
    with pytest.raises(ConfigError, match="least=-2.0 has no effect without"):
        load("smoke", [*given, "reward.shape=success"])
    assert load("smoke", given).reward.least == -2
