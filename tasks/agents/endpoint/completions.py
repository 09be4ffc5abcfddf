"""The answers to an episode's requests: rendered, asked of the engine with token ids, recorded in the tree."""

import asyncio
import hashlib
import itertools
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from storage.records import Call
from storage.visible import described
from tasks.agents.chat import Chat
from tasks.agents.endpoint.protocol import (
    Answered,
    ChatRequest,
    EndpointError,
    check_request,
    episode_ended,
    invalid,
    parse_request,
)
from tasks.agents.endpoint.tree import Node, Place, Tree
from tasks.agents.faults import PolicyError
from tasks.agents.interface import EpisodeEngine
from tasks.agents.rendering import ChatMessage, ParsedAnswer, TemplateRenderer, ToolSpec
from tasks.inference.api import BundledGenerationOutputs, GenerationConfig

T = TypeVar("T")

_NOTED = 3
"""Most refusals that the reason of a failed episode names."""
_OVERRUN_S = 0.5
"""Wait before each refusal of an agent that asks too often: others are to be played meanwhile."""
_LONGEST_TOKEN = 200
"""Characters of a token, generously: longer conversations do not fit, and need not be encoded to know it."""

OUT_OF_CONTEXT = "context_length_exceeded"
"""OpenAI's code. Frameworks look for it, or for the beginning of OpenAI's message."""


class OverrunError(PolicyError):
    """An agent sent more requests than an episode may."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The parts that all episodes of a rollout share."""

    renderer: TemplateRenderer
    chat: Chat
    gconfig: GenerationConfig
    max_model_len: int
    max_requests: int


