"""Episodes are recorded in full, share requests, and are never lost."""

import asyncio
import itertools
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.rollout import Rollout
from storage.records import Call, Problem, Trajectory
from tasks.agents.chat import Chat
from tasks.agents.interface import AgentContext, EpisodeSpec
from tasks.agents.math_multi_turn import MathMultiTurnAgent, MathSingleStepAgent, NullAgent
from tasks.environments.interface import Environment
from tasks.environments.math_verify import MathVerifyEnvironment
from tasks.inference.api import ContextLengthError, GenerationConfig
from tasks.rollout.outcomes import Tally, counts_of
from tasks.rollout.plan import draw
from tasks.score.scorers import SuccessRule
from tasks.score.verifier import Verifier
from tests.support.rollout_helpers import (
    PROBLEM,
    PROBLEMS,
    RIGHT,
    WRONG,
    ByQueues,
    ScriptedEngine,
    context,
    make_plan,
    play,
    timeless,
)


def test_two_turns_in_one_sequence(chat: Chat, verifier: Verifier) -> None:
    """A wrong answer, feedback and a right answer form one sequence. Its mask covers exactly the sampled tokens."""
    engine = ScriptedEngine(chat, lambda turn, _: [WRONG, RIGHT][turn])
    trajectory = play(engine, MathMultiTurnAgent(context(chat), num_turns=3, turn_discount=0.9), verifier)[0]
    assert [turn.verdict for turn in trajectory.turns] == ["wrong", "correct"]
    assert [turn.text for turn in trajectory.turns] == [WRONG, RIGHT]
    assert trajectory.turns[0].feedback == "Your answer is wrong. Try again."
    assert (trajectory.status, trajectory.turn_discount) == ("completed", 0.9)
    conversation = [
        {"role": "user", "content": "What is 1 + 2?"},
        {"role": "assistant", "content": WRONG},
        {"role": "user", "content": "Your answer is wrong. Try again."},
    ]
    assert trajectory.token_ids == chat.prompt(conversation) + chat.encode(RIGHT + "<|im_end|>")
    for turn, text in zip(trajectory.turns, (WRONG, RIGHT), strict=True):
        assert trajectory.token_ids[turn.start : turn.end] == chat.encode(text + "<|im_end|>")
    sampled = {position for turn in trajectory.turns for position in range(turn.start, turn.end)}
    columns = zip(trajectory.action_mask, trajectory.logprobs, trajectory.versions, strict=True)
    expected = [(True, -0.5, 3) if place in sampled else (False, 0.0, -1) for place in range(len(trajectory.token_ids))]
    assert list(columns) == expected


def test_an_episode_stops_on_success_unless_configured_otherwise(chat: Chat, verifier: Verifier) -> None:
    """A right answer ends the episode. With stop_on_success off the policy gets feedback and continues."""
    engine = ScriptedEngine(chat, lambda *_: RIGHT)
    assert len(play(engine, MathMultiTurnAgent(context(chat), num_turns=3), verifier)[0].turns) == 1
    on = MathMultiTurnAgent(context(chat), num_turns=3, stop_on_success=False)
    assert [turn.feedback for turn in play(engine, on, verifier)[0].turns] == [*["Your answer is correct."] * 2, ""]


class Generous(MathVerifyEnvironment):
    """An environment that pays what the problem's metadata says, in two parts."""

    async def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self.paid = float((options or {})["metadata"]["pays"])
        return await super().reset(seed, options)

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        paid, right = self.paid, action == RIGHT
        info = {"success": right, "parts": {"played": paid, "right": paid * right}}
        return "", paid * (1 + right), right, False, info


