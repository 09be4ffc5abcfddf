"""The turns of one episode, gathered into token columns with their action mask."""

import dataclasses

from storage.records import LAST_TURN_CUT, Status, Trajectory, Turn
from tasks.agents.interface import EpisodeSpec
from tasks.inference.api import BundledGenerationOutputs


class Episode:
    """Grows a sequence turn by turn: prompt, completion, feedback, completion …; or several, laid end to end.

    Args:
        prompt: the episode's identity.
        token_ids: ids of the rendered prompt.
    """

    def __init__(self, prompt: EpisodeSpec, token_ids: list[int]) -> None:
        self._record = prompt.record
        self.token_ids = list(token_ids)  # of all sequences
        self._starts = [0]
        self._mask = [False] * len(token_ids)
        self._logprobs = [0.0] * len(token_ids)
        self._versions = [-1] * len(token_ids)
        self.turns: list[Turn] = []

    @property
    def prompt_ids(self) -> list[int]:
        """What the policy is to continue: the ids of the current sequence."""
        return self.token_ids[self._starts[-1] :]

    def add_completion(self, outputs: BundledGenerationOutputs, text: str, index: int = 0) -> None:
        """Append completion `index` as a new turn, not yet judged.

        Raises:
            ValueError: the outputs belong to another prompt than the current sequence's ids.
        """
        if outputs.prompt_ids != self.prompt_ids:
            raise ValueError(f"{outputs.qid}: the completion's prompt does not extend this episode's tokens")
        completion = outputs.completions[index]
        start, count = len(self.token_ids), len(completion.token_ids)
        self.token_ids += completion.token_ids
        self._mask += [True] * count
        self._logprobs += completion.logprobs
        self._versions += completion.versions
        self.turns.append(
            Turn(
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
        )

    def set_verdict(self, verdict: str, reward: float) -> None:
        """What the environment said of the last turn."""
        self.turns[-1] = dataclasses.replace(self.turns[-1], verdict=verdict, reward=reward)

    def add_feedback(self, text: str, token_ids: list[int]) -> None:
        """Append what the policy is told after the last turn."""
        self.turns[-1] = dataclasses.replace(self.turns[-1], feedback=text)
        self.token_ids += token_ids
        self._mask += [False] * len(token_ids)
        self._logprobs += [0.0] * len(token_ids)
        self._versions += [-1] * len(token_ids)

    def start_sequence(self, text: str, prompt_ids: list[int]) -> None:
        """Like `add_feedback`, where the next prompt is not the ids held so far and more: all of it begins anew."""
        self._starts.append(len(self.token_ids))
        self.add_feedback(text, prompt_ids)

    def trajectory(
        self,
        turn_discount: float = 1.0,
        status: Status | None = None,
        reason: str = "",
        unplayed_turns: int | None = None,
    ) -> Trajectory:
        """The record. Without a status the agent has ended the episode, and no turn was left unplayed.

        Args:
            turn_discount: return of turn k = reward k + turn_discount * return of turn k+1.
            status: `truncated` where the context had no room for the next turn. Empty: `completed`, or `truncated`
                where the token limit cut the last turn.
            reason: why it is not `completed`.
            unplayed_turns: how many turns the context had no room for; each counts as a wrong answer. Without this
                number a truncated episode needs a critic: a group baseline leaves it out.
        """
        ended = status is None
        if ended and self.turns and self.turns[-1].finish_reason == "length":
            status, reason = "truncated", LAST_TURN_CUT
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
        )
