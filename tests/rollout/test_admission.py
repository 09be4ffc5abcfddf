"""Trajectories that cannot be stored or trained on are refused with a reason, and all ids differ."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from storage.records import HIGHEST_LOGPROB, Problem, Trajectory
from tasks.agents.chat import Chat
from tasks.agents.interface import AgentContext, EpisodeSpec
from tasks.agents.math_multi_turn import MathMultiTurnAgent
from tasks.inference.api import Completion
from tasks.score.verifier import Verifier
from tests.support.rollout_helpers import PROBLEM, RIGHT, WRONG, ScriptedEngine, context, play

Change = Callable[[Trajectory], Any]


class Returns(MathMultiTurnAgent):
    """An agent that plays two turns and returns what `change` makes of the trajectory."""

    def __init__(self, context: AgentContext, change: Change) -> None:
        super().__init__(context, num_turns=2)
        self._change = change

    async def play(self, prompt: EpisodeSpec, *others: Any) -> Any:
        (played,) = await super().play(prompt, *others)
        return self._change(played)


def played(chat: Chat, verifier: Verifier, change: Change, problems: list[Problem] | None = None) -> list[Trajectory]:
    engine = ScriptedEngine(chat, lambda turn, _: [WRONG, RIGHT][turn])
    return play(engine, Returns(context(chat), change), verifier, problems, group_size=2)


def turned(**changes: Any) -> Change:
    """Return a change of the first turn."""
    return lambda row: [replace(row, turns=[replace(row.turns[0], **changes), row.turns[1]])]


def rowed(**changes: Any) -> Change:
    return lambda row: [replace(row, **changes)]


def at(position: int, column: str, value: Any) -> Change:
    """Return a change of one value of a column."""

    def change(row: Trajectory) -> list[Trajectory]:
        values: Any = list(getattr(row, column))
        values[position] = value
        return [replace(row, **{column: values})]

    return change


def whole(column: str, convert: Callable[[Any], Any]) -> Change:
    return lambda row: rowed(**{column: convert(getattr(row, column))})(row)


def in_one(row: Trajectory) -> list[Trajectory]:
    """Join both turns, and the feedback between them, into one turn."""
    turn = replace(row.turns[0], end=row.turns[1].end)
    return [replace(row, turns=[turn], action_mask=[position >= turn.start for position in range(len(row.token_ids))])]


def shorter(row: Trajectory) -> list[Trajectory]:
    """Drop the last token of the last turn."""
    columns = {name: getattr(row, name)[:-1] for name in ("token_ids", "action_mask", "logprobs", "versions")}
    return [replace(row, turns=[row.turns[0], replace(row.turns[1], end=row.turns[1].end - 1)], **columns)]


SAMPLED = -1  # the last token is a sampled one
NOTHING = {"token_ids": [5], "action_mask": [False], "logprobs": [0.0], "versions": [-1], "turns": []}
FAULTS: dict[str, tuple[Change, str]] = {
    "None": (lambda _: None, "returned None: return a list of trajectories"),
    "others": (lambda row: [{"status": "completed"}], "a list with a value of type dict"),
    "problem": (rowed(problem_id="another"), "problem_id='another': make it from prompt.record"),
    "policy": (rowed(policy_version=9), "policy_version=9"),
    "status": (rowed(status="done"), "status is 'done': Input should be 'completed', 'truncated'"),
    "surrogate": (turned(feedback="a\ud800b"), "unable to parse raw data as a unicode string"),
    "gigantic": (turned(text="x" * 2_000_000), "String should have at most 1000000 characters"),
    "reward": (turned(reward=math.nan), "reward of turn 0 is nan: give a finite number"),
    "infinite": (turned(reward=10**400), "reward of turn 0"),
    "seed": (turned(seed=2**63), "seed of turn 0"),
    "finish": (turned(finish_reason="abort"), "finish_reason of turn 0 is 'abort'"),
    "overlap": (lambda row: turned(end=row.turns[1].end)(row), "overlaps the turn before"),
    "beyond": (lambda row: [replace(row, turns=[replace(row.turns[0], end=10**6)])], "ends after the"),
    "dict turn": (rowed(turns=[{"start": 0}]), "turns holds values of type dict, not Turn"),
    "prompt mask": (at(0, "action_mask", True), "action_mask must be true for the turns' tokens and no others"),
    "mask": (whole("action_mask", lambda mask: [int(value) for value in mask]), "action_mask.0 is 0: Input should be"),
    "short": (whole("logprobs", lambda values: values[:-2]), "every token needs one"),
    "numpy": (whole("token_ids", lambda ids: list(np.array(ids))), "token_ids.0 is a value of type int64: "),
    "vocabulary": (at(0, "token_ids", 2**31 + 5), f"the policy has no token {2**31 + 5}"),
    "NaN": (at(SAMPLED, "logprobs", math.nan), "=nan: sampled tokens have -87.34 to 0. Keep the completion's"),
    "never sampled": (at(SAMPLED, "logprobs", -120.0), "the server is wrong: is its --logprobs-mode"),
    "prompt logprob": (at(0, "logprobs", -0.5), "token 0 was not sampled"),
    "version": (at(SAMPLED, "versions", 2), "the versions of turn 1 do not match a completion that this episode"),
    "another token": (at(SAMPLED, "token_ids", 7), "the token_ids of turn 1 do not match a completion"),
    "in one": (in_one, "the token_ids of turn 0 do not match a completion"),
    "circle": (lambda row: rowed(follows=[1, 0, *range(1, len(row.turns) - 1)])(row), "follow each other in a circle"),
    "starts": (rowed(sequence_starts=[0, 10**6]), "sequence_starts=[0, 1000000]: begin with 0"),
    "discount": (rowed(turn_discount=2.0), "turn_discount=2.0: give a number from 0 to 1"),
    "unplayed": (rowed(unplayed_turns=-2), "unplayed_turns=-2"),
    "answers": (rowed(answers=[3, None]), "answers.0 is 3: Input should be a valid string"),
    "limits": (rowed(limits=[8, 0]), "limits=[8, 0]: give numbers above 0"),
    "one limit": (rowed(limits=[8]), "limits has 1 values for 2 turns"),
    "no order": (rowed(received=[0, 1], asked=[0, 0]), "paid=[] is not possible"),
    "fault": (rowed(status="failed", fault="engine"), "fault is 'engine'"),
    "fault of a whole one": (rowed(fault="policy"), "fault='policy'"),
    "sampling": (rowed(sampling="{}"), "sampling='{}'"),
    "nothing sampled": (rowed(**NOTHING), "without a sampled token"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_trajectory_that_cannot_be_stored_or_trained_on_is_refused(chat: Chat, verifier: Verifier, name: str) -> None:
    """The episode fails with a reason. Its sampled tokens are kept, and Arrow can store all of it."""
    change, says = FAULTS[name]
    for row in played(chat, verifier, change):
        assert row.status == "failed"
        assert says in row.reason
        assert (len(row.turns), sum(row.action_mask) > 0) == (2, True)


def test_other_numbers_and_cut_completions_are_admitted(chat: Chat, verifier: Verifier) -> None:
    """An agent may use other number types for rewards, choose its sampling parameters, and cut a completion."""
    own = json.dumps({"temperature": 0.5, "max_new_tokens": 4})
    admitted: list[Change] = [shorter, rowed(sampling=own)]
    admitted += [turned(reward=reward) for reward in (1, True, np.float32(1), np.int64(1), np.True_)]
    for change in admitted:
        rows = played(chat, verifier, change)
        assert [(row.status, row.reason) for row in rows] == [("completed", "")] * 2
        assert {type(row.turns[0].reward) for row in rows} == {float}


def test_rounding_above_zero_is_admitted(chat: Chat, verifier: Verifier) -> None:
    """A server's logprob of a token with probability 1 is sometimes slightly above 0."""
    ids = chat.encode(RIGHT + "<|im_end|>")
    completion = Completion(ids, [HIGHEST_LOGPROB] * len(ids), [3] * len(ids), "stop")
    rows = play(ScriptedEngine(chat, lambda *_: completion), MathMultiTurnAgent(context(chat)), verifier)
    assert {row.status for row in rows} == {"completed"}


