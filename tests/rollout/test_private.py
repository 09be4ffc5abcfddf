"""What scorers call private reaches scorers and environments, but nobody who plays for the policy."""

import asyncio
import copy
import json
import sys
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from configs import load
from configs.score import Score as ScoreSettings
from storage.records import Problem, Trajectory
from tasks.agents import AGENTS
from tasks.agents.chat import Chat
from tasks.agents.interface import Agent, EpisodeSpec
from tasks.agents.math_multi_turn import MathMultiTurnAgent
from tasks.environments.interface import Environment, EnvironmentContext
from tasks.environments.math_verify import MathVerifyEnvironment
from tasks.rollout.conversation import WholeProblem
from tasks.rollout.plan import RolloutPlan
from tasks.rollout.workers import open_player
from tasks.score.scorers import check_scorers, private_metadata
from tasks.score.verifier import Verifier
from tests.agents.endpoint.test_commands import ASK
from tests.support import own_scorers
from tests.support.rollout_helpers import ScriptedEngine, context, make_plan, play

SECRET = "the hidden test"
SYSTEM = {"role": "system", "content": "Put it in a box."}
METADATA = {"level": 3, "tests": [SECRET], "prompt_messages": [SYSTEM, {"role": "user", "content": "What is 1 + 2?"}]}
PROBLEM = Problem("1+2", "What is 1 + 2?", ["3"], "mine", json.dumps(METADATA))
SEEN = {key: METADATA[key] for key in ("level", "prompt_messages")}
PRINT = """
question = problem["messages"][-1]["content"] + json.dumps(problem)
messages = [*problem["messages"][:-1], {"role": "user", "content": question}]
body = {"model": os.environ["OPENAI_MODEL"], "messages": messages}
print(post("/chat/completions", body)["choices"][0]["message"]["content"])
"""


@pytest.fixture
def chat(qwen3: Chat) -> Chat:
    return qwen3


@dataclass(frozen=True, slots=True)
class Grades:
    """An environment that keeps the problems that it was reset with, and whose attributes cannot be set."""

    inner: MathVerifyEnvironment
    problems: list[Problem]
    closed: list[bool]

    async def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        assert options
        self.problems.append(options["problem"])
        assert options["metadata"] == json.loads(self.problems[-1].metadata)  # also what is private
        return await self.inner.reset(seed, options)

    async def step(self, action: str) -> Any:
        return await self.inner.step(action)

    async def close(self) -> None:
        self.closed.append(True)


def played(
    chat: Chat, verifier: Verifier, agent: Agent, private: Sequence[str] = ("tests",)
) -> tuple[Trajectory, Problem]:
    """Play one episode; return its trajectory and the problem that the environment had."""
    environment = Grades(MathVerifyEnvironment(EnvironmentContext(verifier)), [], [])
    engine = ScriptedEngine(chat, lambda *_: r"\boxed{3}")
    rows = play(engine, agent, verifier, [PROBLEM], 1, environment=lambda _: environment, private=private)
    (row,), (problem,) = rows, environment.problems
    assert row.status == "completed", row.reason
    assert environment.closed == [True]
    return row, problem


def prompt_of(chat: Chat, row: Trajectory) -> str:
    return str(chat.tokenizer.decode(row.token_ids[: row.turns[0].start]))


@pytest.mark.parametrize(
    ("agent", "arguments"),
    [
        ("openai", {"entry": "tests.agents.endpoint.solvers:tells_what_it_sees"}),
        ("command", {"argv": [sys.executable, "-c", ASK + PRINT]}),
    ],
)
def test_agents_of_the_endpoint_and_commands(
    chat: Chat, verifier: Verifier, agent: str, arguments: dict[str, Any]
) -> None:
    """They see the other metadata, and the row's messages; the stored row and the environment have everything."""
    row, graded = played(chat, verifier, AGENTS.make(agent, context(chat, 20_000), arguments))
    prompt = prompt_of(chat, row)
    assert SECRET not in prompt
    assert '"level": 3' in prompt
    assert "<|im_start|>system\nPut it in a box.<|im_end|>\n<|im_start|>user\nWhat is 1 + 2?" in prompt
    assert graded == replace(PROBLEM, prompt=graded.prompt)
    assert (row.metadata, row.solutions, row.turns[-1].verdict) == (PROBLEM.metadata, ["3"], "correct")
    row, _ = played(chat, verifier, AGENTS.make(agent, context(chat, 20_000), arguments), private=())
    assert SECRET in prompt_of(chat, row)


