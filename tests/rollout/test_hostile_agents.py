"""An agent or environment that breaks the rules fails only its own episode, and the rollout continues to its end."""

import asyncio
import contextlib
import dataclasses
import itertools
import math
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.rollout import Rollout
from storage.records import Trajectory
from tasks.agents.chat import Chat
from tasks.agents.interface import EpisodeSpec
from tasks.agents.math_multi_turn import MathMultiTurnAgent
from tasks.environments.interface import Environment, EnvironmentContext
from tasks.environments.math_verify import MathVerifyEnvironment
from tasks.inference.api import GenerationConfig, InferenceError
from tasks.rollout.play import run_loop
from tasks.score.verifier import Verifier
from tests.support.paths import ROOT
from tests.support.rollout_helpers import GCONFIG, PROBLEMS, ByQueues, ScriptedEngine, context, play

pytestmark = pytest.mark.slow

Queue = asyncio.Queue[Any]
Act = Callable[..., Awaitable[Any]]


class OneOfThemIs(MathMultiTurnAgent):
    """An agent that plays correctly, except that sample 1 of each problem does `act`."""

    def __init__(self, chat: Chat, act: Act) -> None:
        super().__init__(context(chat), num_turns=2)
        self._act = act

    async def collect_trajectory(self, prompt: EpisodeSpec, env: Environment, *queues: Queue) -> list[Trajectory]:
        if prompt.record.sample == 1:
            trajectories: list[Trajectory] = await self._act(prompt, env, *queues)
            return trajectories
        return await self.play(prompt, env, ByQueues(*queues))


def reason_of_the_one(
    chat: Chat, verifier: Verifier, act: Act, deadline_s: float = 600, environment: Any = MathVerifyEnvironment
) -> str:
    """Play two problems; return the reason of the episodes that did `act`, and check that the other six completed.

    They are played again with longer deadlines until the ordinary episodes complete on this machine.
    """
    engine = ScriptedEngine(chat, lambda turn, _: [r"\boxed{4}", r"\boxed{3}"][turn])
    while True:
        settings = Rollout(episode_deadline_s=deadline_s, concurrency=4)  # one problem at a time
        played = play(engine, OneOfThemIs(chat, act), verifier, PROBLEMS, settings=settings, environment=environment)
        late = any(row.sample != 1 and row.reason == f"deadline of {deadline_s:g} s" for row in played)
        if not late or deadline_s > 60:
            break
        deadline_s *= 4
    assert [(row.problem_id, row.sample) for row in played] == [(p.problem_id, i) for p in PROBLEMS for i in range(4)]
    assert [row.status for row in played] == ["completed", "failed", "completed", "completed"] * 2
    assert len({row.reason for row in played if row.status == "failed"}) == 1
    return played[1].reason


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


def raising(error: BaseException) -> Act:
    async def act(*_: object) -> None:
        raise error

    return act


def test_changes_of_an_agent_to_its_prompt_have_no_effect_elsewhere(chat: Chat, verifier: Verifier) -> None:
    """Above all an agent cannot change the gold answers that its own and its group's answers are graded with."""

    async def act(prompt: EpisodeSpec, env: Environment, obs_queue: Queue, act_queue: Queue) -> list[Trajectory]:
        inner = MathMultiTurnAgent(context(chat), num_turns=2)
        (trajectory,) = await inner.play(prompt, env, ByQueues(obs_queue, act_queue))
        prompt.problem.solutions[:] = prompt.record.solutions[:] = ["4"]
        object.__setattr__(prompt.record, "trajectory_id", "../../etc/x")
        trajectory.solutions[:] = ["4"]
        return [dataclasses.replace(trajectory, trajectory_id="../../etc/x")]

    assert "trajectory_id='../../etc/x'" in reason_of_the_one(chat, verifier, act)
    assert [problem.solutions for problem in PROBLEMS] == [["3"], ["3"]]


async def cancels_itself(*_: object) -> None:
    task = asyncio.current_task()
    assert task
    task.cancel()
    await asyncio.sleep(60)


