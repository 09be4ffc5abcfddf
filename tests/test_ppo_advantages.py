"""Advantages: baselines compare like with like."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import Advantage, Reward
from tasks.ppo.advantages import turn_advantages
from tasks.ppo.samples import Sample, build_samples
from tests.ppo_helpers import make_scores, make_trajectory

Rows = dict[str, tuple[str, list[float]]]
"""From a trajectory's id to its problem and the success of its turns."""


def samples_of(rows: Rows, turn_discount: float = 1.0, scaling: float = 1.0) -> list[Sample]:
    trajectories = [
        make_trajectory(name, [[10]] * len(successes), problem=problem, turn_discount=turn_discount)
        for name, (problem, successes) in rows.items()
    ]
    scores = [score for name, (_, successes) in rows.items() for score in make_scores(name, *successes)]
    return build_samples(trajectories, scores, Reward(scaling=scaling))


ROWS: Rows = {
    "a": ("p", [1]),
    "b": ("p", [0, 1]),
    "c": ("p", [0, 0]),
    "d": ("q", [1]),
    "e": ("q", [1]),
}


def test_group_baselines_by_turn_by_hand() -> None:
    """First turns compare with first turns (returns 1, 0, -2 of p), second with second (1, -1), q agrees."""
    advantages = [turns.tolist() for turns in turn_advantages(samples_of(ROWS), Advantage())]
    third = 1 / 3
    assert advantages[:3] == [pytest.approx([1 + third]), pytest.approx([third, 1]), pytest.approx([-2 + third, -1])]
    assert advantages[3:] == [[0.0], [0.0]]


def test_wrong_first_answer_gains_nothing_from_a_right_second() -> None:
    """The trap of one advantage for the whole episode: without discounting back, wrong first turns lose alike."""
    advantages = turn_advantages(samples_of(ROWS, turn_discount=0.0), Advantage())
    assert advantages[1][0] == advantages[2][0] < 0 < advantages[1][1]


def test_division_by_the_standard_deviation() -> None:
    """Returns 1 and -1 have the standard deviation 1 (the population's); no variance still gives 0."""
    scaled = turn_advantages(samples_of(ROWS), Advantage(scale_by_std=True))
    assert [scaled[1][1], scaled[2][1]] == pytest.approx([1 / (1 + 1e-6), -1 / (1 + 1e-6)], abs=1e-12)
    assert scaled[3].tolist() == [0.0]


def test_agreement_is_no_signal_whatever_the_rounding() -> None:
    """The mean of three times 0.1 is not 0.1 in floating point; divided by a tiny deviation, that would be noise."""
    samples = samples_of({name: ("p", [1]) for name in "abc"}, scaling=0.1)
    assert [turns.tolist() for turns in turn_advantages(samples, Advantage(scale_by_std=True))] == [[0.0]] * 3


@given(st.lists(st.tuples(st.sampled_from("pqr"), st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=3))))
def test_advantages_of_a_group_sum_to_zero(rows: list[tuple[str, list[float]]]) -> None:
    """A baseline moves nothing on average; every turn of every sample gets its advantage."""
    samples = samples_of({f"t{i:02d}": row for i, row in enumerate([*rows, ("p", [1.0])])}, 0.7)
    advantages = turn_advantages(samples, Advantage())
    assert [len(turns) for turns in advantages] == [len(sample.returns) for sample in samples]
    for problem in "pqr":
        for turn in range(3):
            group = [
                turns[turn]
                for sample, turns in zip(samples, advantages, strict=True)
                if sample.problem_id == problem and len(turns) > turn
            ]
            assert np.sum(group) == pytest.approx(0, abs=1e-9)


def test_unknown_estimator_is_refused_with_the_known_names() -> None:
    """A typing mistake tells what there is."""
    with pytest.raises(ValueError, match=r"'grupo' is not registered: use one of \['group'"):
        turn_advantages(samples_of(ROWS), Advantage(type="grupo"))
