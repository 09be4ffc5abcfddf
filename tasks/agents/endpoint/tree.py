"""The tree of messages of an episode, and the trajectory that is made of it (`record`).

Each completion is a node: the tree knows what the policy answered to which conversation. A request that begins with a
node's conversation and its answer goes on from it: its prompt is the node's own tokens and what the new messages add.
Other requests begin a conversation of their own.

The ids of calls do not count: some clients write ids of their own, or none (`number_calls`).
"""

import hashlib
import itertools
import json
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import orjson

from storage.records import Call, Status, Trajectory
from tasks.agents.answers import ChatMessage, ToolSpec, read_arguments
from tasks.agents.episode import Episode
from tasks.agents.interface import EpisodeSpec
from tasks.inference.api import BundledGenerationOutputs, Completion


@dataclass(eq=False)
class Node:
    """One completion.

    Attributes:
        parent: the completion that its conversation goes on from.
        continues: whether `prompt_ids` begins with the tokens of the parent, its completion included.
        messages: the conversation before the completion.
        message: the completion, as the agent got it.
        calls: the calls of tools in it, and what the agent sent as their outputs.
        feedback: what the agent sent next.
        verdict, reward, parts: what the environment said about it.
        graded: whether the environment was asked about it.
        given: what the environment was given; None: the text itself.
        cut: whether a limit of the request, lower than the run's, ended it.
        asked: how many completions the agent had when it sent the request.
        received: its position among the completions that the agent got; -1: the agent no longer waited for it.
        paid: how many completions the agent had when it gave this one to the environment, the last time; 0: never.
        conversation: the digest of its conversation, the completion included.
    """

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
    given: str | None = None
    cut: bool = False
    asked: int = 0
    received: int = -1
    paid: int = 0
    conversation: bytes = b""

    @property
    def token_ids(self) -> list[int]:
        """The ids of prompt and completion."""
        return self.prompt_ids + self.completion.token_ids

    def answers(self, names: Collection[str]) -> set[str]:
        """Return its content, and the values in its calls of these tools: answers in the form of a call are there."""
        calls = [call for call in self.calls if call.name in names and call.status != "unparsable"]
        values = [value for call in calls for value in json.loads(call.arguments).values()]
        return {str(value).strip() for value in (self.message["content"], *values)}


class Position(NamedTuple):
    """The position of a request in the tree."""

    parent: Node | None  # the completion that the request goes on from; None if it begins a conversation
    call_ids: list[str]  # the numbers of that completion's calls, see `number_calls`
    new: list[ChatMessage]  # the messages after that completion, or all of them
    conversation: "hashlib.blake2b"  # a digest of all of its messages


def number_calls(messages: Sequence[ChatMessage]) -> None:
    """Replace the ids of calls in a conversation, and in outputs of tools, by numbers: `call00001` and so on.

    A number follows from the position alone, so that it does not matter which ids a client writes. Templates may show
    it: some refuse an id that has not nine letters and digits.

    An output belongs to that of the newest calls with its id or, without such, to the first of them that has no output.
    If all have one, it has a number of its own.

    Args:
        messages: they are changed in place.
    """
    numbers = map("call{:05}".format, itertools.count(1))
    waiting = OrderedDict[str, str]()  # the numbers of the newest calls that have no output, by id
    for message in messages:
        if calls := message.get("tool_calls"):
            waiting.clear()
            for call in calls:
                number = next(numbers)
                waiting[number if call["id"] in waiting else call["id"]] = number
                call["id"] = number
        elif message["role"] == "tool":
            stated = message.get("tool_call_id", "")
            found = waiting.pop(stated if stated in waiting else next(iter(waiting), ""), "")
            message["tool_call_id"] = found or next(numbers)


