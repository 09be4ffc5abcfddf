"""Toys: policies of a few numbers try what is paid, and learn what was meant.

A policy chooses one action in each turn, by its number: the k-th token is the action of turn k. It is trained with the
code of updates, from the rows to the weights of the tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.algorithms import read_algorithm
from configs.score import Reward
from configs.score import Score as Scoring
from storage.records import Score, Trajectory
from tasks.train.advantages import Observed
from tasks.train.algorithms import make_algorithm
from tasks.train.samples import Floats, Sample, build_samples
from tests.support.train_helpers import make_scores, make_trajectory

GRADED = Scoring(type="my.module:score")
JUDGE = Scoring(type="judge")
VERDICTS = Scoring()
STEPS = Scoring(type="environment")
FIRST = 10
"""The token of action 0."""


@dataclass(frozen=True)
class Played:
    """One episode: its actions, the grades of its turns (None: not graded), and whether it was given up."""

    actions: Sequence[int]
    grades: Sequence[float | None]
    gave_up: bool = False
    right: float = 1.0  # a grade of so much is a success

    def row(self, name: str, problem: str, turn_discount: float = 1.0) -> Trajectory:
        tokens = [[FIRST + action] for action in self.actions]
        ungraded = [turn for turn, grade in enumerate(self.grades) if grade is None]
        columns: dict[str, Any] = {"turn_discount": turn_discount, "ungraded": ungraded}
        columns |= {"status": "failed", "fault": "policy"} if self.gave_up else {}
        return make_trajectory(name, tokens, problem=problem, sampling='{"max_new_tokens": 8}', **columns)

    def scores(self, name: str) -> list[Score]:
        scores = make_scores(name, *(float((grade or 0.0) >= self.right) for grade in self.grades))
        return [
            replace(score, verdict="none", reward=0.0) if grade is None else replace(score, reward=grade)
            for score, grade in zip(scores, self.grades, strict=True)
        ]


Choose = Callable[[int], int]
"""The action of a turn."""
Play = Callable[[Choose, np.random.Generator], Played]


def samples_of(episodes: Mapping[str, Sequence[Played]], scoring: Scoring, discount: float = 1.0) -> list[Sample]:
    """Return the samples of groups of episodes, by problem."""
    rows, scores = list[Trajectory](), list[Score]()
    for problem, group in episodes.items():
        for number, each in enumerate(group):
            rows.append(each.row(f"{problem}/{number:02d}", problem, discount))
            scores += each.scores(rows[-1].trajectory_id)
    return build_samples(rows, scores, Reward(), scorers=scoring)


def learnt(
    play: Play, start: Sequence[Sequence[float]], scoring: Scoring, discount: float = 1.0, **algorithm: Any
) -> Floats:
    """Return the probabilities [turns, actions] after 40 updates of 4 groups of 16, from those of `start`."""
    maker = make_algorithm(read_algorithm({"type": "ppo", **algorithm}), 8)
    draw, logits = np.random.default_rng(1), np.log(np.array(start))
    for _ in range(40):
        chances = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)

        def choose(turn: int, chances: Floats = chances) -> int:
            return int(draw.choice(len(chances[turn]), p=chances[turn]))

        episodes = {f"p{number}": [play(choose, draw) for _ in range(16)] for number in range(4)}
        samples = samples_of(episodes, scoring, discount)
        given = maker.assign(samples, [Observed(np.zeros(len(sample.actions))) for sample in samples])
        weights = given.advantages if "rl" in given.weights else given.weights["ce"]
        total = sum(len(sample.actions) for sample in samples)
        for sample, of_tokens in zip(samples, weights, strict=True):
            actions = sample.token_ids[sample.actions] - FIRST
            for turn, action, weight in zip(sample.turn_of_action, actions, of_tokens, strict=True):
                logits[turn] += 6 * weight / total * ((np.arange(logits.shape[1]) == action) - chances[turn])
    result: Floats = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    return result


def answers(count: int, chance: float, wrong: float, right: float, near: float | None = None) -> Play:
    """Play until right or `count` answers are given: action 0 tries (right with this chance).

    Action 1 is nearly right on purpose, or, without `near`, gives up, which the agent cannot read.
    """

    def play(choose: Choose, draw: np.random.Generator) -> Played:
        actions, grades = list[int](), list[float | None]()
        while len(actions) < count and right not in grades:
            actions.append(choose(len(actions)))
            if actions[-1] and near is None:
                return Played(actions, [*grades, None], gave_up=True, right=right)
            grades.append(near if actions[-1] else right if draw.random() < chance else wrong)
        return Played(actions, grades, right=right)

    return play


@pytest.mark.parametrize(
    ("near", "right", "scoring"),
    [(0.6, 1.0, GRADED), (0.1, 1.1, GRADED), (0.4, 1.0, JUDGE), (3.0, 5.0, Scoring(type="reward-model"))],
    ids=["function", "format", "judge", "logits"],
)
def test_being_nearly_right_first_pays_nothing(near: float, right: float, scoring: Scoring) -> None:
    """With the sum of all grades, 0.6 and then 1 beats 1 at once, and the policy learns to be wrong first."""
    start = [[0.881, 0.119]] * 2
    assert learnt(answers(2, 0.9, 0.0, right, near), start, scoring)[0, 1] < 0.119
    summed = scoring.model_copy(update={"tries": "sum"})
    assert learnt(answers(2, 0.9, 0.0, right, near), start, summed)[0, 1] > 0.5 or near < 0.2


def test_an_episode_earns_its_last_grade() -> None:
    """Grades 0.6 and 1: 1, in each turn; an unfinished episode the least; verdicts and paid steps are summed."""
    episodes = {"p": [Played([0, 0], [0.6, 1.0]), Played([0, 0, 0], [0.6, None, None], gave_up=True)]}
    first, second = samples_of(episodes, GRADED)
    assert (first.rewards.tolist(), first.returns.tolist(), first.earned) == ([0, 1], [1, 1], 1)
    assert (second.returns.tolist(), second.earned) == ([0, 0, 0], 0)
    assert samples_of(episodes, STEPS)[0].earned == 1.6
    assert samples_of({"p": [Played([0, 0], [0.0, 1.0])]}, VERDICTS)[0].earned == 0


@pytest.mark.parametrize("discount", [1.0, 0.5])
@pytest.mark.parametrize(
    ("play", "scoring", "algorithm"),
    [
        (answers(3, 0.1, 0.0, 1.0), VERDICTS, "ppo"),
        (answers(1, 0.1, 0.0, 1.0), VERDICTS, "ppo"),
        (answers(8, 0.05, -0.1, 1.0), STEPS, "ppo"),
        (answers(3, 0.1, 0.0, 1.0), VERDICTS, "dpo"),
        (answers(3, 0.1, 0.0, 1.0), VERDICTS, "kto"),
        (answers(3, 0.1, -1.0, 1.0), GRADED, "reinforce_pp"),
    ],
    ids=["three", "one", "steps", "pairs", "thumbs", "grades"],
)
def test_giving_up_pays_nothing(play: Play, scoring: Scoring, algorithm: str, discount: float) -> None:
    """Nobody knows how many answers are left, and most are wrong: a policy that may give up tries on all the same."""
    assert learnt(play, [[0.8, 0.2]] * 8, scoring, discount, type=algorithm)[0, 1] < 0.2


def test_giving_up_by_hand() -> None:
    """The example of `bounded`: what is missing counts as much as in the worst of the group."""
    third = Played([0, 1], [0.0, None], gave_up=True)
    others = [Played([0, 0, 0], [0.0, 0.0, 1.0]), Played([0, 0, 0], [0.0] * 3)]
    samples = samples_of({"p": [*others, third]}, VERDICTS)
    assert [sample.returns.tolist() for sample in samples] == [[-1, 0, 1], [-3, -2, -1], [-3, -2]]


@given(
    st.lists(
        st.tuples(st.lists(st.sampled_from([-1.0, -0.1, 0.0, 0.5]), min_size=1, max_size=4), st.booleans()),
        min_size=2,
        max_size=6,
    ),
    st.sampled_from([VERDICTS, STEPS, GRADED]),
)
def test_who_gives_up_never_earns_more_than_the_worst(
    group: Sequence[tuple[Sequence[float], bool]], scoring: Scoring
) -> None:
    """Neither in all nor from the turn on in which it gave up, whatever its group looks like."""
    grades = [[float(grade > 0) if scoring is VERDICTS else grade for grade in each] for each, _ in group]
    episodes = [
        Played([0] * (len(each) + ended), [*each, *[None] * ended], gave_up=ended, right=2.0)
        for each, (_, ended) in zip(grades, group, strict=True)
    ]
    samples = samples_of({"p": episodes}, scoring)
    finished = [sample for sample in samples if not sample.uncounted]
    for sample in (sample for sample in samples if sample.uncounted):
        assert all(sample.earned <= other.earned + 1e-9 for other in finished)
        turn = len(sample.returns) - 1
        reached = (other.returns[turn] for other in finished if len(other.returns) > turn)
        assert all(sample.returns[turn] <= value + 1e-9 for value in reached)
