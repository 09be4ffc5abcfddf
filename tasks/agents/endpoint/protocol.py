"""OpenAI's chat completions as the endpoint speaks them: requests, answers (whole or as a stream of events), errors.

The run's `sampling` decides temperature, top_p and top_k, since PPO needs the distribution that was sampled from:
what a request says about these is ignored. Parameters that would change the distribution in another way are refused,
unless `response_format` is to be ignored.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from tasks.agents.answers import ChatMessage, ToolSpec, read_arguments
from tasks.agents.endpoint.tree import Node, number_calls

ONLY_CHAT = "only chat completions are answered; a client that prefers OpenAI's Responses API has a setting for them"
MODEL = "policy"
"""The name of the only model."""
MOST_CHOICES, MOST_MESSAGES, MOST_TOOLS = 64, 2048, 128
"""OpenAI's limits of a request."""

ResponseFormats = Literal["refuse", "ignore"]
"""Reactions to a `response_format` other than text."""

_ROLES = {"developer": "system", "function": "tool"}
_REFUSED = {
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "logit_bias", "functions", "function_call")),
    **dict.fromkeys(("logprobs", "top_logprobs", "audio")),
    "modalities": ["text"],
}
"""Parameters that would change what is sampled, or that are not known, with the only value that is allowed."""


class EndpointError(Exception):
    """An answer that is an error.

    Args:
        status: of HTTP.
        code: OpenAI's, such as `invalid_api_key`; clients compare it.
        message: what is wrong, and what to do.
        parameter: the parameter of the request that is wrong.
    """

    def __init__(self, status: int, code: str, message: str, parameter: str | None = None) -> None:
        super().__init__(f"{status} {code}: {message}")
        self.status, self.code, self.message, self.parameter = status, code, message, parameter

    def body(self) -> dict[str, Any]:
        """Return the body of the answer."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.parameter, "code": self.code}}


def episode_ended() -> EndpointError:
    """Return the error of a request that comes too late."""
    return EndpointError(410, "episode_ended", "the episode of this key has ended")


def invalid(message: str, parameter: str | None = None, code: str = "invalid_value") -> EndpointError:
    """Return the error of a request that the endpoint cannot answer."""
    return EndpointError(400, code, message, parameter)


class Function(BaseModel):
    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    type: Literal["function"]
    function: Function


class Called(BaseModel):
    name: str
    arguments: Annotated[str, BeforeValidator(lambda given: read_arguments(given or "{}") or given)] = "{}"
    """JSON of an object, or a text that the policy wrote instead."""


class CalledTool(BaseModel):
    id: Annotated[str, BeforeValidator(lambda given: str(given or ""))] = ""
    type: Annotated[Literal["function"], BeforeValidator(lambda _: "function")] = "function"
    function: Called


def _text(content: Any) -> Any:
    """Return the text of a content that may have parts."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    texts = [
        part.get(part["type"]) if isinstance(part, dict) and part.get("type") in ("text", "refusal") else None
        for part in parts
    ]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("it is no text: images and other media are not supported")
    return "".join(map(str, texts))


def _refuse_old(call: Any) -> None:
    if call:
        raise ValueError("use tool_calls, which came in its place")


TextOrNothing = Annotated[str | None, BeforeValidator(lambda given: given if isinstance(given, str) else None)]
"""A text; anything else counts as not given."""


class Message(BaseModel):
    """A message of a conversation; members that are not known are left out."""

    role: Annotated[
        Literal["system", "user", "assistant", "tool"], BeforeValidator(lambda role: _ROLES.get(str(role), role))
    ]
    content: Annotated[str, BeforeValidator(_text)] = ""
    name: TextOrNothing = None
    tool_call_id: Annotated[str | None, BeforeValidator(lambda given: None if given is None else str(given))] = None
    reasoning_content: TextOrNothing = None
    tool_calls: Annotated[list[CalledTool] | None, BeforeValidator(lambda calls: calls or None)] = None
    function_call: Annotated[None, BeforeValidator(_refuse_old)] = None

    @property
    def form(self) -> ChatMessage:
        return self.model_dump(exclude_none=True)


