"""Environments of the package verifiers play their own episodes, and their rubrics give the rewards."""

import signal
from functools import partial

import pytest

from configs.problems import FileSource
from storage.records import Call, Problem
from tasks.agents import AGENTS
from tasks.agents.chat import Chat
from tasks.problems import load_problems
from tasks.score.verifier import Verifier
from tests.support.rollout_helpers import context
from tests.support.tool_calling import call, played, the_calls

pytest.importorskip("verifiers", reason="make setup-agents")
RIGHT, WRONG = r"\boxed{3}", r"\boxed{4}"
SUMS = "tests.agents.frameworks.sums"


@pytest.fixture(scope="module")
def problem(tmp_path_factory: pytest.TempPathFactory) -> Problem:
    """Return the problem of the environment's data set, by way of the file that its users write."""
    import verifiers

    path = tmp_path_factory.mktemp("sums") / "sums.jsonl"
    verifiers.load_environment(SUMS).get_dataset().to_json(str(path))
    (problem,) = load_problems(FileSource(kind="jsonl", path=str(path), preset="verifiers"), 0.0).problems
    return problem


@pytest.mark.parametrize(
    ("kind", "says", "metrics"),
    [
        ("single", [RIGHT], {"right": 1.0, "short": 1.0, "num_turns": 1.0}),
        ("two", [WRONG, RIGHT], {"right": 1.0, "short": 1.0, "num_turns": 2.0}),
    ],
)
def test_an_environment_plays_an_episode(
    qwen3: Chat, verifier: Verifier, problem: Problem, kind: str, says: list[str], metrics: object
) -> None:
    """The last turn has the weighted sum as reward and the rubric's values as parts; all turns are one sequence."""
    row = played(qwen3, verifier, "verifiers", says, {"environment": SUMS, "arguments": {"kind": kind}}, problem)
    assert (row.status, row.reason) == ("completed", "")
    assert [turn.reward for turn in row.turns] == [0.0] * (len(says) - 1) + [1.5]
    assert row.reward_parts[-1] == metrics
    assert len(row.sequence_starts) == 1


def test_its_tools_are_called(qwen3: Chat, verifier: Verifier, problem: Problem) -> None:
    """The environment runs its own tools; calls and outputs are recorded."""
    says = [call("add", first=1, second=2), WRONG]
    row = played(qwen3, verifier, "verifiers", says, {"environment": SUMS, "arguments": {"kind": "tool"}}, problem)
    assert the_calls(row) == [Call(0, "", "add", '{"first": 1, "second": 2}', "3", "answered")]
    assert (row.ungraded, row.turns[-1].reward, len(row.sequence_starts)) == ([0], 0.5, 1)
    assert row.reward_parts[-1]["right"] == 0.0


def test_a_full_context_truncates_the_episode(qwen3: Chat, verifier: Verifier, problem: Problem) -> None:
    """The environment would count it as played to its end; its record says that it was cut."""
    says = ["x" * 30_000, RIGHT]
    row = played(qwen3, verifier, "verifiers", says, {"environment": SUMS, "arguments": {"kind": "two"}}, problem)
    assert (row.status, row.fault) == ("truncated", "policy")
    assert "context_length_exceeded" in row.reason


def test_errors_fail_the_episode(qwen3: Chat, verifier: Verifier, problem: Problem) -> None:
    """An environment keeps the error that ended it; here it is the reason. An empty answer is the policy's."""
    row = played(qwen3, verifier, "verifiers", [""], {"environment": SUMS}, problem)
    assert (row.status, row.fault) == ("failed", "policy")
    assert "EmptyModelResponseError" in row.reason
    row = played(qwen3, verifier, "verifiers", [RIGHT], {"environment": SUMS})
    assert row.fault == "set-up"
    assert "'1+2' is no row of an environment: load it with preset verifiers" in row.reason


def test_a_run_keeps_its_signals(qwen3: Chat) -> None:
    """Environments want to handle Ctrl-C and SIGTERM, which belong to the run."""
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    make = partial(AGENTS.make, "verifiers", context(qwen3))
    make({"environment": SUMS})
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    with pytest.raises(ValueError, match="its rubric compares episodes"):
        make({"environment": SUMS, "arguments": {"kind": "group"}})