def test_rewards_of_an_environments_own(chat: Chat, verifier: Verifier) -> None:
    """The problem's metadata reaches the environment; its rewards, their parts and its success reach the record."""
    engine = ScriptedEngine(chat, lambda turn, _: [WRONG, RIGHT][turn])
    problem = replace(PROBLEM, source="game", metadata='{"pays": -0.5}')
    agent = MathMultiTurnAgent(context(chat), num_turns=2)
    trajectory = play(engine, agent, verifier, [problem], environment=Generous)[0]
    assert [(turn.verdict, turn.reward) for turn in trajectory.turns] == [("wrong", -0.5), ("correct", -1.0)]
    assert trajectory.reward_parts == [{"played": -0.5, "right": 0.0}, {"played": -0.5, "right": -0.5}]
    assert (trajectory.source, json.loads(trajectory.metadata)) == ("game", {"pays": -0.5})
    tally, call = Tally(lambda _: None, SuccessRule()), Call(0, "call-1", "calculator", "{}", "3", "answered")
    called = replace(trajectory, ungraded=[0], reward_parts=[], calls=[call])
    tally.counts.update(counts_of([trajectory, called], SuccessRule()))
    metrics = tally.metrics(0)
    assert (metrics["solved"], metrics["success"], metrics["calls"]) == (1.0, [0.5, 1.0], {"answered": 0.5})
    assert (metrics["reward"], metrics["parts"]) == (-2.5 / 3, {"played": -0.5, "right": -0.25})
    assert metrics["return_mean"] == (-1.5 - 1.0) / 2


def test_different_turns_of_a_group_are_different_requests(chat: Chat, verifier: Verifier) -> None:
    """Each answer goes to the episode that asked, and an episode that has ended is not waited for."""
    monologue = itertools.count()
    engine = ScriptedEngine(chat, lambda turn, _: RIGHT if turn else [WRONG, "nonsense", RIGHT, WRONG][next(monologue)])
    trajectories = play(engine, MathMultiTurnAgent(context(chat), num_turns=2), verifier)
    assert sorted(gconfig.n for _, gconfig, _, _ in engine.requests) == [1, 2, 4]
    assert sorted(len(trajectory.turns) for trajectory in trajectories) == [1, 2, 2, 2]
    assert {trajectory.turns[-1].verdict for trajectory in trajectories} == {"correct"}


def test_a_slow_episode_does_not_hold_up_its_group(chat: Chat, verifier: Verifier) -> None:
    """The observations of the others are sent after some time, although one episode has not asked yet."""
    asked, made = asyncio.Event(), itertools.count()

    def reply(*_: int) -> str:
        asked.set()
        return RIGHT

    engine = ScriptedEngine(chat, reply)

    class Slow(MathVerifyEnvironment):
        async def reset(self, *args: Any, **options: Any) -> tuple[str, dict[str, Any]]:
            if next(made) == 0:
                await asked.wait()
            return await super().reset(*args, **options)

    played = play(engine, MathSingleStepAgent(context(chat)), verifier, environment=Slow)
    assert [gconfig.n for _, gconfig, _, _ in engine.requests] == [3, 1]
    assert {row.status for row in played} == {"completed"}


@pytest.mark.parametrize(
    ("limit", "value", "requests"), [("MOST_AT_ONCE", 3, [3, 1]), ("LONGEST_TOGETHER", 7, [1, 1, 1, 1])]
)
def test_a_group_is_several_requests(
    chat: Chat, verifier: Verifier, monkeypatch: pytest.MonkeyPatch, limit: str, value: int, requests: list[int]
) -> None:
    """vLLM refuses more completions than it plays at once, and a group must not wait for its longest turn."""
    monkeypatch.setattr(f"tasks.rollout.turns.{limit}", value)
    engine = ScriptedEngine(chat, lambda *_: RIGHT)
    trajectories = play(engine, MathSingleStepAgent(context(chat)), verifier)
    assert [gconfig.n for _, gconfig, _, _ in engine.requests] == requests
    assert len({trajectory.turns[0].seed for trajectory in trajectories}) == 4


class WithQueues(MathMultiTurnAgent):
    """The agent `math-multi-turn` with two queues in place of the engine."""

    async def collect_trajectory(self, prompt: EpisodeSpec, env: Environment, *queues: Any) -> list[Trajectory]:
        return await self.play(prompt, env, ByQueues(*queues))