async def cancels_itself_and_closes(*_: object) -> None:
    try:
        await cancels_itself()
    except asyncio.CancelledError:
        raise GeneratorExit from None


ENDS: dict[str, tuple[Act, str]] = {
    "cancelled": (raising(asyncio.CancelledError()), "CancelledError"),
    "exit": (raising(SystemExit(0)), "SystemExit: 0"),
    "group": (raising(BaseExceptionGroup("two", [GeneratorExit(), ValueError()])), "BaseExceptionGroup"),
    "unprintable": (raising(UnprintableError()), "UnprintableError"),
    "inference": (raising(InferenceError("I am the engine")), "InferenceError: I am the engine"),
    "escapes": (
        raising(RuntimeError(f"\x1b[2J\u202e\x07{'x' * 100_000}")),
        "RuntimeError: ⟨U+001B⟩[2J⟨U+202E⟩⟨U+0007⟩xxx",
    ),
    "cancels itself": (cancels_itself, "CancelledError (test_hostile_agents.py:"),  # the line in the user's own code
    "and closes": (cancels_itself_and_closes, "GeneratorExit (test_hostile_agents.py:"),
}


@pytest.mark.parametrize("name", ENDS)
def test_an_exception_of_an_agent_fails_its_own_episode(chat: Chat, verifier: Verifier, name: str) -> None:
    """This includes those of asyncio and of the engine, those that end a process, and a cancellation from within."""
    act, says = ENDS[name]
    reason = reason_of_the_one(chat, verifier, act)
    assert says in reason
    assert len(reason) < 2100


@pytest.mark.parametrize("coroutine", ["Conversation.play", "collect.<locals>.finish"])
def test_cancelling_the_rollouts_own_tasks_ends_it_with_an_error(
    chat: Chat, verifier: Verifier, coroutine: str
) -> None:
    """asyncio's task groups ignore a cancelled task, so groups would be missing without an error."""

    async def cancels(*_: object) -> None:
        for task in asyncio.all_tasks():
            if coroutine in repr(task.get_coro()):
                task.cancel()
        await asyncio.sleep(60)

    with pytest.raises(RuntimeError, match="has cancelled an episode or a group"):
        reason_of_the_one(chat, verifier, cancels)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), pytest.param(None, id="handler")], ids=["keyboard", "SIGTERM"])
def test_an_exception_of_a_signal_ends_the_rollout(chat: Chat, verifier: Verifier, error: BaseException | None) -> None:
    """Ctrl-C and SIGTERM may arrive while an agent runs. They do not fail its episode."""
    known = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    async def interrupted(*_: object) -> None:
        if error:
            raise error
        signal.raise_signal(signal.SIGTERM)

    try:
        with pytest.raises(KeyboardInterrupt if error else SystemExit):
            reason_of_the_one(chat, verifier, interrupted)
    finally:
        signal.signal(signal.SIGTERM, known)


PROMPT = [5, 6, 7]
OBSERVATIONS: dict[str, tuple[Any, str]] = {
    "nothing": (None, "put (qid, token_ids, gconfig)"),
    "qid": ((7, PROMPT, GCONFIG), "prompt.qid first"),
    "numpy": (("q", list(np.array(PROMPT)), GCONFIG), "holds values of type int64, not int"),
    "truth": (("q", [True, 6], GCONFIG), "holds values of type bool, not int"),
    "empty": (("q", [], GCONFIG), "no token ids"),
    "negative": (("q", [5, -1], GCONFIG), "the policy has no token -1"),
    "beyond": (("q", [5, 2**40], GCONFIG), f"the policy has no token {2**40}"),
    "many": (("q", PROMPT, GenerationConfig(n=10**9)), "gconfig.n=1000000000: ask for at most 256"),
    "stops": (("q", PROMPT, GenerationConfig(stop_token_ids=(-3,))), "the policy has no token -3"),
}


