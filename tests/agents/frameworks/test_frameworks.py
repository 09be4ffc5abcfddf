"""Agents of many frameworks are trained as they are: what the policy sampled is recorded token by token."""

import pytest

from storage.records import Call
from tasks.agents import faults
from tasks.agents.chat import Chat
from tasks.score.verifier import Verifier
from tests.support.tool_calling import call, played, the_calls

EXAMPLES = "tests.agents.frameworks.examples"
CALLS, ANSWER = call("calculator", expression="1 + 2"), r"\boxed{3}"
PACKAGES = {
    "openai_in_a_stream": "openai", "openai_sdk": "agents", "langgraph": "langchain",
    "pydantic_ai": "pydantic_ai", "strands": "strands",
}  # fmt: skip
"""The functions of `examples.py`, and the packages that they need."""
LONG = ["pydantic_ai", "strands"]
"""Seconds each, mostly for their imports."""
ONE_SEQUENCE = [
    pytest.param(*case, id=case[0], marks=[pytest.mark.long] if case[0] in LONG else []) for case in PACKAGES.items()
]


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep LiteLLM, with which DSPy asks, from asking GitHub for prices while it is imported."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "true")


@pytest.mark.parametrize(("name", "package"), ONE_SEQUENCE)
def test_calls_and_answer_are_one_sequence(qwen3: Chat, verifier: Verifier, name: str, package: str) -> None:
    """The framework sends back what it got, so the second prompt begins with the tokens of the first turn."""
    pytest.importorskip(package, reason="make setup-agents")
    row = played(qwen3, verifier, "openai", [CALLS, ANSWER], {"entry": f"{EXAMPLES}:{name}"})
    assert (row.status, row.reason) == ("completed", "")
    assert the_calls(row) == [Call(0, "", "calculator", '{"expression": "1 + 2"}', "3", "answered")]
    assert (row.ungraded, row.follows, row.sequence_starts) == ([0], [-1, 0], [0])
    assert [turn.verdict for turn in row.turns] == ["", "correct"]
    assert sum(row.action_mask) == sum(turn.end - turn.start for turn in row.turns)


def fields(**values: str) -> str:
    """Return what the policy says in DSPy's format."""
    return "".join(f"[[ ## {name} ## ]]\n{value}\n\n" for name, value in {**values, "completed": ""}.items())


STEPS = [
    fields(next_thought="I add.", next_tool_name="calculator", next_tool_args='{"expression": "1 + 2"}'),
    fields(next_thought="It is 3.", next_tool_name="finish", next_tool_args="{}"),
    fields(reasoning="1 + 2 is 3.", answer=ANSWER),
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "says", "sequences"),
    [("pydantic_ai_structured", [CALLS, call("final_result", answer=ANSWER)], 1), ("dspy", STEPS, 3)],
)
def test_an_answer_in_a_form_of_the_framework(
    qwen3: Chat, verifier: Verifier, name: str, says: list[str], sequences: int
) -> None:
    """In a call, or in fields of a text: the completion that has it is graded."""
    pytest.importorskip(name.removesuffix("_structured"), reason="make setup-agents")
    row = played(qwen3, verifier, "openai", says, {"entry": f"{EXAMPLES}:{name}", "response_format": "ignore"})
    assert (row.status, row.reason) == ("completed", "")
    assert [turn.verdict for turn in row.turns] == [""] * (len(says) - 1) + ["correct"]
    assert row.answers == [None] * (len(says) - 1) + [ANSWER]
    assert len(row.sequence_starts) == sequences


@pytest.mark.parametrize(("package", "name", "most"), [("agents", "openai_sdk", 2), ("langchain", "langgraph", 4)])
def test_a_policy_that_only_calls_does_not_escape(
    qwen3: Chat, verifier: Verifier, package: str, name: str, most: int
) -> None:
    """The framework ends it by an error of its own, which is the policy's fault and keeps its turns."""
    pytest.importorskip(package, reason="make setup-agents")
    arguments = {"entry": f"{EXAMPLES}:{name}", "arguments": {"most": most}}
    row = played(qwen3, verifier, "openai", [CALLS] * 9, arguments)
    assert (row.status, row.fault, len(row.turns)) == ("failed", "policy", 2)


@pytest.mark.long
def test_the_errors_that_are_the_policys_exist(qwen3: Chat, verifier: Verifier) -> None:
    """Where a framework renames one, a policy could leave an episode in which it will be wrong out of training."""
    raising = ["agents", "dspy", "google.adk.agents.invocation_context", "langgraph.errors", "pydantic_ai"]
    for module in [*raising, "instructor.core.exceptions", "smolagents", "strands"]:
        pytest.importorskip(module, reason="make setup-agents")
    kinds, found = [Exception], set()
    while kinds:
        kind = kinds.pop()
        found.add((kind.__module__.partition(".")[0], kind.__name__))
        kinds += kind.__subclasses__()
    assert found >= faults._FRAMEWORKS
    says = ["I do not know."] * 9
    row = played(qwen3, verifier, "openai", says, {"entry": f"{EXAMPLES}:dspy", "response_format": "ignore"})
    assert (row.status, row.fault) == ("failed", "policy")


FINAL = call("final_answer", answer=r"\boxed{3}")
ADDS = "Thought: I add.\n<code>\nprint(add(1, 2))\n</code>"
ENDS = 'Thought: It is 3.\n<code>\nfinal_answer("\\\\boxed{3}")\n</code>'


@pytest.mark.parametrize(
    ("kind", "says", "called"),
    [
        ("ToolCallingAgent", [call("add", first=1, second=2), FINAL], ["add", "final_answer"]),
        ("CodeAgent", [ADDS, ENDS], []),
    ],
)
def test_smolagents_has_a_sequence_for_each_step(
    qwen3: Chat, verifier: Verifier, kind: str, says: list[str], called: list[str]
) -> None:
    """It tells the policy its earlier steps in words of its own, so each step begins a sequence."""
    pytest.importorskip("smolagents", reason="make setup-agents")
    row = played(qwen3, verifier, "openai", says, {"entry": f"{EXAMPLES}:smolagents", "arguments": {"kind": kind}})
    assert (row.status, row.reason) == ("completed", "")
    assert [(each.name, each.status) for each in row.calls] == [(name, "unanswered") for name in called]
    assert (row.ungraded, row.follows, len(row.sequence_starts)) == ([0], [-1, -1], 2)
    assert [turn.verdict for turn in row.turns] == ["", "correct"]
    assert row.answers == [None, r"\boxed{3}"]
    assert "3" in qwen3.decode(row.token_ids[row.sequence_starts[1] : row.turns[1].start]).split("Observation")[-1]
