"""The bodies of the endpoint's answers: chat completions, whole or as a stream of events."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from tasks.agents.endpoint.requests import MODEL, ChatRequest
from tasks.agents.endpoint.tree import Node

Decode = Callable[[list[int]], str]


@dataclass(frozen=True, slots=True)
class Answered:
    """A request and the completions that answer it."""

    request: ChatRequest
    nodes: Sequence[Node]
    identity: str

    def body(self, decode: Decode) -> dict[str, Any]:
        """Return the body of the answer; `decode` gives the text of tokens, for logprobs."""
        choices = [
            {
                "index": index,
                "message": {"refusal": None, **node.message, "content": _content(node)},
                "finish_reason": finish_reason(node),
                "logprobs": self._logprobs(node, decode),
            }
            for index, node in enumerate(self.nodes)
        ]
        return {**self._head("chat.completion"), "choices": choices, "usage": self._usage()}

    def events(self, decode: Decode) -> Iterator[bytes]:
        """Yield the events of a streamed answer; the completions are whole when the first one is sent."""
        head = self._head("chat.completion.chunk")
        for index, node in enumerate(self.nodes):
            delta = {key: value for key, value in node.message.items() if key != "tool_calls"}
            yield _event(head | {"choices": [_chunk(index, delta, logprobs=self._logprobs(node, decode))]})
            for place, call in enumerate(node.message.get("tool_calls", ())):
                yield _event(head | {"choices": [_chunk(index, {"tool_calls": [{"index": place, **call}]})]})
            yield _event(head | {"choices": [_chunk(index, {}, finish_reason(node))]})
        if self.request.stream_options and self.request.stream_options.include_usage:
            yield _event(head | {"choices": [], "usage": self._usage()})
        yield b"data: [DONE]\n\n"

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.identity, "object": kind, "created": int(time.time()), "model": MODEL}

    def _usage(self) -> dict[str, int]:
        prompt = len(self.nodes[0].prompt_ids)
        sampled = sum(len(node.completion.token_ids) for node in self.nodes)
        return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}

    def _logprobs(self, node: Node, decode: Decode) -> dict[str, Any] | None:
        if not self.request.logprobs:
            return None
        texts = [decode([token]) for token in node.completion.token_ids]
        entries = [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in zip(texts, node.completion.logprobs, strict=True)
        ]
        return {"content": entries, "refusal": None}


def finish_reason(node: Node) -> str:
    """Return OpenAI's reason for the end of a completion."""
    return "tool_calls" if node.message.get("tool_calls") else node.completion.finish_reason


def _content(node: Node) -> str | None:
    """Return the content of a message; without one, only a message with calls has null."""
    return node.message["content"] or (None if node.message.get("tool_calls") else "")


def _chunk(
    index: int, delta: dict[str, Any], reason: str | None = None, logprobs: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "finish_reason": reason, "logprobs": logprobs}


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"
