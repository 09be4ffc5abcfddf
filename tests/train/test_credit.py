"""Credit: which rewards pay which completions, in episodes whose turns are no plain chain."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.algorithm_parts import Advantage
from configs.score import Reward
from storage.records import Score
from tasks.train.advantages import Observed, estimate
from tasks.train.returns import in_order, turn_returns
from tasks.train.samples import Sample, build_samples
from tests.support.train_helpers import make_scores, make_trajectory
from tests.support.trees import TREES, Tree

RAW = Reward(shape="raw")
RETURNS: dict[str, list[float]] = {
    "chain": [0.25, 0.5, 1], "candidates": [1, 1, 1], "candidate that goes on": [0.5, 0.5, 0.5, 1],
    "retry": [0.5, 1], "planner and workers": [1, 1, 0.5, 0], "compaction": [0.25, 0.5, 1],
    "tool loop": [0.25, 0.5, 1], "two sub-agents": [0.5, 1, 0.5, 0], "unused branch": [0.25, 0.5, 0.5, 1],
    "nobody waited": [1, 1],
}  # fmt: skip
"""Returns of each tree's turns, as stored, with a turn discount of 0.5."""


def sample_of(tree: Tree, name: str = "t", **made: Any) -> Sample:
    (sample,) = build_samples([tree.trajectory(name, **made)], tree.scores(name), RAW)
    return sample


def advantages_of(samples: Sequence[Sample], **knobs: Any) -> list[list[float]]:
    """Return the advantages of the turns, all of which have tokens."""
    observed = [Observed(np.zeros(len(sample.actions))) for sample in samples]
    by_token = estimate(samples, observed, Advantage(**{"normalisation": "none", **knobs})).advantages
    firsts = [np.unique(sample.turn_of_action, return_index=True)[1] for sample in samples]
    return [tokens[first].tolist() for tokens, first in zip(by_token, firsts, strict=True)]


@pytest.mark.parametrize("name", TREES)
def test_returns_of_ten_trees_by_hand(name: str) -> None:
    """A reward pays what the agent had received before it was given, and is discounted by depth, not by places."""
    assert sample_of(TREES[name], turn_discount=0.5).returns.tolist() == RETURNS[name]


def test_baselines_are_those_of_the_order_of_answers() -> None:
    """The candidate that the agent got first is compared with the other episode's first, wherever it is stored."""
    candidates = replace(TREES["candidates"], rewards=[None, -2, None])
    samples = [sample_of(TREES["candidate that goes on"], "a"), sample_of(candidates, "b")]
    assert [sample.causes.position.tolist() for sample in samples] == [[1, 2, 0, 3], [0, 1, 2]]
    assert [sample.returns.tolist() for sample in samples] == [[1, 1, 1, 1], [-2, -2, -2]]
    by_place = np.array([1, 1, 1]) - (1 - 2) / 2
    assert advantages_of(samples, baseline="turn") == [[*by_place.tolist(), 0.0], (-by_place).tolist()]


def test_an_answer_that_nobody_waited_for_does_not_escape() -> None:
    """It is no graded turn, though the scorer found it right, but it earns what came after it was asked for.

    A scorer may grade turns that no environment saw: every completion that the agent got shares that.
    """
    (sample,) = build_samples([TREES["candidates"].trajectory()], make_scores("t", 1, 0, 0), RAW)
    assert sample.returns.tolist() == [1, 1, 1]
    tree = TREES["nobody waited"]
    scores = [Score("t", turn, "correct", 1.0, "", "", "", 1.0) for turn in range(2)]
    (sample,) = build_samples([tree.trajectory()], scores, RAW)
    assert (sample.returns.tolist(), sample.graded.tolist()) == ([1, 1], [True, False])
    too_long = Tree(follows=[-1, -1, -1], rewards=[None, None, 1], asked=[0, 0, 1], received=[0, -1, 1], paid=[0, 0, 2])
    assert sample_of(too_long, turn_discount=0.5).returns.tolist() == [0.5, 0.5, 1]
    order: dict[str, Any] = {"received": [0, -1], "asked": [0, 1], "paid": [0, 0]}
    lost = make_trajectory("t", [[10], [11]], status="failed", fault="policy", **order)
    none = [replace(score, verdict="none") for score in make_scores("t", 0, 0)]
    (sample,) = build_samples([lost], none, Reward())
    assert sample.returns.tolist() == [-1, -1]


def test_a_lost_answer_does_not_stand_for_the_one_that_was_got() -> None:
    """Both have the same place, that of the request. Only the lost one, which strayed from the reference, is worse."""
    samples = [sample_of(TREES["nobody waited"], name) for name in "ab"]
    strayed = np.where(samples[0].turn_of_action == 1, -5.0, 0.0)
    observed = [Observed(strayed), Observed(np.zeros_like(strayed))]
    advantages = estimate(samples, observed, Advantage(normalisation="none")).advantages
    assert [each.tolist() for each in advantages] == [[0, 0, -10, -10], [0, 0, 0, 0]]