def test_queues_and_awaited_completions_give_the_same_rows(chat: Chat, verifier: Verifier) -> None:
    """Tokens, seeds, verdicts and the requests to the engine are equal; equal turns of a group are one request."""
    agents = [kind(context(chat), num_turns=2) for kind in (MathMultiTurnAgent, WithQueues)]
    engines = [ScriptedEngine(chat, lambda turn, sample: RIGHT if turn or sample == 1 else WRONG) for _ in agents]
    rows = [play(engine, agent, verifier) for engine, agent in zip(engines, agents, strict=True)]
    assert [timeless(row) for row in rows[0]] == [timeless(row) for row in rows[1]]
    assert engines[0].requests == engines[1].requests
    assert [gconfig.n for _, gconfig, _, _ in engines[1].requests] == [4, 3]
    first = engines[1].requests[0][2]
    assert {row.turns[0].seed for row in rows[1]} == set(range(first, first + 4))


def test_a_completion_that_an_agent_no_longer_awaits_is_kept(chat: Chat, verifier: Verifier) -> None:
    """Otherwise the long completions would be missing in the record: those at which agents lose patience."""

    class LosesPatience(NullAgent):
        async def play(self, *arguments: Any) -> list[Trajectory]:
            try:
                return await asyncio.wait_for(super().play(*arguments), 0.1)
            except TimeoutError:
                await asyncio.sleep(1)
                raise

    engine = ScriptedEngine(chat, lambda *_: RIGHT, delays=itertools.repeat(0.3))
    (row,) = play(engine, LosesPatience(context(chat)), verifier, group_size=1)
    assert (row.status, [turn.text for turn in row.turns]) == ("failed", [RIGHT])


class SamplesItsOwnWay(MathMultiTurnAgent):
    def __init__(self, context: AgentContext, **own: Any) -> None:
        super().__init__(replace(context, gconfig=replace(context.gconfig, **own)), num_turns=2)


@pytest.mark.parametrize(
    ("own", "says"),
    [
        ({"temperature": 0.3, "top_p": 0.5}, "gconfig.temperature=0.3, but the run samples with 1"),
        ({"top_p": 0.5}, "gconfig.top_p=0.5, but the run samples with 1"),
        ({"top_k": 5}, "gconfig.top_k=5, but the run samples with 0"),
        ({"top_k": -1, "max_new_tokens": 4, "stop": ("x",), "n": 2, "stop_token_ids": (9,)}, ""),
    ],
)
def test_an_agent_samples_as_the_run_does(chat: Chat, verifier: Verifier, own: dict[str, Any], says: str) -> None:
    """Training would take the logprobs of 0.3 for those of 1, as the guard of the run's own knobs says of top_p.

    Where it may sample otherwise, its parameters reach the engine, and the template's end of turn in every turn.
    """
    engine, agent = ScriptedEngine(chat, lambda *_: WRONG), SamplesItsOwnWay(context(chat), **own)
    for row in play(engine, agent, verifier):
        assert (row.status, row.fault) == (("failed", "set-up") if says else ("completed", ""))
        assert row.reason.startswith(says)
    settings = Rollout(allow_own_sampling=True, allow_biased_sampling=True)
    allowed = play(engine, agent, verifier, settings=settings)
    assert {row.status for row in allowed} == {"completed"}
    ends = (*own.get("stop_token_ids", ()), *chat.encode("<|im_end|>"))
    asked = {(gconfig.temperature, gconfig.stop_token_ids) for _, gconfig, _, _ in engine.requests}
    assert asked == {(own.get("temperature", 1.0), ends)}


def test_groups_spread_over_replicas(chat: Chat, verifier: Verifier) -> None:
    """The least loaded replica gets the next group, and all requests of a group go to one replica."""
    problems = [Problem(str(i), f"What is {i} + 0?", [str(i)]) for i in range(4)]
    engine = ScriptedEngine(chat, lambda *_: WRONG, replicas=2, delays=itertools.repeat(0.01))
    play(engine, MathMultiTurnAgent(context(chat), num_turns=2), verifier, problems)
    by_prompt = {tuple(ids[:12]): replica for ids, _, _, replica in engine.requests}
    assert all(by_prompt[tuple(ids[:12])] == replica for ids, _, _, replica in engine.requests)
    assert sorted(by_prompt.values()) == [0, 0, 1, 1]


