"""Episodes with branches and calls of tools, written as the endpoint for agents records them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from storage.records import Call, Problem, Trajectory
from tasks.agents.chat import Chat
from tasks.agents.endpoint.tree import Node, record
from tasks.agents.interface import EpisodeSpec
from tasks.inference.api import Completion
from tests.support.train_helpers import make_trajectory


@dataclass
class Branching:
    """The completions of one episode, each after another one or at the begin of a conversation."""

    chat: Chat
    spec: EpisodeSpec
    version: int = 0  # of the policy
    nodes: list[Node] = field(default_factory=list)

    def say(
        self,
        text: str,
        after: Node | None = None,
        told: str = "",
        *,
        calls: Sequence[Call] = (),
        verdict: str = "",
        rewritten: bool = False,
    ) -> Node:
        """Add what the policy said.

        Args:
            text: the completion.
            after: the completion that it goes on from; None begins a conversation.
            told: what the agent sent before it.
            calls: the calls in it, with their outputs.
            verdict: that of the environment, which grades a completion if there is one.
            rewritten: the prompt does not begin with the tokens of `after`.
        """
        messages = [{"role": "user", "content": told}]
        prompt_ids, continues = self.chat.prompt(messages), False
        if after:
            following = self.chat.next_prompt(after.messages, after.completion.token_ids, told)
            messages, prompt_ids = following.messages, after.token_ids + following.token_ids
            if rewritten:
                prompt_ids = self.chat.prompt([{"role": "system", "content": "Be brief."}, *messages])
            continues = prompt_ids[: len(after.token_ids)] == after.token_ids
            after.feedback = after.feedback or told
        ids = self.chat.encode(text + "<|im_end|>")
        completion = Completion(ids, [-1.0] * len(ids), [self.version] * len(ids), "stop")
        number = len(self.nodes)
        node = Node(after, continues, prompt_ids, completion, self.spec.seed + number, 0.1, text, messages, {})
        node.calls, node.verdict, node.graded = list(calls), verdict, bool(verdict)
        node.reward = float(verdict == "correct")
        node.asked = node.received = number
        node.paid = number + 1 if verdict else 0
        self.nodes.append(node)
        return node

    def trajectory(self) -> Trajectory:
        """Return the record of the episode."""
        return replace(record(self.spec, self.nodes, 1.0), unplayed_turns=0)


def begin(chat: Chat, name: str, problem: Problem, sample: int = 0) -> Branching:
    """Begin an episode of a problem, with its own seeds for each sample."""
    row = replace(make_trajectory(name, [], problem=problem.problem_id), sample=sample, prompt=problem.prompt)
    return Branching(chat, EpisodeSpec(name, problem, 100 * sample, replace(row, solutions=problem.solutions)))


def with_branches(episode: Branching, gold: int) -> Trajectory:
    """Play an episode that asks a helper, goes two ways after a wrong answer, and rewrites the history of one of them.

    Turns: the helper's (0), the conversation (1, 2), the branch (3), and the rewritten end (4).
    """
    wrong, right = (rf"\boxed{{{answer}}}" for answer in (gold + 1, gold))
    first = episode.say(wrong, told=episode.spec.problem.prompt, verdict="wrong")
    episode.say("It has 2 digits.", told="How long is the answer?")
    one, _ = [episode.say(right, first, told, verdict="correct") for told in ("Try again.", "Once more.")]
    episode.say(right, one, "Is that so?", verdict="correct", rewritten=True)
    return episode.trajectory()