@given(st.lists(st.floats(-9, 9), min_size=1, max_size=7), st.floats(0, 1), st.floats(-5, 5))
def test_chains_earn_what_they_earned_bit_for_bit(rewards: list[float], discount: float, after: float) -> None:
    """Written as columns or left empty, a chain has the recursion of `turn_returns`, without any rounding."""
    turns = len(rewards)
    penalties = np.linspace(-1, 0, turns)
    row, order = make_trajectory("t", [[10]] * turns), [*range(turns)]
    scores = [replace(score, verdict="wrong") for score in make_scores("t", *rewards)]
    for each in (row, replace(row, received=order, asked=order, paid=[*range(1, turns + 1)])):
        (sample,) = build_samples([each], scores, RAW)
        assert sample.causes.is_chain
        assert sample.causes.position.tolist() == order
        earned = sample.causes.returns(np.array(rewards), penalties, discount, after)
        assert earned.tolist() == turn_returns([*(np.array(rewards) + penalties)], discount, after)


@st.composite
def orders(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """Draw the columns received, asked and paid of an episode that may have happened."""
    turns = draw(st.integers(1, 6))
    got = draw(st.integers(1, turns))
    received = draw(st.permutations([*range(got), *[-1] * (turns - got)]))
    asked = [draw(st.integers(0, place if place >= 0 else got)) for place in received]
    paid = [0 if place < 0 else draw(st.sampled_from([0, *range(place + 1, got + 1)])) for place in received]
    return list(received), asked, paid


NUMBERS = st.lists(st.tuples(st.floats(-9, 9), st.floats(-9, 9)), min_size=6, max_size=6)
"""A reward and a penalty of each turn."""


@given(orders(), NUMBERS, st.floats(0, 1), st.floats(-5, 5))
def test_returns_are_the_sum_over_what_a_turn_could_cause(
    columns: tuple[list[int], list[int], list[int]], numbers: list[tuple[float, float]], discount: float, after: float
) -> None:
    """The definition, written out: pairs of turns, and the longest line of causes by recursion.

    What comes at a depth that is no more than the turn's own is not discounted.

    The reward of a turn to which none was given is that for its length, a penalty.
    """
    received, asked, paid = columns
    turns = range(len(received))
    rewards, penalties = np.array(numbers[: len(received)]).T
    own = penalties + np.where(np.array(paid) > 0, 0.0, rewards)

    def depth(turn: int) -> int:
        earlier = [other for other in turns if 0 <= received[other] < asked[turn]]
        return 1 + max(map(depth, earlier), default=-1)

    def deepest(place: int) -> int:
        return max(depth(turn) for turn in turns if 0 <= received[turn] < place)

    got = max(received) + 1
    expected = []
    for turn in turns:
        place = received[turn] if received[turn] >= 0 else asked[turn]

        def later(reached: int, begun: int = depth(turn)) -> float:
            return discount ** max(0, reached - begun)

        expected.append(
            own[turn]
            + after * later(deepest(got) + 1)
            + sum(rewards[other] * later(deepest(paid[other])) for other in turns if paid[other] > place)
            + sum(own[other] * later(depth(other)) for other in turns if asked[other] > place)
        )
    order: dict[str, Any] = {"received": received, "asked": asked, "paid": paid}
    row = make_trajectory("t", [[10]] * len(received), **order, turn_discount=discount)
    none = [replace(score, verdict="none") for score in make_scores("t", *[0.0] * len(received))]
    (sample,) = build_samples([row], none, RAW)
    assert sample.causes.returns(rewards, penalties, discount, after) == pytest.approx(expected, abs=1e-9)


def test_an_order_that_is_not_possible_is_known() -> None:
    """Nobody asks with a completion that comes later, and none is paid before it is there."""
    row = make_trajectory("t", [[10], [11]], received=[0, 1], asked=[0, 1], paid=[1, 2])
    assert in_order(row)
    for received in ([0, 0], [0, 2], [0], [0, -2], [0, -1]):
        assert not in_order(replace(row, received=received))
    for asked, paid in (([0, 2], [1, 2]), ([-1, 1], [1, 2]), ([0, 1], [1, 1]), ([0, 1], [1, 3])):
        assert not in_order(replace(row, asked=asked, paid=paid))


def test_gae_over_branches_by_hand() -> None:
    """Returns minus values; within a turn the later token is discounted less, and penalties count from their token.

    With lambda below 1 the value of one candidate would stand for what follows the other.
    """
    sample = sample_of(TREES["planner and workers"], turn_discount=0.5)
    observed = Observed(np.zeros(len(sample.actions)), np.full(len(sample.actions), 0.25))
    with pytest.raises(ValueError, match=r"gae_lambda=0\.9 needs .*: t\. Set algorithm\.advantage\.gae_lambda=1"):
        estimate([sample], [observed], Advantage(type="gae", gae_lambda=0.9))
    knobs = Advantage(type="gae", normalisation="none", discount=0.5)
    (advantages,) = estimate([sample], [observed], knobs).advantages
    returns = np.array([0.5, 1, 0.5, 1, 0.25, 0.5, 0, 0])
    assert advantages.tolist() == (returns - 0.25).tolist()
    penalised = replace(observed, penalties=np.array([0, 0, 0, 0, -1.0, 0, 0, -2.0]))
    (advantages,) = estimate([sample], [penalised], knobs).advantages
    # The last turn is one deeper than the workers and two than the planner, whose own penalty is at its first token.
    a, b, p, q = 1 - 1, 1 - 1, 0.5 - 0.5, -2
    expected = np.array([a / 2, a, b / 2, b, p / 2 - 1, p, q / 2, q])
    assert advantages == pytest.approx(expected - 0.25)