class Failing(MathMultiTurnAgent):
    """An agent that fails after its turns for sample 1, rejects sample 2, and never returns for sample 3."""

    async def play(self, prompt: EpisodeSpec, *others: Any) -> list[Trajectory]:
        trajectories = await super().play(prompt, *others)
        if prompt.record.sample == 1:
            raise RuntimeError("broken agent")
        if prompt.record.sample == 3:
            await asyncio.sleep(3600)
        return [] if prompt.record.sample == 2 else trajectories


def test_no_episode_is_lost(chat: Chat, verifier: Verifier) -> None:
    """Failed, rejected and late episodes keep their tokens, with status, reason and whose fault it was.

    Whatever ends an episode, its environment is closed.
    """

    class Closes(MathVerifyEnvironment):
        async def close(self) -> None:
            closed.append(True)

    engine = ScriptedEngine(chat, lambda *_: WRONG)
    agent = Failing(context(chat), num_turns=2)
    deadline_s = 0.5
    while True:  # until the other episodes complete on this machine
        closed, settings = list[bool](), Rollout(episode_deadline_s=deadline_s)
        played = play(engine, agent, verifier, settings=settings, environment=Closes)
        if deadline_s > 60 or not any("deadline" in trajectory.reason for trajectory in played[:3]):
            break
        deadline_s *= 4
    assert [(row.status, row.reason.partition(" (test_rollout.py:")[0], row.fault) for row in played] == [
        ("completed", "", ""),
        ("failed", "RuntimeError: broken agent", "set-up"),
        ("rejected", "the agent returned no trajectory", ""),
        ("failed", f"deadline of {deadline_s:g} s", "set-up"),
    ]
    assert len(closed) == 4
    assert {tuple(trajectory.token_ids) for trajectory in played} == {tuple(played[0].token_ids)}
    assert all(trajectory.action_mask == played[0].action_mask for trajectory in played)


def test_a_failed_request_fails_its_episodes_only(chat: Chat, verifier: Verifier) -> None:
    """A network error that remains after all retries fails the episodes of its request."""
    replies = iter([ConnectionError("reset by peer")])
    engine = ScriptedEngine(chat, lambda *_: next(replies, RIGHT))
    played = play(engine, MathMultiTurnAgent(context(chat)), verifier, PROBLEMS)
    assert sorted(trajectory.status for trajectory in played) == ["completed"] * 4 + ["failed"] * 4


def test_no_slot_waits_for_a_whole_group(chat: Chat, verifier: Verifier) -> None:
    """Episodes begin one by one where turns are long: with two slots, seven of them end beside a long one."""

    class FirstWaitsForAll(MathSingleStepAgent):
        """The first episode of all waits until the other seven have ended. At most `most` ran at the same time."""

        ended, running, most, others_ended = 0, 0, 0, asyncio.Event()

        async def play(self, prompt: EpisodeSpec, *others: Any) -> list[Trajectory]:
            self.running += 1
            self.most = max(self.most, self.running)
            if prompt.qid == f"{PROBLEM.problem_id}/0":
                await self.others_ended.wait()
            trajectories = await super().play(prompt, *others)
            self.running, self.ended = self.running - 1, self.ended + 1
            if self.ended == 7:
                self.others_ended.set()
            return trajectories

    engine, agent = ScriptedEngine(chat, lambda *_: RIGHT), FirstWaitsForAll(context(chat))
    settings = Rollout(concurrency=2, episode_deadline_s=60)
    played = play(engine, agent, verifier, PROBLEMS, settings=settings, together=1)
    assert [(trajectory.status, trajectory.reason) for trajectory in played] == [("completed", "")] * 8
    assert agent.most == 2
    short, long = (replace(make_plan(), gconfig=GenerationConfig(max_new_tokens=tokens)) for tokens in (64, 65))
    assert (short.together, long.together) == (4, 1)


