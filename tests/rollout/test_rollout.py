"""Episodes: what is recorded of them, how they share requests, and that none is lost."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import Rollout
from storage.records import Problem, Trajectory
from tasks.agents.chat import Chat
from tasks.agents.interface import AgentContext, EpisodeSpec
from tasks.agents.math_multi_turn import MathMultiTurnAgent
from tasks.agents.math_single_step import MathSingleStepAgent
from tasks.agents.null import NullAgent
from tasks.environments.interface import Environment
from tasks.environments.math_verify import MathVerifyEnvironment
from tasks.inference.api import (
    BundledGenerationOutputs,
    ContextLengthError,
    GenerationConfig,
    InferenceError,
    Observation,
)
from tasks.rollout.plan import draw
from tasks.score.verifier import Verifier
from tests.support.rollout_helpers import PROBLEM, ScriptedEngine, context, play


@pytest.fixture(scope="module")
def chat(policy_folder: Path) -> Chat:
    from transformers import AutoTokenizer

    return Chat(AutoTokenizer.from_pretrained(policy_folder))


RIGHT, WRONG = r"\boxed{3}", r"\boxed{4}"


def test_two_turns_in_one_sequence(chat: Chat, verifier: Verifier) -> None:
    """Wrong, feedback, right: one sequence whose mask covers exactly what was sampled."""
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
        assert all(trajectory.action_mask[turn.start : turn.end])
    assert sum(trajectory.action_mask) == sum(turn.end - turn.start for turn in trajectory.turns)
    for mask, logprob, version in zip(trajectory.action_mask, trajectory.logprobs, trajectory.versions, strict=True):
        assert (logprob, version) == ((-0.5, 3) if mask else (0.0, -1))


def test_stops_on_success_unless_told_otherwise(chat: Chat, verifier: Verifier) -> None:
    """A right answer ends the episode; with stop_on_success off the policy hears so and goes on."""
    engine = ScriptedEngine(chat, lambda *_: RIGHT)
    assert len(play(engine, MathMultiTurnAgent(context(chat), num_turns=3), verifier)[0].turns) == 1
    on = MathMultiTurnAgent(context(chat), num_turns=3, stop_on_success=False)
    assert [turn.feedback for turn in play(engine, on, verifier)[0].turns] == [
        "Your answer is correct.",
        "Your answer is correct.",
        "",
    ]


def test_other_shipped_agents(chat: Chat, verifier: Verifier) -> None:
    """One judged turn, and one turn that nobody judges."""
    engine = ScriptedEngine(chat, lambda *_: WRONG)
    single = play(engine, MathSingleStepAgent(context(chat), instruction="Think."), verifier)[0]
    assert [turn.verdict for turn in single.turns] == ["wrong"]
    assert "Think." in chat.decode(single.token_ids)
    assert [turn.verdict for turn in play(engine, NullAgent(context(chat)), verifier)[0].turns] == [""]


def test_first_turn_of_a_group_is_one_request(chat: Chat, verifier: Verifier) -> None:
    """Four episodes, all wrong once: one request with n=4, then four of one each; seeds are recorded."""
    engine = ScriptedEngine(chat, lambda turn, _: [WRONG, RIGHT][turn])
    trajectories = play(engine, MathMultiTurnAgent(context(chat), num_turns=2), verifier)
    assert [gconfig.n for _, gconfig, _, _ in engine.requests] == [4, 1, 1, 1, 1]
    first = engine.requests[0][2]
    assert [trajectory.turns[0].seed for trajectory in trajectories] == [first, first + 1, first + 2, first + 3]
    assert len({trajectory.turns[1].seed for trajectory in trajectories}) == 4


class BreaksOnce(MathVerifyEnvironment):
    """The first one cannot be made."""

    made = 0

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        BreaksOnce.made += 1
        if BreaksOnce.made == 1:
            raise OSError("no such service")


def test_an_environment_that_cannot_be_made_costs_its_episode_only(chat: Chat, verifier: Verifier) -> None:
    """The others of the group do not wait for its first observation."""
    settings = Rollout(episode_deadline_s=5)
    engine = ScriptedEngine(chat, lambda *_: RIGHT)
    agent = MathMultiTurnAgent(context(chat))
    played = play(engine, agent, verifier, settings=settings, environment=BreaksOnce)
    assert sorted(row.status for row in played) == ["completed", "completed", "completed", "failed"]
    assert [row.reason for row in played if row.status == "failed"] == ["OSError: no such service"]


class Exits(MathMultiTurnAgent):
    """Gives up in the way of a script."""

    async def collect_trajectory(self, *_: Any) -> list[Trajectory]:
        raise SystemExit(3)


def test_an_agent_that_exits_ends_its_episode_only(chat: Chat, verifier: Verifier) -> None:
    """Else the flow would end in the middle, with the agent's status and no word."""
    played = play(ScriptedEngine(chat, lambda *_: RIGHT), Exits(context(chat)), verifier)
    assert {(row.status, row.reason) for row in played} == {("failed", "SystemExit: 3")}


