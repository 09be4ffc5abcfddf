"""Rewards and returns of turns, by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import Reward
from tasks.rewards.shaping import turn_returns, turn_rewards

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


def test_returns_by_hand() -> None:
    """A turn earns its own reward and, discounted, what comes after it; nothing of what came before."""
    assert turn_returns([-1.0, -1.0, 1.0], 0.5) == [-1.25, -0.5, 1.0]
    assert turn_returns([-1.0, 1.0], 0.0) == [-1.0, 1.0]
    assert turn_returns([], 1.0) == []


@given(st.lists(FINITE, max_size=6), st.floats(0, 1))
def test_returns_are_discounted_sums(rewards: list[float], discount: float) -> None:
    """The recursion equals the sum it stands for."""
    direct = [sum(r * discount**j for j, r in enumerate(rewards[k:])) for k in range(len(rewards))]
    assert turn_returns(rewards, discount) == pytest.approx(direct, abs=1e-9)