def test_context_is_respected(chat: Chat, verifier: Verifier) -> None:
    """A conversation that outgrows the context is truncated. A prompt that does not fit fails its episode."""
    engine = ScriptedEngine(chat, lambda *_: WRONG)
    room = len(chat.prompt([{"role": "user", "content": PROBLEM.prompt}])) + 20
    truncated = play(engine, MathMultiTurnAgent(context(chat, room)), verifier)[0]
    assert (truncated.status, len(truncated.turns)) == ("truncated", 1)
    assert "no room for turn 2" in truncated.reason
    assert (truncated.unplayed_turns, truncated.fault) == (4, "policy")
    full = ScriptedEngine(chat, lambda *_: ContextLengthError("prompt of 300 tokens leaves no room"))
    failed = play(full, MathMultiTurnAgent(context(chat)), verifier)[0]
    assert (failed.status, failed.turns, failed.fault) == ("failed", [], "set-up")
    assert "300 tokens" in failed.reason
    fills = ScriptedEngine(chat, lambda turn, _: ContextLengthError("prompt of 300 tokens") if turn else WRONG)
    late = play(fills, MathMultiTurnAgent(context(chat)), verifier)[0]
    assert (late.status, len(late.turns), late.fault) == ("truncated", 1, "policy")


def test_an_engine_that_stops_answering_is_not_the_policys_fault(
    chat: Chat, verifier: Verifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A completion that is sampled would be cut and returned at half of the deadline."""
    monkeypatch.setattr("tasks.rollout.turns.CUT_S", 0.1)
    engine = ScriptedEngine(chat, lambda *_: WRONG, delays=itertools.chain([0.0], itertools.repeat(60.0)))
    (row,) = play(
        engine, MathMultiTurnAgent(context(chat)), verifier, group_size=1, settings=Rollout(episode_deadline_s=1.5)
    )
    assert (row.status, row.fault, len(row.turns)) == ("failed", "set-up", 1)


@pytest.mark.parametrize(
    ("deadline_s", "sampling_s", "waiting_s", "fault"),
    [
        (1.0, 0.4, 0.0, "policy"),  # the deadline strikes while the third turn is sampled
        (1.0, 0.001, 3.0, "set-up"),  # while the environment works
        (0.8, 0.2, 0.5, "set-up"),  # while the second turn is sampled, but the environment took most of the time
    ],
)
def test_a_deadline_is_the_fault_of_what_took_the_time(
    chat: Chat, verifier: Verifier, deadline_s: float, sampling_s: float, waiting_s: float, fault: str
) -> None:
    """A policy that samples until the deadline does not escape; a slow environment teaches it nothing."""

    class Waits(MathVerifyEnvironment):
        async def step(self, action: str) -> Any:
            await asyncio.sleep(waiting_s)
            return await super().step(action)

    engine = ScriptedEngine(chat, lambda *_: WRONG, delays=itertools.repeat(sampling_s))
    agent, settings = MathMultiTurnAgent(context(chat, 4000), num_turns=9), Rollout(episode_deadline_s=deadline_s)
    (row,) = play(engine, agent, verifier, None, 1, settings, Waits, together=1)
    assert (row.status, row.fault) == ("failed", fault)
    assert row.reason == f"deadline of {deadline_s:g} s"
    assert any(row.action_mask)


@given(size=st.integers(1, 40), count=st.integers(1, 15), seed=st.integers(0, 5))
def test_problem_order_passes_through_all(size: int, count: int, seed: int) -> None:
    """Every problem is drawn once before any problem is drawn twice, and never twice in an iteration."""
    problems = [Problem(str(i), "", ["0"]) for i in range(size)]
    drawn = [draw(problems, count, iteration, seed) for iteration in range(size)]
    for batch in drawn:
        ids = [problem.problem_id for problem in batch]
        assert len(ids) == len(set(ids)) == min(count, size)
    whole = size // count
    seen = [problem.problem_id for batch in drawn[:whole] for problem in batch]
    assert len(seen) == len(set(seen))