@pytest.mark.parametrize("name", OBSERVATIONS)
def test_garbage_on_the_queue_never_reaches_the_engine(chat: Chat, verifier: Verifier, name: str) -> None:
    """The engine would refuse it, which ends the rollout. The rest of the group does not wait for this request."""
    observation, says = OBSERVATIONS[name]

    async def ask(_: EpisodeSpec, env: Environment, obs_queue: Queue, act_queue: Queue) -> Any:
        await obs_queue.put(observation)
        return await act_queue.get()

    assert says in reason_of_the_one(chat, verifier, ask)


@pytest.mark.parametrize(
    ("knob", "value"),
    [("n", 0), ("n", "4"), ("max_new_tokens", -1), ("max_new_tokens", 0), ("top_p", 0.0), ("top_p", math.nan),
     ("top_k", -2), ("top_k", 1.5), ("stop_token_ids", [3]), ("stop", ["x"]),
     *(("temperature", value) for value in (0.009, 1e-6, -0.1, 2.1, math.nan, math.inf))],
)  # fmt: skip
def test_parameters_that_vllm_refuses_are_refused_by_gconfig(knob: str, value: Any) -> None:
    """The error is raised at the agent's line that makes them, and is one line."""
    with pytest.raises(ValueError, match=rf"^gconfig\.{knob}={re.escape(repr(value))}: .+\Z"):
        GenerationConfig(**{knob: value})


def test_an_agent_that_takes_no_answers_is_stopped(chat: Chat, verifier: Verifier) -> None:
    """Endless observations neither fill the memory nor block the event loop."""

    async def flood(prompt: EpisodeSpec, env: Environment, obs_queue: Queue, act_queue: Queue) -> Any:
        while True:
            await obs_queue.put((prompt.qid, PROMPT, GCONFIG))

    assert "256 answers wait in act_queue" in reason_of_the_one(chat, verifier, flood)


def test_an_environment_whose_constructor_raises_fails_its_episode(chat: Chat, verifier: Verifier) -> None:
    """Only its episode fails. The rest of the group does not wait for its first observation."""
    made = itertools.count()

    def make(context: EnvironmentContext) -> Environment:
        if next(made) % 4 == 1:
            raise OSError("no sandbox left")
        return MathVerifyEnvironment(context)

    reason = reason_of_the_one(chat, verifier, raising(AssertionError()), environment=make)
    assert reason.startswith("OSError: no sandbox left (test_hostile_agents.py:")


async def never_asks(*_: object) -> None:
    await asyncio.Event().wait()


async def swallows(*_: object) -> None:
    while True:
        with contextlib.suppress(BaseException):
            await asyncio.sleep(0.01)


async def leaves_swallower_behind(*_: object) -> None:
    leaves_swallower_behind.task = asyncio.create_task(swallows())  # type: ignore[attr-defined]
    raise RuntimeError("deadline, so to say")


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("turns.PATIENCE_S", "conversation.DRAIN_S", "collector.CLEAN_UP_S", "guards.PATIENCE_S"):
        monkeypatch.setattr(f"tasks.rollout.{name}", 0.1)


