"""Which prompts leave room for an answer."""

from itertools import pairwise

import pytest

from configs import Config, load
from storage.records import Problem
from tasks.agents.chat import Chat
from tasks.agents.problem_checks import without_room
from tasks.problems import ProblemError

SHORT = Problem("short", "What is 1 + 2?", ["3"])


def config(*overrides: str) -> Config:
    return load("smoke", overrides)


def lacking(chat: Chat, problem: Problem, *overrides: str) -> bool:
    return without_room([SHORT, problem], chat, config(*overrides)) == [problem]


def longest(chat: Chat, *overrides: str) -> Problem:
    """Return the problem with the longest prompt that has room."""
    lengths = (Problem(str(length), "1" * length, ["3"]) for length in range(1, 400))
    return next(before for before, after in pairwise(lengths) if lacking(chat, after, *overrides))


def tokens(chat: Chat, problem: Problem) -> int:
    return len(chat.prompt([{"role": "user", "content": problem.prompt}]))


@pytest.mark.parametrize(("max_new_tokens", "least"), [(15, 1), (80, 5)])
def test_room_is_a_sixteenth_of_an_answer(chat: Chat, max_new_tokens: int, least: int) -> None:
    """A prompt with less room is left out: its answers would all be cut, and count against the policy."""
    problem = longest(chat, f"sampling.max_new_tokens={max_new_tokens}")
    assert tokens(chat, problem) == 128 - least


def test_the_agents_own_messages_count(chat: Chat) -> None:
    """An agent that tells its first prompt has its system prompt and instruction counted."""
    alone = longest(chat)
    told = "agent.args={num_turns: 2, system_prompt: What is 1?, instruction: What is 2?}"
    assert lacking(chat, alone, told)
    assert tokens(chat, longest(chat, told)) < tokens(chat, alone) - 10
    assert not lacking(chat, alone, "agent={type: openai}")
    assert lacking(chat, Problem("long", "1" * 400, ["3"]), "agent={type: openai}")


def test_a_set_without_any_room_is_an_error(chat: Chat) -> None:
    """Nothing would be left to play; the remedy is named."""
    long = Problem("long", "1" * 400, ["3"])
    with pytest.raises(
        ProblemError, match=r"^1 of 1 problems \(long\) leave no room .*=128: raise inference.max_model"
    ):
        without_room([long], chat, config())