@dataclass(eq=False)
class Completions:
    """The completions of one episode.

    Attributes:
        tree: what was sampled so far.
        refused: what was wrong with the requests that were refused, the first few.
        out_of_context: why the newest request was refused, if the context has no room for it; otherwise empty.
        overrun: whether there were more requests than an episode may send.
    """

    qid: str
    policy: Policy
    engine: EpisodeEngine
    tree: Tree = field(default_factory=Tree)
    refused: list[str] = field(default_factory=list)
    out_of_context: str = ""
    overrun: bool = False
    _agent: "asyncio.Task[Any] | None" = None
    _loop: "asyncio.AbstractEventLoop | None" = None
    _closed: bool = False
    _answering: "set[asyncio.Task[Answered]]" = field(default_factory=set)
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    @asynccontextmanager
    async def open(self) -> AsyncIterator["Completions"]:
        """Answer requests until the block ends; those that wait then get an error.

        The task of the block is cancelled if the agent asks too often.
        """
        self._agent, self._loop = asyncio.current_task(), asyncio.get_running_loop()
        try:
            yield self
        finally:
            self._closed = True
            for answering in self._answering:
                answering.cancel()

    async def complete(self, body: bytes | dict[str, Any]) -> Answered:
        """Answer a request: its JSON, or what was read from it.

        What was sampled is recorded, also if the one who asked no longer waits for it.

        Raises:
            EndpointError: it cannot be answered; says why, and what to do.
        """
        return await self.in_loop(self._shielded(body))

    async def in_loop(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Await a coroutine in the rollout's event loop: a thread of an agent may have a loop of its own.

        Raises:
            EndpointError: the episode has ended.
        """
        if self._closed or not self._loop:
            coroutine.close()
            raise episode_ended()
        if asyncio.get_running_loop() is self._loop:
            return await coroutine
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    async def _shielded(self, body: bytes | dict[str, Any]) -> Answered:
        answering = asyncio.create_task(self._answer(body, len(self.tree.received)))
        self._answering.add(answering)
        answering.add_done_callback(self._forget)
        try:
            answered = await asyncio.shield(answering)
        except asyncio.CancelledError:
            if answering.cancelled():
                raise episode_ended() from None
            raise
        for node in answered.nodes:
            self.tree.hand_out(node)
        return answered

    def _forget(self, answering: "asyncio.Task[Answered]") -> None:
        self._answering.discard(answering)
        if not answering.cancelled():
            answering.exception()  # the one who asked may be gone

    async def _answer(self, body: bytes | dict[str, Any], asked: int) -> Answered:
        """Answer a request of an agent that has got `asked` completions."""
        before = self.out_of_context
        try:
            request = parse_request(body) if isinstance(body, bytes) else check_request(body)
            answered = await self._complete(request)
            for node in answered.nodes:
                node.asked = asked
        except EndpointError as error:
            self.refuse(error)
            raise
        except Exception as error:
            failed = EndpointError(500, "internal_error", described(error))
            self.refuse(failed)
            raise failed from error
        if self.out_of_context == before:  # one that was refused meanwhile stays refused
            self.out_of_context = ""
        return answered

    def refuse(self, error: EndpointError) -> None:
        """Note that a request was refused."""
        told = f"{error.status} {error.code}: {error.message}"
        self.out_of_context = told if error.code == OUT_OF_CONTEXT else ""
        if len(self.refused) < _NOTED:
            self.refused.append(told)

    async def _complete(self, request: ChatRequest) -> Answered:
        number = next(self._numbers)
        await self._check_number(number)
        tools = request.specs
        place = self._place(request.messages, tools)
        prompt_ids, continues = self._prompt(request.messages, place, tools)
        gconfig = self._gconfig(request, prompt_ids)
        outputs = await self.engine.generate(prompt_ids, gconfig, f"{self.qid}#{number}")
        if place.parent:
            _note_answers(place.parent, place.new)
        choices = range(len(outputs.completions))
        nodes = [self._node(request, tools, place.parent, continues, outputs, choice) for choice in choices]
        for node in nodes:
            self.tree.add(node, place)
        return Answered(request, nodes, f"chatcmpl-{_digest(self.qid, number)}")

    async def _check_number(self, number: int) -> None:
        if number >= self.policy.max_requests:
            if self._agent and not self.overrun:
                self._agent.cancel()
            self.overrun = True
            await asyncio.sleep(_OVERRUN_S)
            raise EndpointError(
                429,
                "too_many_requests",
                f"an episode may send {self.policy.max_requests} requests (agent.args.max_requests)",
            )

    def _place(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec]) -> Place:
        try:
            return self.tree.find(messages, tools)
        except TypeError as error:
            raise invalid(f"messages or tools hold what JSON cannot: {error}", "messages") from None

    def _prompt(
        self, messages: Sequence[ChatMessage], place: Place, tools: Sequence[ToolSpec]
    ) -> tuple[list[int], bool]:
        """Return the ids of a prompt, and whether it goes on with the tokens of the completion before."""
        self._check_length(sum(len(message["content"]) for message in messages) // _LONGEST_TOKEN)
        renderer, parent = self.policy.renderer, place.parent
        try:
            if parent:
                before = parent.prompt_ids, parent.completion.token_ids, parent.messages
                ids = renderer.continuation(*before, place.new, tools)
                if ids is not None:
                    return parent.token_ids + ids, True
            prompt_ids, held = renderer.prompt(messages, tools), parent.token_ids if parent else []
            return prompt_ids, bool(held) and prompt_ids[: len(held)] == held
        except ValueError as error:
            raise invalid(str(error), "messages", code="unsupported_conversation") from None

    def _check_length(self, tokens: int) -> None:
        limit = self.policy.max_model_len
        if tokens >= limit:
            raise invalid(
                f"this model's maximum context length is {limit} tokens (inference.max_model_len), and the messages "
                f"have at least {tokens}: shorten them",
                "messages",
                code=OUT_OF_CONTEXT,
            )

    def _gconfig(self, request: ChatRequest, prompt_ids: list[int]) -> GenerationConfig:
        self._check_length(len(prompt_ids))
        base = self.policy.gconfig
        most = min(base.max_new_tokens, request.most_tokens or base.max_new_tokens)
        return replace(
            base,
            n=request.n or 1,
            max_new_tokens=most,
            stop=request.stop_texts,
            seed=request.seed,
            stop_token_ids=(*base.stop_token_ids, *self.policy.renderer.stop_token_ids),
        )

    def _node(
        self,
        request: ChatRequest,
        tools: Sequence[ToolSpec],
        parent: Node | None,
        continues: bool,
        outputs: BundledGenerationOutputs,
        choice: int,
    ) -> Node:
        completion, number = outputs.completions[choice], len(self.tree.nodes) + choice
        most = self.policy.gconfig.max_new_tokens
        own = request.most_tokens or most
        readable = () if request.tool_choice == "none" else tools
        answer = self.policy.renderer.answer(outputs.prompt_ids, completion.token_ids, readable)
        calls = [
            Call(
                turn=-1,  # known when the trajectory is made
                id=_digest(self.qid, outputs.qid, choice, place)[:9],
                name=call.name,
                arguments=call.arguments,
                output="",
                status="unanswered" if call.readable else "unparsable",
            )
            for place, call in enumerate(answer.calls)
        ]
        return Node(
            number=number,
            parent=parent,
            continues=continues,
            prompt_ids=outputs.prompt_ids,
            completion=completion,
            seed=outputs.seeds[choice],
            latency_s=outputs.latency_s,
            text=self.policy.chat.decode(completion.token_ids),
            messages=request.messages,
            message=_message(answer, calls, request.stop_texts, self.policy.chat.completion_text(completion.token_ids)),
            cut=completion.finish_reason == "length" and len(completion.token_ids) == own < most,
            calls=calls,
        )


def _message(answer: ParsedAnswer, calls: Sequence[Call], stop: Sequence[str], whole: str) -> dict[str, Any]:
    """Return the assistant's message. Without a call that can be read, its content is the `whole` text."""
    readable = [call for call in calls if call.status != "unparsable"]
    content = whole if calls and not readable else answer.content
    for text in stop:
        content = content.partition(text)[0]
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if readable:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in readable
        ]
    return message


def _note_answers(node: Node, new: Sequence[ChatMessage]) -> None:
    """Note what answered a completion, unless another branch has answered it before: feedback, outputs of calls."""
    if node.feedback:
        return
    node.feedback = "\n".join(message["content"] for message in new)
    outputs = {message.get("tool_call_id"): message["content"] for message in new if message["role"] == "tool"}
    node.calls = [
        replace(call, output=outputs[call.id], status=_status(outputs[call.id])) if call.id in outputs else call
        for call in node.calls
    ]


def _status(output: str) -> Any:
    """Return the status of a call with this output: our own tools, and those of most frameworks, say `error` first."""
    return "failed" if output.lstrip().lower().startswith("error") else "answered"


def _digest(*parts: object) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()