class EndsItself(MathMultiTurnAgent):
    """Has sampling parameters of its own, and a token that ends a completion."""

    def __init__(self, context: AgentContext) -> None:
        super().__init__(replace(context, gconfig=GenerationConfig(temperature=0.5, stop_token_ids=(9,))), num_turns=2)


def test_every_request_says_what_ends_a_turn(chat: Chat, verifier: Verifier) -> None:
    """Agents need not know: the template's end of turn goes with their own parameters, in the first turn and after."""
    end = chat.encode("<|im_end|>")[0]
    for agent, stops in (
        (MathMultiTurnAgent(context(chat), num_turns=2), (end,)),
        (EndsItself(context(chat)), (9, end)),
    ):
        engine = ScriptedEngine(chat, lambda *_: WRONG)
        play(engine, agent, verifier)
        assert len(engine.requests) == 5
        assert {gconfig.stop_token_ids for _, gconfig, _, _ in engine.requests} == {stops}
        assert {gconfig.temperature for _, gconfig, _, _ in engine.requests} == {agent.context.gconfig.temperature}


def test_groups_spread_over_replicas(chat: Chat, verifier: Verifier) -> None:
    """Least loaded first, and all requests of a group to one replica."""
    problems = [Problem(str(i), f"What is {i} + 0?", [str(i)]) for i in range(4)]
    engine = ScriptedEngine(chat, lambda *_: WRONG, replicas=2, delay_s=0.01)
    play(engine, MathMultiTurnAgent(context(chat), num_turns=2), verifier, problems)
    by_prompt = {tuple(ids[:12]): replica for ids, _, _, replica in engine.requests}
    assert all(by_prompt[tuple(ids[:12])] == replica for ids, _, _, replica in engine.requests)
    assert sorted(by_prompt.values()) == [0, 0, 1, 1]


class Failing:
    """Fails in its second turn for sample 1, rejects sample 2, never answers for sample 3."""

    def __init__(self, inner: MathMultiTurnAgent) -> None:
        self._inner = inner

    async def collect_trajectory(
        self,
        prompt: EpisodeSpec,
        env: Environment,
        obs_queue: "asyncio.Queue[Observation]",
        act_queue: "asyncio.Queue[BundledGenerationOutputs]",
    ) -> list[Trajectory]:
        trajectories = await self._inner.collect_trajectory(prompt, env, obs_queue, act_queue)
        if prompt.record.sample == 1:
            raise RuntimeError("broken agent")
        if prompt.record.sample == 3:
            await asyncio.sleep(3600)
        return [] if prompt.record.sample == 2 else trajectories


def test_no_episode_is_lost(chat: Chat, verifier: Verifier) -> None:
    """Failed, rejected and late episodes keep their tokens, with status and reason."""
    engine = ScriptedEngine(chat, lambda *_: WRONG)
    agent = Failing(MathMultiTurnAgent(context(chat), num_turns=2))
    deadline_s = 0.5
    while True:  # until the others have the time that they need on this machine
        played = play(engine, agent, verifier, settings=Rollout(episode_deadline_s=deadline_s))
        if deadline_s > 60 or not any("deadline" in trajectory.reason for trajectory in played[:3]):
            break
        deadline_s *= 4
    assert [(trajectory.status, trajectory.reason) for trajectory in played] == [
        ("completed", ""),
        ("failed", "RuntimeError: broken agent"),
        ("rejected", "the agent returned no trajectory"),
        ("failed", f"deadline of {deadline_s:g} s"),
    ]
    assert {tuple(trajectory.token_ids) for trajectory in played} == {tuple(played[0].token_ids)}
    assert all(trajectory.action_mask == played[0].action_mask for trajectory in played)


