"""The turns of one episode, collected into the token columns of a trajectory."""

import dataclasses
import json
from collections.abc import Mapping

from storage.records import LAST_TURN_CUT, Status, Trajectory, Turn
from tasks.agents.interface import EpisodeSpec
from tasks.inference.api import BundledGenerationOutputs

_OTHER_LIMIT = "the last turn reached its limit: that of its request, the room in the context, or a request's time"


class Episode:
    """A trajectory under construction. It grows turn by turn: prompt, completion, feedback, completion …

    If a template rewrites earlier turns, the episode has several sequences. The columns contain one after the other.

    Example: the second turn solves the problem. The prompt is rendered as the tokens 5 6, and the policy samples 7 8.
    The feedback is rendered as 3 4 (with the end of the assistant's turn and its next header), and the policy samples
    9 8. `trajectory()` then returns a record with these columns:

        token_ids         5    6    7     8     3    4    9     8
        action_mask       F    F    T     T     F    F    T     T       T: sampled by the policy
        logprobs          0    0   -0.4  -0.1   0    0   -0.7  -0.2     behaviour logprobs
        versions         -1   -1    3     3    -1   -1    3     3       policy version that sampled the token
        turns            Turn(start=2, end=4, verdict="wrong", reward=0.0, feedback="Your answer is wrong. …", …)
                         Turn(start=6, end=8, verdict="correct", reward=1.0, feedback="", …)
        sequence_starts  [0] (if the template rewrites the first turn: [0, 4], and a whole new prompt begins at token 4)

    Args:
        prompt: the episode's identity.
        token_ids: ids of the rendered prompt.
    """

    def __init__(self, prompt: EpisodeSpec, token_ids: list[int]) -> None:
        self._record = prompt.record
        self.token_ids: list[int] = []  # of all sequences
        self._mask, self._logprobs, self._versions = list[bool](), list[float](), list[int]()
        self._starts = [0]
        self.turns: list[Turn] = []
        self._parts: list[dict[str, float]] = []
        self._limits: list[int | None] = []
        self._add_prompt(token_ids)

    @property
    def prompt_ids(self) -> list[int]:
        """The ids of the current sequence, which the policy continues."""
        return self.token_ids[self._starts[-1] :]

    def _add_prompt(self, token_ids: list[int]) -> None:
        self.token_ids += token_ids
        self._mask += [False] * len(token_ids)
        self._logprobs += [0.0] * len(token_ids)
        self._versions += [-1] * len(token_ids)

    def add_completion(self, outputs: BundledGenerationOutputs, text: str, index: int = 0) -> None:
        """Append completion `index` as a new turn without a verdict.

        Raises:
            ValueError: the outputs belong to a prompt that differs from the ids of the current sequence.
        """
        if outputs.prompt_ids != self.prompt_ids:
            raise ValueError(f"{outputs.qid}: the completion's prompt does not extend this episode's tokens")
        completion = outputs.completions[index]
        start, count = len(self.token_ids), len(completion.token_ids)
        turn = Turn(
            start=start,
            end=start + count,
            text=text,
            verdict="",
            reward=0.0,
            finish_reason=completion.finish_reason,
            feedback="",
            latency_s=outputs.latency_s,
            seed=outputs.seeds[index],
        )
        self.token_ids += completion.token_ids
        self._mask += [True] * count
        self._logprobs += completion.logprobs
        self._versions += completion.versions
        self.turns.append(turn)
        self._parts.append({})
        self._limits.append(completion.limit)

    def set_verdict(self, verdict: str, reward: float, parts: Mapping[str, float] | None = None) -> None:
        """Record the environment's verdict on the last turn, and its reward with its named parts, if it has any."""
        self.turns[-1] = dataclasses.replace(self.turns[-1], verdict=verdict, reward=reward)
        self._parts[-1] = dict(parts or {})

    def add_feedback(self, text: str, token_ids: list[int]) -> None:
        """Append the feedback on the last turn: its text to the turn, its rendered ids to the sequence."""
        self.turns[-1] = dataclasses.replace(self.turns[-1], feedback=text)
        self._add_prompt(token_ids)

    def start_sequence(self, text: str, prompt_ids: list[int]) -> None:
        """Append feedback as `add_feedback` does, but begin a new sequence with the whole prompt `prompt_ids`."""
        self._starts.append(len(self.token_ids))
        self.add_feedback(text, prompt_ids)

    def trajectory(
        self,
        turn_discount: float = 1.0,
        status: Status | None = None,
        reason: str = "",
        unplayed_turns: int | None = None,
    ) -> Trajectory:
        """Return the record. Without a status, the agent has ended the episode, and all turns were played.

        Args:
            turn_discount: return of turn k = reward k + turn_discount * return of turn k+1.
            status: `truncated` if the context had no room for the next turn. Default: `completed`, or `truncated`
                if the token limit cut the last turn.
            reason: why the status is not `completed`.
            unplayed_turns: number of answers that are missing, such as those for which the context had no room; each
                has the least reward. Without this number one counts, with a bound (`tasks.train.samples.bounded`).
        """
        ended, usual = status is None, json.loads(self._record.sampling).get("max_new_tokens", 0)
        limits = [limit or usual for limit in self._limits]  # the most tokens of each turn
        if all(limit == usual for limit in limits):  # `sampling.max_new_tokens` was in force everywhere
            limits = []
        if ended and self.turns and self.turns[-1].finish_reason == "length":
            status, reason = "truncated", _OTHER_LIMIT if limits else LAST_TURN_CUT
        if unplayed_turns is None:
            unplayed_turns = 0 if ended else -1
        return dataclasses.replace(
            self._record,
            status=status or "completed",
            reason=reason,
            token_ids=self.token_ids,
            action_mask=self._mask,
            logprobs=self._logprobs,
            versions=self._versions,
            turns=self.turns,
            turn_discount=turn_discount,
            sequence_starts=self._starts,
            unplayed_turns=unplayed_turns,
            reward_parts=self._parts if any(self._parts) else [],
            limits=limits,
        )
