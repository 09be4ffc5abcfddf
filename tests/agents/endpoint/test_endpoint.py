"""An agent written against OpenAI's client is played as token-exact as one with queues; how episodes end, and why."""

import errno
import math
from dataclasses import replace
from typing import Any

import pytest

from configs import ConfigError
from configs.rollout import Rollout
from flows.run.configuration import resolve
from storage.records import Trajectory
from tasks.agents.chat import Chat
from tasks.agents.endpoint.agent import AgentTask
from tasks.agents.faults import PolicyError, fault_of
from tasks.agents.math_multi_turn import MathMultiTurnAgent
from tasks.agents.openai_agent import OpenAIAgent
from tasks.inference.api import Completion, ContextLengthError
from tasks.score.verifier import Verifier
from tests.agents.endpoint.asking import RIGHT, WRONG, Asking, question
from tests.support.rollout_helpers import ScriptedEngine, context, play, timeless

HERE = "tests.agents.endpoint.solvers"


def test_two_turns_are_those_of_the_queue_agent(chat: Chat, verifier: Verifier) -> None:
    """The same agent in both forms gives the same record, except for what only the endpoint's tree knows."""
    engine = ScriptedEngine(chat, lambda turn, _: [WRONG, RIGHT][turn])
    queues = play(engine, MathMultiTurnAgent(context(chat), num_turns=2), verifier)
    endpoint = play(engine, OpenAIAgent(context(chat), entry=f"{HERE}:two_turns"), verifier)
    assert [timeless(replace(row, follows=[])) for row in endpoint] == [timeless(row) for row in queues]
    assert endpoint[0].follows == [-1, 0]


def played(chat: Chat, verifier: Verifier, entry: str, deadline_s: float = 60.0, **arguments: Any) -> Trajectory:
    """Play one episode, in which the policy answers rightly."""
    engine = ScriptedEngine(chat, lambda *_: RIGHT)
    agent = OpenAIAgent(context(chat), entry=f"{HERE}:{entry}", **arguments)
    settings = Rollout(episode_deadline_s=deadline_s)
    (row,) = play(engine, agent, verifier, group_size=1, settings=settings)
    return row


BAD: dict[str, tuple[str, dict[str, Any], str, str, str]] = {
    "silent": ("silent", {}, "failed", "set-up", "ended without a completion"),
    "late": ("never_ends", {}, "failed", "set-up", "deadline of 2 s"),
    "raises": ("raises", {"kind": "lost"}, "failed", "set-up", "LookupError: lost the thread"),
    "exits": ("raises", {"kind": "exit"}, "failed", "set-up", "SystemExit: 3"),
    "gives up": ("several_and_gives_up", {}, "failed", "policy", "PolicyError: it makes no move"),
    "returns rubbish": ("returns", {"what": {"answer": 3}}, "failed", "set-up", "the agent returned dict"),
    "returns nan": ("returns", {"what": math.nan}, "failed", "set-up", "the reward nan"),
    "floods": ("floods", {}, "failed", "policy", "more than 20 requests"),
    "full": ("fills_the_context", {}, "truncated", "policy", "context_length_exceeded"),
}


@pytest.mark.parametrize(("entry", "arguments", "status", "fault", "reason"), BAD.values(), ids=BAD)
def test_bad_agents(
    chat: Chat, verifier: Verifier, entry: str, arguments: dict[str, Any], status: str, fault: str, reason: str
) -> None:
    """Each ends with a status and a reason of its own, says whose fault it was, and keeps what was sampled."""
    row = played(chat, verifier, entry, deadline_s=2.0, max_requests=20, arguments=arguments)
    assert (row.status, row.fault) == (status, fault)
    assert reason in row.reason
    if fault == "policy" or entry in ("never_ends", "raises"):
        assert row.turns