def test_an_agent_that_cleans_up_for_long_finishes(
    chat: Chat, verifier: Verifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may stop a container, for example. Other episodes do not wait for it, but the end of the rollout does."""
    monkeypatch.setattr("tasks.rollout.conversation.DRAIN_S", 0.1)
    cleaned = []

    async def cleans_up(prompt: EpisodeSpec, *_: object) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(1.5)
            cleaned.append(prompt.record.problem_id)

    assert "deadline" in reason_of_the_one(chat, verifier, cleans_up, 1.0)
    assert {problem.problem_id for problem in PROBLEMS} == set(cleaned)


@pytest.mark.usefixtures("hurry")
@pytest.mark.parametrize("act", [never_asks, swallows, leaves_swallower_behind])
def test_an_endless_agent_ends_at_its_deadline(chat: Chat, verifier: Verifier, act: Any) -> None:
    """It may wait, or swallow its cancellation: its group is played, and the rollout ends."""
    assert "deadline" in reason_of_the_one(chat, verifier, act, 1.0)


THREAD_THAT_STAYS = """
import asyncio, logging, sys, time
from tasks.rollout import guards
from tasks.rollout.play import run_loop
guards.PATIENCE_S = float(sys.argv[1])
logging.basicConfig(format="%(message)s")

def never_ends():
    while True:
        time.sleep(0.01)

async def rollout():
    asyncio.create_task(asyncio.to_thread(never_ends))
    await asyncio.sleep(0.1)
    if sys.argv[2] == "interrupted":
        raise KeyboardInterrupt

run_loop(rollout())
print("the process goes on")
"""


def run_script(path: Path, text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    path.write_text(text)
    command, env = [sys.executable, str(path), *arguments], os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(("patience_s", "end", "status"), [("0.1", "complete", 0), ("600", "interrupted", -2)])
def test_a_thread_that_never_ends_holds_up_nothing(patience_s: str, end: str, status: int, tmp_path: Path) -> None:
    """Neither the end of the rollout nor that of the process waits for it; a warning names its line."""
    done = run_script(script := tmp_path / "stays.py", THREAD_THAT_STAYS, patience_s, end)
    assert done.returncode == status
    assert f'File "{script}", line 10, in never_ends' in done.stderr
    assert ("goes on" in done.stdout) == (end == "complete")


def test_every_call_has_a_thread_of_its_own(chat: Chat, verifier: Verifier) -> None:
    """Agents that are not asynchronous play at the same time, too, however many they are."""
    at_once = 64
    meeting = threading.Barrier(at_once, timeout=60)

    class Meets(MathMultiTurnAgent):
        async def play(self, *arguments: Any) -> list[Trajectory]:
            await asyncio.to_thread(meeting.wait)
            return await super().play(*arguments)

    engine = ScriptedEngine(chat, lambda turn, _: r"\boxed{3}")
    played = play(engine, Meets(context(chat), num_turns=2), verifier, group_size=at_once)
    assert [row.status for row in played] == ["completed"] * at_once


STUCK = """
import asyncio, contextvars, ctypes, logging, re, sys, threading, time
from tasks.rollout import guards
guards.WARN_S, guards.LEAST_S = 0.5, 1.5
logging.basicConfig(format="%(message)s")
flow = contextvars.ContextVar("flow", default=False)  # as Prefect's, without which it warns of each record
logging.root.handlers[0].addFilter(lambda record: flow.get())

async def main():
    flow.set(True)
    with guards.guarded(0.1):
        STEP

def call():
    asyncio.run(main())

if sys.argv[1] == "thread":
    threading.Thread(target=call).start()
    threading.Event().wait()
call()
"""


@pytest.mark.parametrize(
    ("step", "thread"),
    [("time.sleep(600)", "main"), ("ctypes.CDLL(None).pause()", "thread"), ("while True: pass", "main")],
)
def test_a_step_that_blocks_all_episodes_is_named_and_ends_the_process(step: str, thread: str, tmp_path: Path) -> None:
    """It is named with its line when it has blocked them for a while, and at its deadline."""
    done = run_script(script := tmp_path / "stuck.py", STUCK.replace("STEP", step), thread)
    assert done.returncode == 1
    _, warned, ended = done.stderr.split(" has blocked all episodes ")
    assert warned.startswith("for 1 s")
    assert ended.startswith("until its deadline")
    assert "continues from the stored shards" in ended
    assert all(f'File "{script}", line 12, in main' in text for text in (warned, ended))


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (lambda _: sys.exit(0), r"called sys.exit\(0\)"),
        (lambda rollout: rollout.cancel(), "has cancelled the rollout's own tasks"),
        (lambda rollout: rollout.get_loop().stop(), "stopped the event loop"),
    ],
)
def test_what_ends_asyncios_loop_is_an_error(act: Callable[..., Any], says: str) -> None:
    """Tests and scripts with their own loop clean up in this way. With status 0 the run would look complete."""

    async def rounds() -> None:
        asyncio.get_running_loop().call_soon(act, asyncio.current_task())
        await asyncio.sleep(60)

    with pytest.raises(RuntimeError, match=f"an agent {says}"):
        run_loop(rounds())
