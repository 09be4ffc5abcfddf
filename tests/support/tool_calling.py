"""Episodes of a policy that calls tools as it is told to."""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from configs.agent import ToolChoice
from storage.records import Call, Problem, Trajectory
from tasks.agents import AGENTS
from tasks.agents.chat import Chat
from tasks.environments.interface import Environment, EnvironmentContext
from tasks.environments.math_verify import MathVerifyEnvironment
from tasks.score.verifier import Verifier
from tasks.tools import open_toolbox
from tasks.tools.interface import ToolContext
from tasks.tools.sandbox import Sandboxes
from tests.support.rollout_helpers import PROBLEM, ScriptedEngine, context, play

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
"""A tool as a client offers it."""


def call(name: str, **arguments: Any) -> str:
    """Return what the policy says to call a tool."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def played(
    chat: Chat,
    verifier: Verifier,
    agent: str,
    says: Sequence[str],
    arguments: Mapping[str, Any] | None = None,
    problem: Problem = PROBLEM,
    environment: Callable[[EnvironmentContext], Environment] = MathVerifyEnvironment,
) -> Trajectory:
    """Play one episode of an agent with the tool `calculator`; the policy answers request k with `says[k]`."""
    numbers = itertools.count()
    engine = ScriptedEngine(chat, lambda *_: says[next(numbers)])
    toolbox = partial(open_toolbox, [ToolChoice(type="calculator")], ToolContext(Sandboxes()))
    made = AGENTS.make(agent, replace(context(chat, 20_000), open_toolbox=toolbox), arguments or {})
    (row,) = play(engine, made, verifier, [problem], group_size=1, environment=environment)
    return row


def the_calls(row: Trajectory) -> list[Call]:
    """Return the calls without their ids, which are hashes."""
    return [replace(each, id="") for each in row.calls]