class ChatRequest(BaseModel):
    """The body of a request."""

    model_config = ConfigDict(extra="allow")

    model: str
    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES)]
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    response_format: Any = None

    @cached_property
    def conversation(self) -> list[ChatMessage]:
        """The messages, whose calls have numbers."""
        messages = [message.form for message in self.messages]
        number_calls(messages)
        return messages

    @cached_property
    def specs(self) -> list[ToolSpec]:
        """The tools, without members that are not given."""
        return [tool.model_dump(exclude_none=True) for tool in self.tools or ()]

    @property
    def stop_texts(self) -> tuple[str, ...]:
        texts = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(text for text in texts if text)

    @property
    def most_tokens(self) -> int | None:
        """The most tokens that the request allows; None if it does not say."""
        return min(filter(None, (self.max_tokens, self.max_completion_tokens)), default=None)


def parse_request(body: bytes | dict[str, Any], formats: ResponseFormats = "refuse") -> ChatRequest:
    """Read a request: its JSON, or what was read from it.

    Raises:
        EndpointError: it is no JSON, or no request that can be answered; says what to do.
    """
    try:
        stated = orjson.loads(body) if isinstance(body, bytes) else body
    except ValueError as error:
        raise invalid(f"the body is not JSON: {error}", code="invalid_json") from None
    try:
        request = ChatRequest.model_validate(stated)
    except ValidationError as error:
        errors = error.errors()  # of several forms that a value may have, the last one's error tells most
        error = next(each for each in reversed(errors) if each["loc"][:1] == errors[0]["loc"][:1])
        where = ".".join(map(str, error["loc"]))
        raise invalid(f"{where or 'the body'}: {error['msg']}", where.partition(".")[0] or None) from None
    if request.model != MODEL:
        message = f"there is no model {request.model!r}: the policy is called {MODEL!r}"
        raise EndpointError(404, "model_not_found", message, "model")
    for name, value in (request.model_extra or {}).items():
        if name in _REFUSED and value and value != _REFUSED[name]:
            text = f"{name}={value!r:.80} is not supported, since PPO needs the policy's own distribution: leave it out"
            raise invalid(text, name, code="unsupported_parameter")
    wanted = request.response_format
    if formats == "refuse" and wanted and wanted != {"type": "text"}:
        cause = "would change the policy's distribution: leave it out, or set agent.args.response_format to ignore"
        raise invalid(f"response_format={wanted!r:.80} {cause}", "response_format", code="unsupported_parameter")
    return request


@dataclass(frozen=True, slots=True)
class Answered:
    """A request and the completions that answer it."""

    request: ChatRequest
    nodes: Sequence[Node]
    identity: str

    def body(self) -> dict[str, Any]:
        """Return the body of the answer."""
        choices = [
            {
                "index": index,
                "message": {"refusal": None, **node.message, "content": _content(node)},
                "finish_reason": _finish_reason(node),
                "logprobs": None,
            }
            for index, node in enumerate(self.nodes)
        ]
        return {**self._head("chat.completion"), "choices": choices, "usage": self._usage()}

    def events(self) -> Iterator[bytes]:
        """Yield the events of a streamed answer; the completions are whole when the first one is sent."""
        head = self._head("chat.completion.chunk")
        for index, node in enumerate(self.nodes):
            calls = [{"index": number, **call} for number, call in enumerate(node.message.get("tool_calls", ()))]
            said = {key: value for key, value in node.message.items() if key != "tool_calls"}
            for delta in (said, *({"tool_calls": [call]} for call in calls), {}):
                reason = None if delta else _finish_reason(node)
                choice = {"index": index, "delta": delta, "finish_reason": reason, "logprobs": None}
                yield _event({**head, "choices": [choice]})
        if (self.request.stream_options or {}).get("include_usage"):
            yield _event({**head, "choices": [], "usage": self._usage()})
        yield b"data: [DONE]\n\n"

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.identity, "object": kind, "created": int(time.time()), "model": MODEL}

    def _usage(self) -> dict[str, int]:
        prompt = len(self.nodes[0].prompt_ids)
        sampled = sum(len(node.completion.token_ids) for node in self.nodes)
        return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _finish_reason(node: Node) -> str:
    """Return OpenAI's reason for the end of a completion."""
    return "tool_calls" if node.message.get("tool_calls") else node.completion.finish_reason


def _content(node: Node) -> str | None:
    """Return the content of a message; without one, only a message with calls has null."""
    return node.message["content"] or (None if node.message.get("tool_calls") else "")


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"