class Unresettable(MathVerifyEnvironment):
    """Breaks before the first observation."""

    async def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        raise OSError("no such sandbox")


def test_episodes_that_never_begin(chat: Chat, verifier: Verifier) -> None:
    """An environment that breaks at once fails its episodes; a group does not wait for them for ever."""
    engine = ScriptedEngine(chat, lambda *_: WRONG)
    played = play(engine, MathMultiTurnAgent(context(chat)), verifier, environment=Unresettable)
    assert {(trajectory.status, trajectory.reason) for trajectory in played} == {("failed", "OSError: no such sandbox")}
    assert engine.requests == []


def test_a_failed_request_fails_its_episodes_only(chat: Chat, verifier: Verifier) -> None:
    """What remains of a network error after all retries is a failed episode."""
    replies = iter([ConnectionError("reset by peer")])
    engine = ScriptedEngine(chat, lambda *_: next(replies, RIGHT))
    problems = [PROBLEM, Problem("2+1", "What is 2 + 1?", ["3"])]
    played = play(engine, MathMultiTurnAgent(context(chat)), verifier, problems)
    assert sorted(trajectory.status for trajectory in played) == ["completed"] * 4 + ["failed"] * 4


def test_an_engine_that_serves_something_else_stops_the_rollout(chat: Chat, verifier: Verifier) -> None:
    """Wrong weights are no episode's failure: nothing may be trained on them."""
    engine = ScriptedEngine(chat, lambda *_: InferenceError("answered with weight version [2], asked for 3"))
    with pytest.raises(InferenceError, match="asked for 3"):
        play(engine, MathMultiTurnAgent(context(chat)), verifier)


def test_context_is_respected(chat: Chat, verifier: Verifier) -> None:
    """A conversation that outgrows the context is truncated; a prompt that never fitted is failed."""
    engine = ScriptedEngine(chat, lambda *_: WRONG)
    room = len(chat.prompt([{"role": "user", "content": PROBLEM.prompt}])) + 20
    truncated = play(engine, MathMultiTurnAgent(context(chat, room)), verifier)[0]
    assert (truncated.status, len(truncated.turns)) == ("truncated", 1)
    assert "no room for turn 2" in truncated.reason
    assert truncated.unplayed_turns == 4
    full = ScriptedEngine(chat, lambda *_: ContextLengthError("prompt of 300 tokens leaves no room"))
    failed = play(full, MathMultiTurnAgent(context(chat)), verifier)[0]
    assert (failed.status, failed.turns) == ("failed", [])
    assert "300 tokens" in failed.reason


def test_ids_are_unique_and_derived(chat: Chat, verifier: Verifier) -> None:
    """Identity of a trajectory: run, iteration, problem and sample; seeds differ but are the same again."""
    engine = ScriptedEngine(chat, lambda *_: RIGHT)
    agent = MathMultiTurnAgent(context(chat))
    once, again = play(engine, agent, verifier), play(engine, agent, verifier)
    assert [trajectory.trajectory_id for trajectory in once] == [f"r/000003/1+2/{sample}" for sample in range(4)]
    assert [trajectory.seed for trajectory in once] == [trajectory.seed for trajectory in again]
    assert len({trajectory.seed for trajectory in once}) == 4


@given(size=st.integers(1, 40), count=st.integers(1, 15), seed=st.integers(0, 5))
def test_problem_order_passes_through_all(size: int, count: int, seed: int) -> None:
    """Every problem is drawn once before any is drawn twice, and none twice in an iteration."""
    problems = [Problem(str(i), "", ["0"]) for i in range(size)]
    drawn = [draw(problems, count, iteration, seed) for iteration in range(size)]
    for batch in drawn:
        ids = [problem.problem_id for problem in batch]
        assert len(ids) == len(set(ids)) == min(count, size)
    whole = size // count
    seen = [problem.problem_id for batch in drawn[:whole] for problem in batch]
    assert len(seen) == len(set(seen))
