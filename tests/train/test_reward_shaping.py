"""Rewards and returns of turns, by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.score import Reward
from tasks.train.reward_shaping import least_reward, overlong, turn_returns, turn_rewards

FINITE = st.floats(-100, 100)


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        (Reward(), [-1.0, 1.0]),
        (Reward(bias=0.5), [-1.5, 0.5]),
        (Reward(bias=0.5, scaling=4), [-6.0, 2.0]),
        (Reward(bias=0.5, scaling=4, max_clip=3), [-3.0, 2.0]),
    ],
)
def test_rewards_by_hand(reward: Reward, expected: list[float]) -> None:
    """((success - 0.5) * 2 - bias) * scaling, clipped on both sides, in this order."""
    assert turn_rewards([0.0, 1.0], reward) == expected


def test_a_turn_that_answers_nothing_earns_nothing() -> None:
    """A call of a tool is no wrong answer: without a score its reward is 0 or, if it is too long, the penalty.

    In runs that leave unfinished episodes out, it is 0 whatever the length.
    """
    reward = Reward(bias=0.5, overlong_tokens=20)
    assert turn_rewards([None, 1.0, None], reward, [100, 10, 10], limit=100) == [-1.0, 0.5, 0.0]
    before = reward.model_copy(update={"unfinished": "leave-out"})
    assert turn_rewards([None, 1.0, None], before, [100, 10, 10], limit=100) == [0.0, 0.5, 0.0]


def test_overlong_penalties_follow_the_limit_of_each_request() -> None:
    """The penalty begins at four fifths of the limit, and is whole at the limit: 100 tokens, or 50, or 1."""
    reward = Reward(overlong_tokens=20)
    lengths, limits = [80, 90, 40, 45, 50, 1], [100, 100, 50, 50, 50, 1]
    assert turn_rewards([1.0] * 6, reward, lengths, 100, limits) == pytest.approx([1.0, 0.5, 1.0, 0.5, 0.0, 0.0])


@given(st.lists(st.one_of(st.none(), st.floats(-10, 10)), max_size=6))
def test_raw_rewards_are_those_of_the_scorer(scored: list[float | None]) -> None:
    """With shape raw a reward stays as it is but for bias, scaling and clip."""
    assert turn_rewards(scored, Reward(shape="raw")) == [value or 0.0 for value in scored]
    shaped = turn_rewards(scored, Reward(shape="raw", bias=1.0, scaling=2.0, max_clip=4.0))
    assert shaped == [0.0 if value is None else max(-4.0, min(4.0, (value - 1) * 2)) for value in scored]
    assert least_reward(Reward(shape="raw")) == 0


def test_overlong_penalty_by_hand() -> None:
    """Limit 100, last 20 tokens: no penalty up to 80, half at 90, all at 100; subtracted before the clip."""
    reward = Reward(overlong_tokens=20, overlong_penalty=0.5)
    assert [overlong(length, 100, reward) for length in (1, 80, 90, 100)] == [0, 0, 0.25, 0.5]
    assert turn_rewards([1.0, 0.0], reward, [90, 100], limit=100) == [0.75, -1.5]
    assert turn_rewards([0.0], Reward(overlong_tokens=20, max_clip=1.2), [100], limit=100) == [-1.2]
    assert turn_rewards([1.0], reward) == [1.0]


def test_returns_by_hand() -> None:
    """A turn earns its own reward and, discounted, later rewards; it earns no earlier ones."""
    assert turn_returns([-1.0, -1.0, 1.0], 0.5) == [-1.25, -0.5, 1.0]
    assert turn_returns([-1.0, 1.0], 0.0) == [-1.0, 1.0]
    assert turn_returns([], 1.0) == []


@given(st.lists(FINITE, max_size=6), st.floats(0, 1))
def test_returns_are_discounted_sums(rewards: list[float], discount: float) -> None:
    """The recursion equals the direct sum."""
    direct = [sum(r * discount**j for j, r in enumerate(rewards[k:])) for k in range(len(rewards))]
    assert turn_returns(rewards, discount) == pytest.approx(direct, abs=1e-9)


@given(
    st.lists(st.tuples(st.sampled_from([0.0, 1.0]), st.integers(0, 100)), min_size=1, max_size=6),
    st.integers(1, 6),
    st.floats(0, 1),
    st.sampled_from([Reward(), Reward(bias=0.5, scaling=3), Reward(overlong_tokens=30, overlong_penalty=2.0)]),
)
def test_leaving_turns_unplayed_never_pays(
    turns: list[tuple[float, int]], played: int, discount: float, reward: Reward
) -> None:
    """Unplayed turns count with the least reward, so the return is never larger than with the turns played."""
    limit = 100 if reward.overlong_tokens else None
    rewards = turn_rewards([success for success, _ in turns], reward, [length for _, length in turns], limit)
    least = [least_reward(reward, limit)] * len(rewards[played:])
    left = turn_returns(least, discount)[0] if least else 0.0
    assert turn_returns(rewards[:played], discount, left)[0] <= turn_returns(rewards, discount)[0] + 1e-9