def test_an_episode_without_a_verdict_keeps_its_branches(chat: Chat, verifier: Verifier) -> None:
    """Every completion is a turn with its position in the tree, whatever ended the agent: it can be trained on.

    Where the agent has told how many answers it gives, the number of those that are missing is stored, too.
    """
    row = played(chat, verifier, "several_and_gives_up")
    assert (sorted(row.follows)[:3], len(row.sequence_starts), len(row.turns)) == ([-1, -1, -1], 3, 4)
    assert all(row.logprobs[turn.start] == -0.5 for turn in row.turns)
    assert row.unplayed_turns == 3


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("nowhere:solve", "cannot be imported: .*No module named 'nowhere'.*PYTHONPATH"),
        (f"{HERE}:two_turn", "has no attribute 'two_turn'"),
        (f"{HERE}:question", f"{HERE}:question is no `async def`"),
        (f"{HERE}:ask", "cannot be called with"),
    ],
)
def test_a_wrong_entry_stops_before_anything_starts(entry: str, message: str) -> None:
    """The error names the entry, and what to do."""
    with pytest.raises(ConfigError, match=rf"agent.args.entry='{entry}': .*{message}"):
        resolve("smoke", [f"agent={{type: openai, args: {{entry: '{entry}'}}}}"])


def test_what_nobody_would_see_or_reach_is_refused() -> None:
    """Before vLLM starts, which takes a minute: tools of an agent without tools, and addresses that are none."""
    for listen in ("127.0.0.1", ":80", "unix:/here.sock"):
        with pytest.raises(ConfigError, match=rf"agent.args.listen='{listen}': .*should match pattern"):
            resolve("smoke", [f"agent={{type: openai, args: {{listen: '{listen}'}}}}"])
    with pytest.raises(ConfigError, match="agent 'math-multi-turn' uses no tools"):
        resolve("demo-tools", ["agent={type: math-multi-turn, tools: [calculator]}"])


CUT = "the last turn reached sampling.max_new_tokens"
CUT_OTHERWISE = "the last turn reached its limit: that of its request, the room in the context, or a request's time"


@pytest.mark.parametrize(
    ("own", "room", "limits", "status", "reason"),
    [
        (3, 100, [3], "completed", ""),
        (None, 100, [], "truncated", CUT),
        (100, 100, [], "truncated", CUT),
        (None, 5, [5], "truncated", CUT_OTHERWISE),
        (6, 5, [5], "truncated", CUT_OTHERWISE),
    ],
)
def test_only_a_limit_of_the_agents_own_truncates_nothing(
    chat: Chat, verifier: Verifier, own: int | None, room: int, limits: list[int], status: str, reason: str
) -> None:
    """The agent wanted no more tokens. At the run's limit (8), or that of the context, the answer is cut."""

    async def ask(task: AgentTask, client: Any) -> str:
        limit = {"max_tokens": own} if own else {}
        answer = await client.chat.completions.create(model=task.model, messages=question(task), **limit)
        assert answer.choices[0].finish_reason == "length"
        return RIGHT

    def cut(*_: int) -> Completion:
        """Reach the limit of the request, or the room."""
        most = min(engine.requests[-1][1].max_new_tokens, room)
        return Completion(chat.encode("3" * most), [-0.5] * most, [3] * most, "length", most)

    engine = ScriptedEngine(chat, cut)
    (row,) = play(engine, Asking(chat, ask), verifier, group_size=1)
    assert (row.limits, row.status, row.reason) == (limits, status, reason)


def came_from(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


class OwnError(PolicyError):
    """An agent's own."""


class MaxTurnsExceeded(Exception):  # noqa: N818 - the framework's name
    """As the OpenAI Agents SDK raises it."""


MaxTurnsExceeded.__module__ = "agents.exceptions"
ODD = ValueError("odd")
ENDED = [
    (ContextLengthError("prompt of 300 tokens"), "policy"),
    (came_from(RuntimeError("the agent failed"), OwnError("no move")), "policy"),
    (came_from(RuntimeError("the agent failed"), MaxTurnsExceeded()), "policy"),
    (came_from(RuntimeError("failed"), ExceptionGroup("tasks", [ContextLengthError("full")])), "policy"),
    (ExceptionGroup("two workers", [OSError("gone"), LookupError("lost")]), "set-up"),
    (came_from(OwnError("no answer"), OSError(errno.EMFILE, "Too many open files")), "set-up"),
    (LookupError("lost the thread"), "set-up"),
    (came_from(ODD, ODD), "set-up"),  # the chain of causes has an end
]


@pytest.mark.parametrize(("error", "fault"), ENDED, ids=[repr(error) for error, _ in ENDED])
def test_what_ended_an_episode_decides(error: Exception, fault: str) -> None:
    """Without a sampled token there is nothing that the policy could have done."""
    assert fault_of(error, sampled=True) == fault
    assert fault_of(error, sampled=False) == "set-up"
