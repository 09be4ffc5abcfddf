"""Problems that a policy cannot play: its context has no room for them."""

from collections.abc import Callable, Sequence
from typing import Any

from configs import Config
from storage.errors import first_few
from storage.grouping import grouped
from storage.records import Problem
from tasks.agents import AGENTS
from tasks.agents.chat import Chat
from tasks.agents.interface import AgentContext
from tasks.agents.template import Message
from tasks.inference.api import GenerationConfig
from tasks.problems import ProblemError
from tasks.problems.mixture import naming
from tasks.problems.rows import first_messages

_ANSWER_DIVISOR = 16
"""A prompt must leave room for a sixteenth of `sampling.max_new_tokens`: answers that are cut sooner teach nothing."""


def without_room(problems: Sequence[Problem], chat: Chat, config: Config) -> list[Problem]:
    """List the problems whose first prompt leaves too little room in the context; they are not played.

    In a mixture the problems of each member are looked at apart.

    The prompt is that of the agent if it has a method `opening`, such as `math-multi-turn`. Otherwise only the
    problem's own messages are counted, and never what an environment adds to them.

    Raises:
        ProblemError: no other problem is left.
    """
    parts = {part.name: part.where for part in config.problems.trained}
    own = grouped((each.source if each.source in parts else "", each) for each in problems)
    lacking = list[Problem]()
    for name in own:
        with naming(parts.get(name, "")):
            lacking += _without_room(own[name], chat, config.of_source(name))
    return lacking


def _without_room(problems: Sequence[Problem], chat: Chat, config: Config) -> list[Problem]:
    context = config.inference.max_model_len
    opening: Callable[[Problem, str], list[Message]] = first_messages
    if hasattr(AGENTS.find(config.agent.type), "opening"):
        agent = AgentContext(chat, GenerationConfig(max_new_tokens=config.sampling.max_new_tokens), context)
        made: Any = AGENTS.make(config.agent.type, agent, config.agent.args)
        opening = made.opening
    most = context - max(1, config.sampling.max_new_tokens // _ANSWER_DIVISOR)
    lacking = [problem for problem in problems if not _fits(chat, opening(problem, problem.prompt), most)]
    if lacking and len(lacking) == len(problems):
        lacks = describe_lacking(lacking, len(problems), config)
        raise ProblemError(f"{lacks}: raise inference.max_model_len, or shorten them")
    return lacking


def describe_lacking(lacking: Sequence[Problem], count: int, config: Config) -> str:
    """Say how many of `count` problems lack room, and name the first ones."""
    room = f"inference.max_model_len={config.inference.max_model_len}"
    named = first_few([problem.problem_id for problem in lacking], 5)
    return f"{len(lacking)} of {count} problems ({named}) leave no room for an answer in {room}"


def _fits(chat: Chat, messages: list[Message], most: int) -> bool:
    """Return whether the prompt of `messages` has at most so many tokens; encode it only if that is in doubt."""
    around = len(chat.prompt([message | {"content": "?"} for message in messages]))
    longest = sum(len(message["content"].encode()) for message in messages)  # in tokens: each has a byte at least
    return around + longest <= most or len(chat.prompt(messages)) <= most