def test_agents_cannot_change_the_record_of_a_failed_episode(chat: Chat, verifier: Verifier) -> None:
    """Agents get the same list objects that the engine returned."""

    class Spoils(MathMultiTurnAgent):
        async def play(self, prompt: EpisodeSpec, env: Any, engine: Any) -> Any:
            ids = self.context.chat.prompt([{"role": "user", "content": "1"}])
            outputs = await engine.generate(ids, self.context.gconfig)
            ids += outputs.output_ids[0]
            outputs.output_ids[0].clear()
            raise RuntimeError("spoiled")

    engine = ScriptedEngine(chat, lambda *_: RIGHT)
    row = play(engine, Spoils(context(chat)), verifier, group_size=1)[0]
    prompt, answer = chat.prompt([{"role": "user", "content": "1"}]), chat.encode(RIGHT + "<|im_end|>")
    assert row.reason.startswith("RuntimeError: spoiled (test_admission.py:")
    assert row.token_ids == prompt + answer


def test_ids_never_collide(chat: Chat, verifier: Verifier) -> None:
    """Ids differ even if an agent returns several trajectories and problem ids look like sample ids."""
    problems = [replace(PROBLEM, problem_id=name) for name in ("a", "a/0", "a/0/1", "a/1")]
    rows = played(chat, verifier, lambda row: [row, row, row], problems)
    ids = [row.trajectory_id for row in rows]
    assert len(set(ids)) == len(ids) == 4 * 2 * 3
    assert {"r/000003/a/0", "r/000003/a/0:1", "r/000003/a/0/1", "r/000003/a/0/1:2"} <= set(ids)


def test_a_token_that_the_tokenizer_lacks_ends_the_episode(chat: Chat, verifier: Verifier) -> None:
    """Many models round their vocabulary up. No text shows such a token, so it is the policy's fault."""
    padded, beyond = Chat(chat.tokenizer, 100_000), len(chat.tokenizer)
    engine = ScriptedEngine(padded, lambda *_: Completion([7, beyond], [-0.5] * 2, [3] * 2, "stop"))
    for row in play(engine, MathMultiTurnAgent(context(padded)), verifier):
        assert (row.status, row.fault) == ("failed", "policy")
        assert f"the policy sampled token {beyond}, but its tokenizer ends at {beyond - 1}" in row.reason
    assert chat.readable == chat.vocabulary == beyond
