"""Ten episodes whose turns are no plain chain, or only look like none, as the endpoint for agents records them.

A row has the columns of `storage.records.Trajectory` that say who could know what, in the stored order of turns:
sequences by their last completions. tests/agents/endpoint/test_trees.py plays those that are not alike; what their
turns are paid is a matter of tests/train.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from storage.records import Score, Trajectory, Turn, VerdictName
from tests.support.train_helpers import make_trajectory


@dataclass(frozen=True)
class Tree:
    """The turns of an episode, K in their stored order."""

    follows: Sequence[int]  # K
    rewards: Sequence[float | None]  # K; None: the environment was not asked
    asked: Sequence[int] = ()  # K, or nothing in a chain
    received: Sequence[int] = ()
    paid: Sequence[int] = ()

    def trajectory(self, name: str = "t", problem: str = "p", turn_discount: float = 1.0) -> Trajectory:
        """Return the record: the prompt is 1 2 3, what follows an answer 4 5, and turn k says 10 + k, 9."""
        ids, mask, turns, starts, ends = list[int](), list[bool](), list[Turn](), list[int](), list[list[int]]()
        for place, (before, reward) in enumerate(zip(self.follows, self.rewards, strict=True)):
            prompt = [*ends[before], 4, 5] if before >= 0 else [1, 2, 3]
            ends.append([*prompt, 10 + place, 9])
            if before < 0 or before != place - 1:
                starts.append(len(ids))
            else:
                prompt = [4, 5]
            start = len(ids) + len(prompt)
            verdict = "" if reward is None else _verdict(reward)
            turns.append(Turn(start, start + 2, "", verdict, reward or 0.0, "stop", "", 0.0, 0))
            ids, mask = [*ids, *prompt, 10 + place, 9], [*mask, *[False] * len(prompt), True, True]
        return replace(
            make_trajectory(name, [], problem=problem, turn_discount=turn_discount, unplayed_turns=0),
            token_ids=ids,
            action_mask=mask,
            logprobs=[-1.0 if sampled else 0.0 for sampled in mask],
            versions=[0 if sampled else -1 for sampled in mask],
            turns=turns,
            sampling='{"max_new_tokens": 8}',
            sequence_starts=starts,
            ungraded=[place for place, reward in enumerate(self.rewards) if reward is None],
            follows=list(self.follows),
            asked=list(self.asked),
            received=list(self.received),
            paid=list(self.paid),
        )

    def scores(self, name: str = "t") -> list[Score]:
        """Return the scores of the turns: those of the environment."""
        return [
            Score(name, turn, _verdict(reward), float((reward or 0) > 0), "", "", "", reward or 0.0)
            for turn, reward in enumerate(self.rewards)
        ]


TREES = {  # follows, rewards, asked, received, paid
    # Wrong, wrong, right.
    "chain": Tree([-1, 0, 1], [0, 0, 1]),
    # One request with n=3; the agent gives the environment the second candidate.
    "candidates": Tree([-1, -1, -1], [None, 1, None], [0, 0, 0], [0, 1, 2], [0, 3, 0]),
    # One request with n=3; the agent goes on with the first candidate, which is stored after the others for that.
    "candidate that goes on": Tree([-1, -1, -1, 2], [None, None, None, 1], [0, 0, 0, 3], [1, 2, 0, 3], [0, 0, 0, 4]),
    # The same question again after a wrong answer: not in the prompt, and a chain in time.
    "retry": Tree([-1, -1], [0, 1]),
    # A planner; two workers at once, graded when both have answered; the planner's last word.
    "planner and workers": Tree([-1, -1, -1, 2], [1, 0, None, None], [1, 1, 0, 3], [1, 2, 0, 3], [3, 3, 0, 0]),
    # Two turns, then a new conversation that begins with their summary: a chain in time.
    "compaction": Tree([-1, 0, -1], [None, None, 1]),
    # Two calls of tools and an answer.
    "tool loop": Tree([-1, 0, 1], [None, None, 1]),
    # Two conversations of two turns at once. First answers: a's, then b's. Each asks again at once, and is graded.
    "two sub-agents": Tree([-1, 0, -1, 2], [None, 1, None, 0], [0, 1, 0, 2], [0, 2, 1, 3], [0, 3, 0, 4]),
    # Two ways to go on from the first turn, asked for at once; the agent goes on with the second of them.
    "unused branch": Tree([-1, 0, 0, 2], [None, None, None, 1], [0, 1, 1, 3], [0, 1, 2, 3], [0, 0, 0, 4]),
    # The agent lost patience and asked again; the first answer came when the second was there.
    "nobody waited": Tree([-1, -1], [1, None], [0, 0], [0, -1], [1, 0]),
}
"""Episodes by name; each turn without a reward was given to no environment."""


def _verdict(reward: float | None) -> VerdictName:
    return "none" if reward is None else "correct" if reward > 0 else "wrong"
