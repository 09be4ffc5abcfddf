"""The trajectory of an episode, made of its tree of completions.

Each completion is one turn, and a turn of one sequence only. A completion that goes on with the tokens of another one
stands behind it in the same sequence. Where two go on from the same one, the second begins a new sequence: it repeats
the tokens up to the branch, which are no action tokens there.

Example: the policy answers a question (tokens 5 6) with 7. The agent asks further (4), and is answered with 8. Then it
asks the first question's answer something else (3), and is answered with 9:

    token_ids        5  6  7  4  8    5  6  7  3  9
    action_mask      F  F  T  F  T    F  F  F  F  T
    sequence_starts  [0, 5]
    turns            7, 8, 9         follows  [-1, 0, 0]

Sequences are ordered by their last completions. What the agent knew when is not in this order, but in the columns
`asked`, `received` and `paid`. They are empty here, since each question came after the answer before it. Had the agent
asked both further questions at once, and given 9 to the environment when it had all three:

    asked  [0, 1, 1]    received  [0, 1, 2]    paid  [0, 0, 3]
"""

import json
from collections.abc import Sequence
from dataclasses import replace

from storage.records import Status, Trajectory
from tasks.agents.endpoint.tree import Node
from tasks.agents.episode import Episode
from tasks.agents.interface import EpisodeSpec
from tasks.inference.api import BundledGenerationOutputs


def record(
    prompt: EpisodeSpec,
    nodes: Sequence[Node],
    turn_discount: float,
    status: Status | None = None,
    reason: str = "",
    unplayed_turns: int | None = None,
) -> Trajectory:
    """Return the trajectory of 1 or more completions; the last arguments as in `Episode.trajectory`."""
    sequences = _sequences(nodes)
    episode = Episode(prompt, sequences[0][0].prompt_ids)
    for sequence in sequences:
        first, *others = sequence
        if sequence is not sequences[0]:
            episode.start_sequence("", first.prompt_ids)
        _add(episode, first)
        for node in others:
            episode.add_feedback("", node.prompt_ids[len(episode.prompt_ids) :])
            _add(episode, node)
    ordered = [node for sequence in sequences for node in sequence]
    if status is None and ordered[-1].cut:  # the agent wanted no more of it, and ended
        status, unplayed_turns = "completed", 0
    turns = [
        replace(turn, feedback=node.feedback, verdict=node.verdict, reward=node.reward)
        for turn, node in zip(episode.turns, ordered, strict=True)
    ]
    received, asked, paid = _what_was_known(ordered)
    sampling = prompt.record.sampling
    if any(node.forced for node in nodes):
        sampling = json.dumps(json.loads(sampling) | {"json_schema": True})
    positions = {node: position for position, node in enumerate(ordered)}
    return replace(
        episode.trajectory(turn_discount, status, reason, unplayed_turns),
        turns=turns,
        calls=[replace(call, turn=position) for node, position in positions.items() for call in node.calls],
        ungraded=[position for node, position in positions.items() if not node.graded],
        follows=[positions[node.parent] if node.parent else -1 for node in ordered],
        reward_parts=[node.parts for node in ordered] if any(node.parts for node in ordered) else [],
        answers=[node.given for node in ordered] if any(node.given is not None for node in ordered) else [],
        received=received,
        asked=asked,
        paid=paid,
        sampling=sampling,
    )


def _what_was_known(nodes: Sequence[Node]) -> tuple[list[int], list[int], list[int]]:
    """Return the columns `received`, `asked` and `paid`, which are empty in a chain."""
    if all(node.received == node.asked == turn and node.paid in (0, turn + 1) for turn, node in enumerate(nodes)):
        return [], [], []
    return [node.received for node in nodes], [node.asked for node in nodes], [node.paid for node in nodes]


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


def _add(episode: Episode, node: Node) -> None:
    outputs = BundledGenerationOutputs("", node.prompt_ids, [node.completion], [node.seed], node.latency_s)
    episode.add_completion(outputs, node.text)
