"""The answers to an episode's requests: rendered, asked of the engine with token ids, recorded in the tree."""

import asyncio
import hashlib
import itertools
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import orjson

from storage.records import Call, CallStatus
from storage.visible import described
from tasks.agents.answers import AnswerReader, ParsedAnswer
from tasks.agents.endpoint import protocol
from tasks.agents.endpoint.protocol import Answered, ChatRequest, EndpointError, invalid
from tasks.agents.endpoint.tree import Node, Position, Tree
from tasks.agents.faults import PolicyError
from tasks.agents.interface import AgentContext, EpisodeEngine
from tasks.inference.api import BundledGenerationOutputs

T = TypeVar("T")

_LARGE = 2**17
"""Bytes of messages and tools from which a request is rendered in a thread: the largest take seconds, in which all
other episodes would stand still."""

OUT_OF_CONTEXT = "context_length_exceeded"
"""OpenAI's code. Frameworks look for it, or for the beginning of OpenAI's message."""


class OverrunError(PolicyError):
    """An agent sent more requests than an episode may."""


@dataclass(eq=False)
class Completions:
    """The completions of one episode.

    Attributes:
        formats: what becomes of `response_format`.
        tree: what was sampled so far.
        refusal: the error that answered the newest request; None if it was answered, or is being answered.
        overrun: whether there were more requests than an episode may send.
    """

    qid: str
    context: AgentContext
    reader: AnswerReader
    max_requests: int
    engine: EpisodeEngine
    formats: protocol.ResponseFormats = "refuse"
    tree: Tree = field(default_factory=Tree)
    refusal: EndpointError | None = None
    overrun: bool = False
    _agent: "asyncio.Task[Any] | None" = None
    _loop: "asyncio.AbstractEventLoop | None" = None
    _answering: "set[asyncio.Task[Answered]]" = field(default_factory=set)
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Answer requests until the block ends; those that wait then get an error.

        The task of the block is cancelled if the agent asks too often.
        """
        self._agent, self._loop = asyncio.current_task(), asyncio.get_running_loop()
        try:
            yield
        finally:
            self._loop = None
            for answering in self._answering:
                answering.cancel()

    async def complete(self, body: bytes | dict[str, Any]) -> Answered:
        """Answer a request: its JSON, or what was read from it.

        What was sampled is recorded, also if the one who asked no longer waits for it.

        Raises:
            EndpointError: it cannot be answered; says why, and what to do.
        """
        return await self.in_loop(self._complete(body))

    async def in_loop(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Await a coroutine in the rollout's event loop: a thread of an agent may have a loop of its own.

        Raises:
            EndpointError: the episode has ended.
        """
        if not self._loop:
            coroutine.close()
            raise protocol.episode_ended()
        if asyncio.get_running_loop() is self._loop:
            return await coroutine
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    async def _complete(self, body: bytes | dict[str, Any]) -> Answered:
        answering = asyncio.create_task(self._answer(body, len(self.tree.received)))
        self._answering.add(answering)
        answering.add_done_callback(self._answering.discard)
        try:
            answered = await asyncio.shield(answering)
        except asyncio.CancelledError:
            if answering.cancelled():
                raise protocol.episode_ended() from None
            raise
        for node in answered.nodes:
            self.tree.hand_out(node)
        return answered

    async def _answer(self, body: bytes | dict[str, Any], asked: int) -> Answered:
        """Answer a request of an agent that has got `asked` completions."""
        self.refusal = None
        with self.noting("internal_error"):
            request, number = protocol.parse_request(body, self.formats), next(self._numbers)
            if number >= self.max_requests:
                if self._agent and not self.overrun:
                    self._agent.cancel()
                self.overrun = True
                await asyncio.sleep(0.5)  # before each refusal: others are to be played meanwhile
                message = f"an episode may send {self.max_requests} requests (agent.args.max_requests)"
                raise EndpointError(429, "too_many_requests", message)
            try:
                position = self.tree.find(request.conversation, request.specs)
            except TypeError as error:
                raise invalid(f"messages or tools hold what JSON cannot: {error}", "messages") from None
            if position.new and position.new[-1]["role"] == "assistant":
                message = "the last message is the assistant's, and no completion of this episode: end with another one"
                raise invalid(message, "messages")
            large = len(orjson.dumps([request.conversation, request.specs])) > _LARGE
            prompt_ids = (
                await asyncio.to_thread(self._prompt, request, position) if large else self._prompt(request, position)
            )
            gconfig = self.context.gconfig
            most = min(gconfig.max_new_tokens, request.most_tokens or gconfig.max_new_tokens)
            own: dict[str, Any] = {"n": request.n or 1, "stop": request.stop_texts, "seed": request.seed}
            gconfig = replace(gconfig, max_new_tokens=most, **own)
            outputs = await self.engine.generate(prompt_ids, gconfig, f"{self.qid}#{number}")
            if position.parent:
                _note_answers(position.parent, position)
            nodes = [self._node(request, position.parent, asked, outputs, index) for index in range(gconfig.n)]
            for node in nodes:
                self.tree.add(node, position)
            return Answered(request, nodes, f"chatcmpl-{_digest(self.qid, number)}")

    @contextmanager
    def noting(self, code: str) -> Iterator[None]:
        """Note that a request is refused; an exception that is no answer to it becomes one with this code."""
        try:
            yield
        except Exception as error:
            self.refusal = error if isinstance(error, EndpointError) else EndpointError(500, code, described(error))
            if self.refusal is error:
                raise
            raise self.refusal from error

    def _prompt(self, request: ChatRequest, position: Position) -> list[int]:
        """Return the ids of a prompt, which goes on with the tokens of the completion before if the template allows it.

        Raises:
            EndpointError: the context has no room for it, or the template refuses the conversation.
        """
        chat, parent, limit = self.context.chat, position.parent, self.context.max_model_len
        ids: list[int] | None = None
        try:
            if parent:
                ids = chat.continuation(parent.messages, parent.completion.token_ids, position.new, request.specs)
            prompt_ids = parent.token_ids + ids if parent and ids else chat.prompt(request.conversation, request.specs)
        except ValueError as error:
            raise invalid(str(error), "messages", code="unsupported_conversation") from None
        if len(prompt_ids) >= limit:
            message = f"(inference.max_model_len), and the messages have {len(prompt_ids)}: shorten them"
            message = f"this model's maximum context length is {limit} tokens {message}"
            raise invalid(message, "messages", code=OUT_OF_CONTEXT)
        return prompt_ids

    def _node(
        self, request: ChatRequest, parent: Node | None, asked: int, outputs: BundledGenerationOutputs, index: int
    ) -> Node:
        completion, chat, most = outputs.completions[index], self.context.chat, self.context.gconfig.max_new_tokens
        tools = () if request.tool_choice == "none" else request.specs
        answer = self.reader.read(outputs.prompt_ids, completion.token_ids, tools)
        calls = [
            replace(call, id=f"call_{_digest(self.qid, outputs.qid, index, number)}")
            for number, call in enumerate(answer.calls)
        ]
        return Node(
            parent=parent,
            continues=parent is not None and outputs.prompt_ids[: len(parent.token_ids)] == parent.token_ids,
            prompt_ids=outputs.prompt_ids,
            completion=completion,
            seed=outputs.seeds[index],
            latency_s=outputs.latency_s,
            text=chat.decode(completion.token_ids, outputs.prompt_ids),
            messages=request.conversation,
            message=_message(answer, calls, request.stop_texts),
            cut=completion.finish_reason == "length"
            and len(completion.token_ids) == (request.most_tokens or most) < most,
            calls=calls,
            asked=asked,
        )