class Tree:
    """The completions of an episode; those that the agent got are found by the conversations that they end."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.received: list[Node] = []
        self._by_conversation: dict[bytes, Node] = {}

    def find(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec]) -> Position:
        """Return the position of a request; where equal completions ended equal conversations, behind the last one."""
        digest = hashlib.blake2b(orjson.dumps(tools, option=orjson.OPT_SORT_KEYS), digest_size=16)
        parent, count = None, 0
        for number, message in enumerate(messages, 1):
            digest.update(_essence(message))
            if message["role"] == "assistant" and (node := self._by_conversation.get(digest.digest())):
                parent, count = node, number
        calls = messages[count - 1].get("tool_calls", ()) if parent else ()
        return Position(parent, [call["id"] for call in calls], list(messages[count:]), digest)

    def add(self, node: Node, position: Position) -> None:
        """Add a completion of a request that has this position."""
        digest = position.conversation.copy()
        digest.update(_essence(node.message))
        node.conversation = digest.digest()
        self.nodes.append(node)

    def hand_out(self, node: Node) -> None:
        """Note that the agent gets a completion; its requests may go on from it now."""
        node.received = len(self.received)
        self.received.append(node)
        self._by_conversation[node.conversation] = node


def _essence(message: ChatMessage) -> bytes:
    """Return what counts of a message when two are compared.

    What clients change without meaning does not: whitespace around the content and in the arguments of a call, the
    order of members, thoughts, ids of calls (here the output of a tool has the number of its call).
    """
    calls = [
        (call["function"]["name"], json.dumps(json.loads(read_arguments(text) or json.dumps(text)), sort_keys=True))
        for call in message.get("tool_calls", ())
        for text in (call["function"]["arguments"].strip(),)
    ]
    parts = [message["role"], message["content"].strip(), calls, message.get("tool_call_id")]
    return orjson.dumps(parts, option=orjson.OPT_SORT_KEYS)


def record(
    prompt: EpisodeSpec,
    nodes: Sequence[Node],
    turn_discount: float,
    status: Status | None = None,
    reason: str = "",
    unplayed_turns: int | None = None,
) -> Trajectory:
    """Return the trajectory of 1 or more completions; the last arguments as in `Episode.trajectory`.

    Each completion is one turn, and a turn of one sequence only. A completion that goes on with the tokens of another
    one stands behind it in the same sequence. Where two go on from the same one, the second begins a new sequence: it
    repeats the tokens up to the branch, which are no action tokens there.

    Example: the policy answers a question (tokens 5 6) with 7. The agent asks further (4), and is answered with 8.
    Then it asks the first question's answer something else (3), and is answered with 9:

        token_ids        5  6  7  4  8    5  6  7  3  9
        action_mask      F  F  T  F  T    F  F  F  F  T
        sequence_starts  [0, 5]
        turns            7, 8, 9         follows  [-1, 0, 0]

    Sequences are ordered by their last completions. What the agent knew when is not in this order, but in the columns
    `asked`, `received` and `paid`. They are empty here, since each question came after the answer before it. Had the
    agent asked both further questions at once, and given 9 to the environment when it had all three:

        asked  [0, 1, 1]    received  [0, 1, 2]    paid  [0, 0, 3]
    """
    sequences = _sequences(nodes)
    ordered = [node for sequence in sequences for node in sequence]
    episode = Episode(prompt, ordered[0].prompt_ids)
    for before, node in zip([None, *ordered], ordered, strict=False):
        if before and before is node.parent and node.continues:
            episode.add_feedback(before.feedback, node.prompt_ids[len(episode.prompt_ids) :])
        elif before:
            episode.start_sequence(before.feedback, node.prompt_ids)
        outputs = BundledGenerationOutputs("", node.prompt_ids, [node.completion], [node.seed], node.latency_s)
        episode.add_completion(outputs, node.text)
        episode.set_verdict(node.verdict, node.reward, node.parts)
    episode.add_feedback(ordered[-1].feedback, [])
    if status is None and ordered[-1].cut:  # the agent wanted no more of it, and ended
        status, unplayed_turns = "completed", 0
    chain = all(each.received == each.asked == turn and each.paid in (0, turn + 1) for turn, each in enumerate(ordered))
    positions = {node: position for position, node in enumerate(ordered)}
    return replace(
        episode.trajectory(turn_discount, status, reason, unplayed_turns),
        calls=[replace(call, turn=position) for node, position in positions.items() for call in node.calls],
        ungraded=[position for node, position in positions.items() if not node.graded],
        follows=[positions[node.parent] if node.parent else -1 for node in ordered],
        answers=[node.given for node in ordered] if any(node.given is not None for node in ordered) else [],
        received=[] if chain else [node.received for node in ordered],
        asked=[] if chain else [node.asked for node in ordered],
        paid=[] if chain else [node.paid for node in ordered],
    )


def _sequences(nodes: Sequence[Node]) -> list[list[Node]]:
    """Return the completions as sequences, each of which goes on with the tokens of the one before it.

    The sequences are in the order of their last completions, as `nodes` are.
    """
    by_last: dict[Node, list[Node]] = {}
    for node in nodes:
        sequence = by_last.pop(node.parent, []) if node.parent and node.continues else []
        sequence.append(node)
        by_last[node] = sequence
    return list(by_last.values())
