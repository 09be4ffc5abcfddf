"""The tree of messages of an episode: what the policy answered to which conversation, and which request goes on.

Each completion is a node. A request that begins with a node's conversation and its answer goes on from it: its prompt
is the node's own tokens and what the new messages add. Other requests begin a conversation of their own.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from storage.records import Call
from tasks.agents.rendering.interface import ChatMessage, ToolSpec
from tasks.inference.api import Completion


@dataclass(eq=False)
class Node:
    """One completion.

    Attributes:
        number: its place among the completions of the episode, as they were answered.
        parent: the completion that its conversation goes on from.
        continues: whether `prompt_ids` begins with the tokens of the parent, its completion included.
        messages: the conversation before the completion.
        message: the completion, as the agent got it.
        calls: the calls of tools in it, and what the agent sent as their outputs.
        feedback: what the agent sent next.
        verdict, reward, parts: what the environment said about it.
        graded: whether the environment was asked about it.
    """

    number: int
    parent: "Node | None"
    continues: bool
    prompt_ids: list[int]
    completion: Completion
    seed: int
    latency_s: float
    text: str
    messages: list[ChatMessage]
    message: ChatMessage
    calls: list[Call] = field(default_factory=list)
    feedback: str = ""
    verdict: str = ""
    reward: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    graded: bool = False

    @property
    def token_ids(self) -> list[int]:
        """The ids of prompt and completion."""
        return self.prompt_ids + self.completion.token_ids


class Tree:
    """The completions of an episode, found by the conversations that they end."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._by_conversation: dict[bytes, Node] = {}

    def add(self, node: Node, tools: Sequence[ToolSpec]) -> None:
        """Add a completion, which answers a request with these tools."""
        self.nodes.append(node)
        *_, conversation = _digests([*node.messages, node.message], tools)
        self._by_conversation[conversation] = node

    def find(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec]) -> tuple[Node | None, list[ChatMessage]]:
        """Return the completion that a request goes on from, and the messages after it; None and all of them if none.

        If equal completions ended equal conversations, the last of them.
        """
        found, count = None, 0
        for place, digest in enumerate(_digests(messages, tools), 1):
            if node := self._by_conversation.get(digest):
                found, count = node, place
        return found, list(messages[count:])


def _digests(messages: Sequence[ChatMessage], tools: Sequence[ToolSpec]) -> Iterator[bytes]:
    """Yield a digest of each beginning of a conversation: of 1 message, of 2 …

    What clients change without meaning does not count: whitespace around contents, the order of members, thoughts.
    """
    chain = hashlib.blake2b(json.dumps(tools, sort_keys=True).encode(), digest_size=16)
    for message in messages:
        calls = [(call["id"], call["function"]) for call in message.get("tool_calls", ())]
        parts = [message["role"], message["content"].strip(), calls, message.get("tool_call_id")]
        chain.update(json.dumps(parts, sort_keys=True).encode())
        yield chain.digest()
