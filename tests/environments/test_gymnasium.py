"""Games of Gymnasium are played as text."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from storage.records import Problem, Trajectory
from tasks.agents.chat import Chat
from tasks.environments import ENVIRONMENTS
from tasks.environments.interface import Environment, EnvironmentContext
from tasks.score.verifier import Verifier
from tests.support.tool_calling import played

pytest.importorskip("gymnasium", reason="make setup-agents")

LAKE = {"id": "FrozenLake-v1", "arguments": {"is_slippery": False, "render_mode": "ansi"}}
WAYS = ["left", "down", "right", "up"]
GUESS = {"id": "tests.environments.games:Guess-v0"}


def game(**arguments: Any) -> Callable[[EnvironmentContext], Environment]:
    return lambda context: ENVIRONMENTS.make("gymnasium", context, arguments)


@pytest.fixture
def play(qwen3: Chat, verifier: Verifier) -> Callable[..., Trajectory]:
    return partial(played, qwen3, verifier, "openai", arguments={"arguments": {"num_turns": 8}})


def test_a_lake_is_crossed(play: Callable[..., Trajectory]) -> None:
    """A toy-text game with named actions: the policy sees where it is, and is rewarded at the end."""
    says = ["I go down.", "Not left: DOWN", "right", "right", "What?", "down", "right"]
    row = play(says, problem=Problem("lake", "Go to G.", []), environment=game(**LAKE, actions=WAYS))
    assert (row.status, row.reason) == ("completed", "")
    assert [turn.verdict for turn in row.turns] == ["none"] * 4 + ["unparsable", "none", ""]
    assert [turn.reward for turn in row.turns] == [0.0] * 6 + [1.0]
    assert row.turns[0].feedback == "  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG"
    assert row.turns[4].feedback == "This is no action. Answer with one of left, down, right, up."
    assert len(row.sequence_starts) == 1


def test_a_game_of_texts_with_parts(play: Callable[..., Trajectory]) -> None:
    """Observations and actions are texts; the game says what was a success, and what the reward is made of."""
    problem = Problem("guess", "Guess a number.", [], metadata=json.dumps({"options": {"number": 42}}))
    row = play(["50", "fifty", "42"], problem=problem, environment=game(**GUESS))
    assert [turn.verdict for turn in row.turns] == ["wrong", "unparsable", "correct"]
    assert [turn.reward for turn in row.turns] == [-0.1, 0.0, 0.9]
    assert row.reward_parts == [{"found": 0.0, "cost": -0.1}, {}, {"found": 1.0, "cost": -0.1}]
    assert [turn.feedback for turn in row.turns][:1] == ["Lower."]


async def test_the_episodes_of_a_group_begin_alike(verifier: Verifier) -> None:
    """They have different seeds; the seed in the problem's metadata is that of all of them."""

    async def begin(seed: int, metadata: str) -> str:
        environment = game(id="Blackjack-v1")(EnvironmentContext(verifier))
        observation, _ = await environment.reset(seed, {"problem": Problem("1", "Win.", [], metadata=metadata)})
        return observation

    assert len({await begin(seed, '{"seed": 3}') for seed in range(8)}) == 1
    assert len({await begin(seed, "{}") for seed in range(8)}) > 1


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({**LAKE, "actions": ["left", "right"]}, "give 4 different names"),
        ({"id": "Pendulum-v1"}, "only Text and Discrete spaces"),
        ({"id": "FrozenLake-v999"}, "FrozenLake"),
    ],
)
def test_what_cannot_be_played_is_refused(verifier: Verifier, arguments: dict[str, Any], reason: str) -> None:
    """The error names the argument and the remedy."""
    with pytest.raises(ValueError, match=reason):
        game(**arguments)(EnvironmentContext(verifier))
