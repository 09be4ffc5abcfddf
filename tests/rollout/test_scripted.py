"""A scripted episode tells what is wrong with agent, environment, tools, template and scorer before a run begins."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from configs import ConfigError, load
from storage.records import Problem
from tasks.agents.interface import AgentContext, EpisodeEngine, EpisodeSpec
from tasks.environments.interface import Environment
from tasks.environments.math_verify import MathVerifyEnvironment
from tasks.rollout.scripted import play_scripted
from tasks.score.verifier import Verifier
from tasks.tools.interface import ToolContext
from tests.support.chat_formats import tokenizer_of
from tests.support.rollout_helpers import PROBLEM
from tests.support.tiny_tokenizer import CHAT_TEMPLATE, build_tokenizer

HERE = "tests.rollout.test_scripted"
POLICY = ("inference.max_model_len=4000", "policy={path: elsewhere}")
CALLING = ("agent.type=openai", "agent.tools=[calculator]", "agent.args={}")


def tokenizer_for(form: str) -> PreTrainedTokenizerBase:
    """Return a tokenizer in one of `FORMATS`; the tiny policy's; or one whose template shows tools, but no calls."""
    if form not in ("tiny", "silent"):
        return tokenizer_of(form)
    tiny = build_tokenizer([PROBLEM.prompt], calculator=True)
    if form == "silent":
        tiny.chat_template = "{{ tools[0].function.name if tools }}" + CHAT_TEMPLATE
    return tiny


def tried(
    verifier: Verifier, *overrides: str, tokenizer: PreTrainedTokenizerBase, problems: tuple[Problem, ...] = (PROBLEM,)
) -> tuple[str, list[str]]:
    """Return the story of an episode, and what was found."""
    story, config = list[str](), load("smoke", [*POLICY, *overrides])
    findings = play_scripted(config, (tokenizer, None, ()), verifier, problems, story.append, [])
    return "\n".join(story), findings


class Maze(MathVerifyEnvironment):
    """An environment with an error in `reset`, or in `step`."""

    def __init__(self, context: Any, *, broken: str) -> None:
        super().__init__(context)
        self._broken = broken
        if broken == "constructor":
            raise LookupError("no maze")

    async def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        problem = (options or {})["problem"]
        if self._broken in ("reset", problem.problem_id):
            raise KeyError("wall")
        return await super().reset(seed, options)

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if self._broken == "step":
            raise KeyError("door")
        return await super().step(action)


class Drill:
    """A tool with an error of its own."""

    name, description = "drill", "Drill."
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {"depth": {"type": "integer"}},
        "required": ["depth"],
    }

    def __init__(self, context: ToolContext) -> None:
        pass

    async def call(self, arguments: dict[str, Any]) -> str:
        raise OSError(f"broken at {arguments['depth']}")

    async def close(self) -> None:
        pass


async def look(path: str) -> str:
    """Look there."""
    raise OSError(f"no {path}")


class Silent:
    """An agent that never asks."""

    def __init__(self, context: AgentContext) -> None:
        pass

    async def play(self, prompt: EpisodeSpec, env: Environment, engine: EpisodeEngine) -> list[Any]:
        return []


async def solve(task: Any, client: Any, tools: Any) -> str:
    """Answer without a completion."""
    return "3"


async def break_down(task: Any, client: Any, tools: Any) -> str:
    raise ZeroDivisionError


@pytest.mark.parametrize("form", ["tiny", "qwen3", "glm"])
def test_call_and_answer_are_played(verifier: Verifier, form: str) -> None:
    """The call is as the template writes it, is read and answered; the answer is right for environment and scorer."""
    told, findings = tried(verifier, *CALLING, tokenizer=tokenizer_for(form))
    assert findings == []
    for line in (
        PROBLEM.prompt,
        'read as a call: calculator {"expression": "1"} (answered): 1',
        "verdict while playing: correct, reward 1",
        "the episode of problem '1+2' ends after the answer '\\\\boxed{3}': completed",
        "scorer, turn 1: correct, reward 1",
    ):
        assert line in told


def maze(broken: str) -> tuple[str, ...]:
    return (f"environment={{type: '{HERE}:Maze', args: {{broken: {broken}}}}}",)


def entry(name: str) -> tuple[str, ...]:
    return (f"agent={{type: openai, args: {{entry: '{HERE}:{name}'}}}}",)


