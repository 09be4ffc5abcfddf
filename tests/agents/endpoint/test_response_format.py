"""What becomes of `response_format`; tests/inference has what vLLM makes of a schema."""

import json
from typing import Any

import openai
import pytest

from configs.rollout import Rollout
from tasks.agents.chat import Chat
from tasks.agents.endpoint.agent import AgentTask
from tasks.agents.endpoint.protocol import ResponseFormats
from tasks.score.verifier import Verifier
from tests.agents.endpoint.asking import RIGHT, Asking, InTurn, question
from tests.support.rollout_helpers import play

SCHEMA = {"type": "object", "properties": {"answer": {"type": "string"}}}
OBJECT = {"type": "json_object"}
TYPED = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}

ANSWERED: list[tuple[ResponseFormats, dict[str, Any], object]] = [
    ("ignore", {"response_format": TYPED, "tools": [ADD]}, None),
    ("ignore", {"response_format": {"type": "regex"}}, None),
    ("refuse", {"response_format": {"type": "text"}}, None),
    ("enforce", {}, None),
    ("enforce", {"response_format": OBJECT}, {"type": "object"}),
    ("enforce", {"response_format": TYPED, "tools": [ADD], "tool_choice": "none"}, SCHEMA),
]


@pytest.mark.parametrize(("formats", "asks", "schema"), ANSWERED)
def test_a_format_is_ignored_or_enforced(
    qwen3: Chat, verifier: Verifier, formats: ResponseFormats, asks: dict[str, Any], schema: object
) -> None:
    """The engine gets the schema, and the record says that the logprobs are those of the tokens that it allows."""

    async def ask(task: AgentTask, client: Any) -> str:
        await client.chat.completions.create(model=task.model, messages=question(task), **asks)
        return RIGHT

    engine = InTurn(qwen3, lambda *_: "")
    settings = Rollout(allow_biased_sampling=formats == "enforce")
    (row,) = play(engine, Asking(qwen3, ask, formats), verifier, None, 1, settings)
    assert (row.status, row.reason) == ("completed", "")
    assert [json.loads(gconfig.json_schema or "null") for _, gconfig, _, _ in engine.requests] == [schema]
    assert json.loads(row.sampling).get("json_schema", False) is (schema is not None)


REFUSED: list[tuple[ResponseFormats, dict[str, Any], str]] = [
    ("refuse", {"response_format": TYPED}, "set agent.args.response_format to ignore"),
    ("enforce", {"response_format": {"type": "regex"}}, "give the type json_object"),
    ("enforce", {"response_format": {"type": "json_schema", "json_schema": {"name": "answer"}}}, "give the type"),
    ("enforce", {"response_format": OBJECT, "tools": [ADD]}, "so that no tool could be called"),
]


@pytest.mark.parametrize(("formats", "asks", "told"), REFUSED)
def test_a_format_is_refused(
    qwen3: Chat, verifier: Verifier, formats: ResponseFormats, asks: dict[str, Any], told: str
) -> None:
    """The agent's client raises OpenAI's error, which says what to do."""

    async def ask(task: AgentTask, client: Any) -> str:
        with pytest.raises(openai.BadRequestError, match=told) as caught:
            await client.chat.completions.create(model=task.model, messages=question(task), **asks)
        assert (caught.value.param, caught.value.code) == ("response_format", "unsupported_parameter")
        await client.chat.completions.create(model=task.model, messages=question(task))
        return RIGHT

    (row,) = play(InTurn(qwen3, lambda *_: ""), Asking(qwen3, ask, formats), verifier, None, 1)
    assert (row.status, row.reason) == ("completed", "")
