"""Generated word problems: solutions are right, and a held-out problem has words that training never has."""

import re
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.problems import WordProblemSource
from storage.records import Problem
from tasks.problems import ProblemError, load_problems
from tasks.problems.generated import words_of


def generate(**knobs: object) -> list[Problem]:
    return load_problems(WordProblemSource.model_validate({"kind": "word-problems", **knobs}), 0.0).problems


@given(st.sampled_from(["train", "held-out"]), st.sampled_from(["+", "-"]), st.integers(), st.integers(1, 200))
def test_the_solution_follows_from_the_two_numbers(split: str, operator: str, seed: int, low: int) -> None:
    """A sentence with a third number, or with the numbers of a difference in a wrong place, would teach nonsense."""
    for problem in generate(split=split, operators=[operator], seed=seed, low=low, high=low + 30, count=20):
        one, other = map(int, re.findall(r"\d+", problem.prompt))
        assert low <= min(one, other) <= max(one, other) <= low + 30
        assert problem.solutions == [str(one + other if operator == "+" else abs(one - other))]


def test_nothing_that_is_held_out_is_in_training() -> None:
    """Every sentence has both numbers. No split has a sentence, person or thing of the other."""
    train, held_out = (words_of(split) for split in ("train", "held-out"))
    for kind in train:
        assert not set(train[kind]) & set(held_out[kind]), kind
    for split, operator in product((train, held_out), ("plus", "minus")):
        assert len(set(split[operator])) == len(split[operator])
        for sentence in split[operator]:
            assert (sentence.count("{a}"), sentence.count("{b}")) == (1, 1)
    kinds = {re.sub(r"\d+", "#", problem.prompt) for problem in generate(count=4000)}
    assert len(kinds) > 1000


def test_the_seed_draws_and_too_few_are_an_error() -> None:
    """The same seed gives the same problems, which are all different; no set is smaller than asked for."""
    assert generate(count=50) == generate(count=50) != generate(count=50, seed=1)
    assert len({problem.prompt for problem in generate(count=3000)}) == 3000
    with pytest.raises(ProblemError, match=r"^500 held-out word problems are more than low=1 and high=1 give"):
        generate(split="held-out", low=1, high=1, operators=["-"], count=500)