def _message(answer: ParsedAnswer, calls: Sequence[Call], stop: Sequence[str]) -> dict[str, Any]:
    """Return the assistant's message; as with OpenAI, the arguments of a call may be a text that is no JSON."""
    asked = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments or "{}"}}
        for call in calls
    ]
    content = answer.content
    for text in stop:
        content = content.partition(text)[0]
    more = {"reasoning_content": answer.reasoning, "tool_calls": asked}
    return {"role": "assistant", "content": content} | {name: value for name, value in more.items() if value}


def _note_answers(node: Node, position: Position) -> None:
    """Note what answered a completion, unless another branch has answered it before: feedback, outputs of calls.

    A call whose output begins with `error` has failed: our own tools, and those of most frameworks, say so.
    """
    if node.feedback:
        return
    node.feedback = "\n".join(message["content"] for message in position.new)
    outputs = {message["tool_call_id"]: message["content"] for message in position.new if message["role"] == "tool"}
    for number, (call, call_id) in enumerate(zip(node.calls, position.call_ids, strict=True)):
        if (output := outputs.get(call_id)) is not None:
            status: CallStatus = "failed" if output.lstrip().lower().startswith("error") else "answered"
            status = "unparsable" if call.status == "unparsable" else status
            node.calls[number] = replace(call, output=output, status=status)


def _digest(*parts: object) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()
