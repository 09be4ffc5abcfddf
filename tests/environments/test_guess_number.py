"""The game in which a number is guessed."""

import json
import random

import pytest

from configs.problems import GuessSource
from storage.records import Problem
from tasks.environments import ENVIRONMENTS
from tasks.environments.interface import Environment, EnvironmentContext
from tasks.problems.generated import generate
from tasks.score.verifier import Verifier

GAMES = generate(GuessSource(kind="guess-number", low=1, high=7, count=50))


def number_of(game: Problem) -> int:
    return random.Random(json.loads(game.metadata)["seed"]).randint(1, 7)


@pytest.fixture
def environment(verifier: Verifier) -> Environment:
    return ENVIRONMENTS.make("guess-number", EnvironmentContext(verifier), {})


async def test_halving_the_range_finds_every_number_in_three_guesses(environment: Environment) -> None:
    """What is told after each guess is all that a policy needs; each number occurs."""
    for game in GAMES:
        prompt, _ = await environment.reset(options={"problem": game})
        assert prompt == "Guess the number from 1 to 7."
        low, high = 1, 7
        for _ in range(3):
            said, reward, terminated, _, info = await environment.step(rf"\boxed{{{(low + high) // 2}}}")
            if terminated:
                break
            assert (reward, info) == (0.0, {"verdict": "wrong"})
            low, high = (int(word) for word in said.rstrip(".").split()[-3::2])
        assert (said, reward, info) == ("Right.", 1.0, {"verdict": "correct"})
    assert {number_of(game) for game in GAMES} == set(range(1, 8))


@pytest.mark.parametrize(
    ("answer", "said", "verdict"),
    [
        ("no idea", "Say a number from 1 to 7.", "unparsable"),
        ("-5", "Higher: the number is from 1 to 7.", "wrong"),
        ("9" * 5000, "Lower: the number is from 1 to 7.", "wrong"),
        ("it is not 3, so 100", "Lower: the number is from 1 to 7.", "wrong"),
    ],
)
async def test_answers_that_are_no_guess(environment: Environment, answer: str, said: str, verdict: str) -> None:
    """A number out of range tells no more than the prompt; one of thousands of digits is compared, too."""
    await environment.reset(options={"problem": GAMES[0]})
    assert await environment.step(answer) == (said, 0.0, False, False, {"verdict": verdict})


async def test_problems_of_other_sources_are_refused(environment: Environment) -> None:
    with pytest.raises(ValueError, match="problem '1' has no metadata 'seed': use kind: guess-number"):
        await environment.reset(options={"problem": Problem("1", "Guess!", [])})