REFUSED: list[tuple[tuple[str, ...], str, str]] = [
    (CALLING, "opening", "does not show the tool 'calculator'"),
    (maze("reset"), "qwen3", "KeyError: 'wall' (test_scripted.py:LINE in reset)"),
    (maze("constructor"), "qwen3", "constructor raised LookupError: no maze"),
    (entry("solve"), "qwen3", "it must ask the endpoint"),
    (entry("break_down"), "qwen3", "ZeroDivisionError (test_scripted.py:LINE in break_down)"),
    (("agent={type: command, args: {argv: ['false']}}",), "qwen3", "the command ended with status 1"),
]


@pytest.mark.parametrize(("overrides", "form", "says"), REFUSED)
def test_what_fails_before_the_policy_is_asked_is_refused(
    verifier: Verifier, overrides: tuple[str, ...], form: str, says: str
) -> None:
    """The refusal has the line in the user's own file."""
    with pytest.raises(ConfigError, match=re.escape(says).replace("LINE", r"\d+")):
        tried(verifier, *overrides, tokenizer=tokenizer_for(form))


def tool(name: str) -> tuple[str, ...]:
    return "agent.type=openai", "agent.args={}", f"agent.tools=[{{type: '{HERE}:{name}'}}]"


def test_every_tool_is_called_once(verifier: Verifier) -> None:
    """Each in an episode of its own, since agents limit calls; the failure of a later one is found, too."""
    tools = f"agent.tools=[calculator, {{type: '{HERE}:look'}}, {{type: '{HERE}:Drill'}}]"
    agent = "agent.args={arguments: {most_calls: 1}}"
    told, findings = tried(verifier, "agent.type=openai", agent, tools, tokenizer=tokenizer_for("qwen3"))
    assert re.findall(r"read as a call: (\w+)", str(told)) == ["calculator", "look", "drill"]
    assert len(findings) == 2
    assert "a call of 'look' has failed" in findings[0]
    assert "after a call of 'drill': failed, OSError: broken at 1" in findings[1]


FOUND: list[tuple[tuple[str, ...], str, str]] = [
    (tool("Drill"), "qwen3", "after a call of 'drill': failed, OSError: broken at 1 (test_scripted.py:LINE in call)"),
    (tool("look"), "qwen3", "a call of 'look' has failed: error: OSError: no 1"),
    (CALLING, "llama", "a call of 'calculator', as the chat template writes it, is not read as a call"),
    (CALLING, "silent", "shows the tool 'calculator', but writes no calls of tools"),
    (
        maze("step"),
        "qwen3",
        "after the answer '\\\\boxed{3}': failed, KeyError: 'door' (test_scripted.py:LINE in step)",
    ),
    ((f"agent={{type: '{HERE}:Silent'}}",), "qwen3", "before the policy is asked: rejected"),
    (("score.type=tests.support.own_scorers:misbehaves",), "qwen3", "fails after the answer '\\\\boxed{3}': error"),
    (("score.type=tests.support.own_scorers:decides",), "qwen3", "is not right for the scorer"),
]


@pytest.mark.parametrize(("overrides", "form", "says"), FOUND)
def test_what_may_be_the_scripts_fault_is_a_finding(
    verifier: Verifier, overrides: tuple[str, ...], form: str, says: str
) -> None:
    """A policy may never meet it, so no run is refused."""
    _, (finding,) = tried(verifier, *overrides, tokenizer=tokenizer_for(form))
    assert re.search(re.escape(says).replace("LINE", r"\d+"), finding)


def test_one_bad_problem_refuses_no_run(verifier: Verifier) -> None:
    """The next problem is tried where an environment cannot begin with the first."""
    environment = f"environment={{type: '{HERE}:Maze', args: {{broken: bad}}}}"
    problems = (replace(PROBLEM, problem_id="bad"), PROBLEM)
    told, findings = tried(verifier, environment, tokenizer=tokenizer_of("qwen3"), problems=problems)
    assert "problem 'bad' ends before the policy is asked: failed, KeyError: 'wall'" in told
    assert findings == []


def test_an_answer_follows_the_thought_that_a_template_opens(verifier: Verifier) -> None:
    """Otherwise the whole answer would be a thought."""
    assert tried(verifier, tokenizer=tokenizer_for("opening"))[1] == []