def test_agents_that_speak_in_tokens(chat: Chat, verifier: Verifier) -> None:
    """They have the problem and the record without it; what they return is stored with it."""
    seen: list[EpisodeSpec] = []

    class Curious(MathMultiTurnAgent):
        async def play(self, prompt: EpisodeSpec, env: Any, engine: Any) -> list[Trajectory]:
            seen.append(prompt)
            assert isinstance(env, Grades)  # it looks like the environment itself
            assert env.inner._verifier is verifier
            return await super().play(prompt, env, engine)

    row, graded = played(chat, verifier, Curious(context(chat, 20_000), num_turns=1, system_prompt="Be brief."))
    assert json.loads(seen[0].problem.metadata) == json.loads(seen[0].record.metadata) == SEEN
    assert (row.metadata, graded) == (PROBLEM.metadata, PROBLEM)
    assert "system\nBe brief.\n\nPut it in a box.<|im_end|>\n<|im_start|>user\nWhat is 1 + 2?<" in prompt_of(chat, row)


def test_agents_may_copy_their_environment() -> None:
    """One that searches a tree steps copies."""
    env = WholeProblem(cast(Environment, SimpleNamespace(seen=[1])), "", "")
    shallow, deep = copy.copy(env), copy.deepcopy(env)
    deep.seen.append(2)
    assert (env.seen, shallow.seen, deep.seen) == ([1], [1], [1, 2])
    assert type(shallow) is type(deep) is WholeProblem


def test_the_loop_with_tools_sends_the_rows_messages(chat: Chat, verifier: Verifier) -> None:
    """Its own instructions stand beside them."""
    agent = AGENTS.make("openai", context(chat, 20_000), {"arguments": {"instruction": "Think."}})
    prompt = prompt_of(chat, played(chat, verifier, agent)[0])
    assert "system\nPut it in a box.<|im_end|>\n<|im_start|>user\nWhat is 1 + 2?\nThink.<|im_end|>" in prompt


def test_workers_play_by_what_the_runs_scorers_say(chat: Chat, verifier: Verifier) -> None:
    """In training and in evaluations, agents do not get what the scorers of the plan call private."""

    async def private_in(plan: RolloutPlan) -> Set[str]:
        async with open_player(plan, ScriptedEngine(chat, lambda *_: ""), chat, verifier) as player:
            return player.private

    plan = make_plan(config=load("smoke", ["score.type={default: math-verify, code: code}"]))
    assert asyncio.run(private_in(plan)) == {"input_output"}
    assert asyncio.run(private_in(make_plan())) == set()


def test_scorers_say_what_is_private(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hidden tests of code are; one's own function says it with an attribute."""
    own = "tests.support.own_scorers:decides"
    assert private_metadata(ScoreSettings()) == set()
    assert private_metadata(ScoreSettings(type={"default": "math-verify", "code": "code"})) == {"input_output"}
    assert private_metadata(ScoreSettings(type=own)) == set()
    monkeypatch.setattr(own_scorers.decides, "private", ["gold", "tests"], raising=False)
    assert private_metadata(ScoreSettings(type={"default": own, "code": "code"})) == {"gold", "tests", "input_output"}
    monkeypatch.setattr(own_scorers.decides, "private", "gold")
    with pytest.raises(ValueError, match=r"own_scorers:decides': its attribute private is 'gold': give a list"):
        check_scorers(ScoreSettings(type=own))
