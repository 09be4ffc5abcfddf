"""Agents and environments that break every rule: each costs its own episode, and the rollout goes on and ends."""

import asyncio
import contextlib
import dataclasses
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.schema import Rollout
from storage.records import Problem, Trajectory
from tasks.agents.chat import Chat
from tasks.agents.interface import EpisodeSpec
from tasks.agents.math_multi_turn import MathMultiTurnAgent
from tasks.environments.interface import Environment, EnvironmentContext
from tasks.environments.math_verify import MathVerifyEnvironment
from tasks.inference.api import EngineClosedError, GenerationConfig, InferenceError
from tasks.rollout import collector, conversation
from tasks.rollout import first_turns as opening
from tasks.rollout.play import _run
from tasks.rollout.watch import Watch
from tasks.score.verifier import Verifier
from tests.support.rollout_helpers import GCONFIG, ScriptedEngine, context, play

HERE = f"{Path(__file__).parent}/"
Queue = asyncio.Queue[Any]
Act = Callable[[EpisodeSpec, Environment, Queue, Queue], Awaitable[Any]]
PROBLEMS = [Problem("1+2", "What is 1 + 2?", ["3"]), Problem("2+1", "What is 2 + 1?", ["3"])]


@pytest.fixture(scope="module")
def chat(policy_folder: Path) -> Chat:
    from transformers import AutoTokenizer

    return Chat(AutoTokenizer.from_pretrained(policy_folder))


class OneOfThemIs:
    """Plays well but for sample 1 of each problem, which does `act`."""

    def __init__(self, chat: Chat, act: Act) -> None:
        self._inner, self._act = MathMultiTurnAgent(context(chat), num_turns=2), act

    async def collect_trajectory(
        self, prompt: EpisodeSpec, env: Environment, obs_queue: Queue, act_queue: Queue
    ) -> list[Trajectory]:
        if prompt.record.sample == 1:
            found: list[Trajectory] = await self._act(prompt, env, obs_queue, act_queue)
            return found
        return await self._inner.collect_trajectory(prompt, env, obs_queue, act_queue)


def reason_of_the_one(
    chat: Chat, verifier: Verifier, act: Act, deadline_s: float = 600, environment: Any = MathVerifyEnvironment
) -> str:
    """The reason of the episodes that did `act`: the same for both problems, while the other six were played."""
    engine = ScriptedEngine(chat, lambda turn, _: [r"\boxed{4}", r"\boxed{3}"][turn])
    settings = Rollout(episode_deadline_s=deadline_s, concurrency=4)  # one problem after the other
    played = play(engine, OneOfThemIs(chat, act), verifier, PROBLEMS, settings=settings, environment=environment)
    if any(row.sample != 1 and row.reason == f"deadline of {deadline_s:g} s" for row in played):
        raise SlowMachineError(f"others than the one needed more than {deadline_s:g} s")
    assert [(row.problem_id, row.sample) for row in played] == [(p.problem_id, i) for p in PROBLEMS for i in range(4)]
    assert [row.status for row in played] == ["completed", "failed", "completed", "completed"] * 2
    assert len({row.reason for row in played if row.status == "failed"}) == 1
    return played[1].reason


class SlowMachineError(Exception):
    """Episodes that do nothing wrong came to their deadline."""


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


async def raise_(error: BaseException) -> None:
    raise error


def test_what_an_agent_changes_in_its_prompt_changes_nothing_else(chat: Chat, verifier: Verifier) -> None:
    """Gold answers above all: they are what its answers are judged by, and those of the group."""

    async def act(prompt: EpisodeSpec, env: Environment, obs_queue: Queue, act_queue: Queue) -> list[Trajectory]:
        inner = MathMultiTurnAgent(context(chat), num_turns=2)
        (trajectory,) = await inner.collect_trajectory(prompt, env, obs_queue, act_queue)
        prompt.problem.solutions[:] = prompt.record.solutions[:] = ["4"]
        object.__setattr__(prompt.record, "trajectory_id", "../../etc/x")
        trajectory.solutions[:] = ["4"]
        return [dataclasses.replace(trajectory, trajectory_id="../../etc/x")]

    assert "trajectory_id='../../etc/x'" in reason_of_the_one(chat, verifier, act)
    assert [problem.solutions for problem in PROBLEMS] == [["3"], ["3"]]


RAISED: dict[str, tuple[BaseException, str]] = {
    "cancelled": (asyncio.CancelledError(), "CancelledError"),
    "exit": (SystemExit(0), "SystemExit: 0"),
    "generator": (GeneratorExit(), "GeneratorExit"),
    "base": (BaseException("odd"), "BaseException: odd"),
    "group": (BaseExceptionGroup("two", [GeneratorExit(), ValueError()]), "BaseExceptionGroup"),
    "unprintable": (UnprintableError(), "UnprintableError"),
    "inference": (InferenceError("I am the engine"), "InferenceError: I am the engine"),
    "closed": (EngineClosedError("it ends"), "EngineClosedError: it ends"),
    "timeout": (TimeoutError("my own"), "TimeoutError: my own"),
    "escapes": (RuntimeError("\x1b[2J\u202e\x07" + "x" * 100_000), "RuntimeError: ⟨U+001B⟩[2J⟨U+202E⟩⟨U+0007⟩xxx"),
}


@pytest.mark.parametrize("name", RAISED)
def test_whatever_an_agent_raises_is_its_own_failure(chat: Chat, verifier: Verifier, name: str) -> None:
    """Also what asyncio takes for its own, what ends a process, and what the engine alone may say."""
    error, says = RAISED[name]
    reason = reason_of_the_one(chat, verifier, lambda *_: raise_(error))
    assert says in reason
    assert len(reason) < 2100


async def cancels_itself(*_: object) -> None:
    task = asyncio.current_task()
    assert task
    task.cancel()
    await asyncio.sleep(60)


async def is_cancelled_by_its_helper(*_: object) -> None:
    parent = asyncio.current_task()
    assert parent

    async def helper() -> None:
        parent.cancel()

    await asyncio.gather(helper(), asyncio.sleep(60))


async def cancels_itself_and_closes(*_: object) -> None:
    try:
        await cancels_itself()
    except asyncio.CancelledError:
        raise GeneratorExit from None


@pytest.mark.parametrize("act", [cancels_itself, is_cancelled_by_its_helper, cancels_itself_and_closes])
def test_an_agent_that_is_cancelled_from_within_is_one_failure(chat: Chat, verifier: Verifier, act: Any) -> None:
    """By itself or its helper, not by the rollout: the others of its group, and the groups after it, are played."""
    reason = reason_of_the_one(chat, verifier, act)
    assert reason == ("GeneratorExit" if act is cancels_itself_and_closes else "CancelledError")


@pytest.mark.parametrize("coroutine", ["_episode", "play_groups"])
def test_whoever_cancels_the_rollout_s_own_tasks_ends_it_with_an_error(
    chat: Chat, verifier: Verifier, coroutine: str
) -> None:
    """asyncio's task groups ignore a task that ends cancelled: groups would be missing, and nobody would know."""

    async def cancels(*_: object) -> None:
        for task in asyncio.all_tasks():
            if coroutine in repr(task.get_coro()):
                task.cancel()
        await asyncio.sleep(60)

    with pytest.raises(RuntimeError, match="was cancelled by an agent"):
        reason_of_the_one(chat, verifier, cancels)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), pytest.param(None, id="handler")], ids=["keyboard", "SIGTERM"])
def test_what_signals_raise_ends_the_rollout(chat: Chat, verifier: Verifier, error: BaseException | None) -> None:
    """Ctrl-C and SIGTERM may come while an agent runs: they are no failure of its episode."""
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
    "pair": (("q", PROMPT), "put (qid, token_ids, gconfig)"),
    "qid": ((7, PROMPT, GCONFIG), "the qid of an observation is 7"),
    "text": (("q", "5 6 7", GCONFIG), "the token_ids of an observation: '5 6 7' is no list"),
    "numpy": (("q", list(np.array(PROMPT)), GCONFIG), "holds values of type int64, not int"),
    "array": (("q", np.array(PROMPT), GCONFIG), "type ndarray is no list"),
    "truth": (("q", [True, 6], GCONFIG), "type bool, not int"),
    "empty": (("q", [], GCONFIG), "no token ids"),
    "negative": (("q", [5, -1], GCONFIG), "the policy has no token -1"),
    "beyond": (("q", [5, 2**40], GCONFIG), f"the policy has no token {2**40}"),
    "gconfig": (("q", PROMPT, {"n": 1}), "give a GenerationConfig"),
    "many": (("q", PROMPT, GenerationConfig(n=10**9)), "gconfig.n=1000000000: at most 256"),
    "stops": (("q", PROMPT, GenerationConfig(stop_token_ids=("x",))), "type str, not int"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", OBSERVATIONS)
def test_garbage_on_the_queue_never_reaches_the_engine(chat: Chat, verifier: Verifier, name: str) -> None:
    """There it would be refused, which ends the rollout; nor do the others of the group wait for its answer."""
    observation, says = OBSERVATIONS[name]

    async def ask(_: EpisodeSpec, env: Environment, obs_queue: Queue, act_queue: Queue) -> Any:
        await obs_queue.put(observation)
        return await act_queue.get()

    assert says in reason_of_the_one(chat, verifier, ask)


@pytest.mark.parametrize(
    ("knob", "value"),
    [("n", 0), ("n", "4"), ("max_new_tokens", -1), ("max_new_tokens", 0), ("top_p", 0.0), ("top_p", math.nan),
     ("top_k", -2), ("top_k", 1.5), ("stop_token_ids", [3]), ("temperature", math.inf)],
)  # fmt: skip
def test_parameters_that_vllm_refuses_are_no_gconfig(knob: str, value: Any) -> None:
    """The agent that makes them hears of it, at the line where it does."""
    with pytest.raises(ValueError, match=re.escape(repr(value))):
        GenerationConfig(**{knob: value})


def test_an_agent_that_takes_no_answers_is_stopped(chat: Chat, verifier: Verifier) -> None:
    """Endless observations neither fill the memory nor hold up the loop."""

    async def flood(prompt: EpisodeSpec, env: Environment, obs_queue: Queue, act_queue: Queue) -> Any:
        while True:
            await obs_queue.put((prompt.qid, PROMPT, GCONFIG))

    assert "took none of 256 answers" in reason_of_the_one(chat, verifier, flood)


class OneIsNeverMade(MathVerifyEnvironment):
    """An environment whose constructor breaks for the second of four."""

    made = 0

    def __init__(self, made_of: EnvironmentContext) -> None:
        OneIsNeverMade.made += 1
        if OneIsNeverMade.made % 4 == 2:
            raise OSError("no sandbox left")
        super().__init__(made_of)


def test_an_environment_that_cannot_be_made(chat: Chat, verifier: Verifier) -> None:
    """It is its episode's failure; the others of the group do not wait for a first observation from there."""
    OneIsNeverMade.made = 0
    reason = reason_of_the_one(chat, verifier, lambda *_: raise_(AssertionError()), environment=OneIsNeverMade)
    assert reason == "OSError: no sandbox left"


async def never_asks(*_: object) -> None:
    await asyncio.Event().wait()


async def swallows(*_: object) -> None:
    while True:
        with contextlib.suppress(BaseException):
            await asyncio.sleep(0.01)


async def leaves_swallower_behind(*_: object) -> None:
    leaves_swallower_behind.task = asyncio.create_task(swallows())  # type: ignore[attr-defined]
    raise RuntimeError("deadline, so to say")


async def sleeps(*_: object) -> None:
    time.sleep(3600)  # noqa: ASYNC251


async def computes(*_: object) -> None:
    while True:
        with contextlib.suppress(Exception):
            while True:
                pass


async def matches(*_: object) -> None:
    re.match("(a+)+$", "a" * 60 + "b")


def within_deadlines(chat: Chat, verifier: Verifier, act: Act) -> str:
    """`reason_of_the_one` with a deadline that gives the others the time that they need on this machine."""
    verifier.grade([("1", ["1"])])  # its workers have started
    deadline_s = 1.0
    while True:
        try:
            return reason_of_the_one(chat, verifier, act, deadline_s)
        except SlowMachineError:
            if deadline_s > 60:
                raise
        deadline_s *= 4


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "PATIENCE_S", 0.1)
    monkeypatch.setattr(conversation, "FAREWELL_S", 0.1)
    monkeypatch.setattr(collector, "CLEAN_UP_S", 0.1)


def test_an_agent_that_cleans_up_for_long_finishes(
    chat: Chat, verifier: Verifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stops a container, say: the others do not wait for that, the end of the rollout does."""
    monkeypatch.setattr(conversation, "FAREWELL_S", 0.1)
    cleaned = []

    async def cleans_up(prompt: EpisodeSpec, *_: object) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(1.5)
            cleaned.append(prompt.record.problem_id)

    assert "deadline" in within_deadlines(chat, verifier, cleans_up)
    assert {problem.problem_id for problem in PROBLEMS} == set(cleaned)


@pytest.mark.usefixtures("hurry")
@pytest.mark.parametrize("act", [never_asks, swallows, leaves_swallower_behind, sleeps, computes, matches])
def test_what_never_ends_ends_at_its_deadline(chat: Chat, verifier: Verifier, act: Any) -> None:
    """Whether it waits, swallows its cancellation, sleeps or computes: its group is played, and the rollout ends."""
    reason = within_deadlines(chat, verifier, act)
    assert "deadline" in reason
    if act in (sleeps, computes, matches):
        assert re.search(rf"StalledError: .* test_hostile_agents.py:\d+ in {act.__name__}", reason.replace(HERE, " "))


def test_a_thread_is_watched_too(chat: Chat, verifier: Verifier) -> None:
    """As with `run.overlap`: no signal arrives there, but an exception does."""
    with ThreadPoolExecutor(1) as pool:
        assert "StalledError" in pool.submit(within_deadlines, chat, verifier, computes).result()


def test_a_blocked_loop_is_not_counted_against_others() -> None:
    """The deadlines of the others move by the time for which one blocked the loop; its own does not."""

    async def blocks(watch: Watch) -> None:
        while not watch._guilty:
            time.sleep(0.1)  # noqa: ASYNC251
        time.sleep(2)  # noqa: ASYNC251

    async def moved() -> list[float]:
        async with asyncio.timeout(600) as own, asyncio.timeout(600) as others:
            before = [own.when(), others.when()]
            with Watch(600) as watch:
                blocking, waiting = asyncio.create_task(blocks(watch)), asyncio.create_task(asyncio.Event().wait())
                with watch.over(blocking, own), watch.over(waiting, others):
                    await blocking
                    await asyncio.sleep(0.1)  # the loop turns
                waiting.cancel()
            return [(after or 0) - (when or 0) for after, when in zip([own.when(), others.when()], before, strict=True)]

    own_s, others_s = asyncio.run(moved())
    assert own_s == 0
    assert others_s >= 2


STOPPED = """
import asyncio, sys
from tasks.rollout import watch
watch.GRACE_S = watch.LAST_S = 1.0

async def main():
    with watch.Watch(1.0):
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        await asyncio.sleep(1)  # a few looks
    print("done")

asyncio.run(main())
"""


def test_a_process_that_was_stopped_goes_on() -> None:
    """By Ctrl-Z or `docker pause`: nobody held up the loop meanwhile, so nothing ends the process."""
    environment = os.environ | {"PYTHONPATH": HERE.removesuffix("tests/")}
    for _ in range(3):  # whether its watcher or its loop wakes up first is open
        with subprocess.Popen(
            [sys.executable, "-c", STOPPED], env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process:
            assert process.stdout
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGSTOP)
            time.sleep(4)
            process.send_signal(signal.SIGCONT)
            assert process.communicate("\n", timeout=120)[0] == "done\n"
            assert process.returncode == 0


STUCK = """
import asyncio, ctypes, logging, sys, threading
from tasks.rollout import watch
watch.GRACE_S = watch.LAST_S = 1.0
logging.basicConfig(format="%(message)s")

async def main():
    with watch.Watch(1.0):
        libc = ctypes.CDLL(None)
        while True:  # C that heeds no signal
            libc.pause()

def call():
    asyncio.run(main())

if sys.argv[1] == "thread":
    threading.Thread(target=call).start()
    threading.Event().wait()
call()
"""


def test_what_cannot_be_ended_ends_the_process(tmp_path: Path) -> None:
    """In another thread than the main one nothing stops a call into C: better an end that names it than none."""
    script = tmp_path / "stuck.py"
    script.write_text(STUCK)
    environment = os.environ | {"PYTHONPATH": HERE.removesuffix("tests/")}
    done = subprocess.run(
        [sys.executable, script, "thread"], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert f"in {script}:11 in main" in done.stderr
    assert "goes on from what is stored" in done.stderr


def test_an_exit_beside_an_agent_ends_no_process_silently() -> None:
    """asyncio ends its loop by it, whoever waits for that task: with status 0 the run would look complete."""

    async def rounds() -> None:
        async def leave() -> None:
            sys.exit(0)

        await asyncio.gather(asyncio.create_task(leave()))

    with pytest.raises(RuntimeError, match=r"called sys.exit\(0\)"):
        _run(rounds())


def test_who_cancels_everything_or_stops_the_loop_ends_the_rollout_with_a_reason() -> None:
    """Tests and scripts clean up like that, where the loop is their own."""

    async def cancels() -> None:
        for task in asyncio.all_tasks():
            task.cancel()
        await asyncio.sleep(60)

    async def stops() -> None:
        asyncio.get_running_loop().stop()
        await asyncio.sleep(60)

    with pytest.raises(RuntimeError, match="an agent has cancelled the rollout's own tasks"):
        _run(cancels())
    with pytest.raises(RuntimeError, match="an agent stopped the event loop"):
        _run(stops())


def test_an_engine_that_answers_too_little_holds_up_nobody(chat: Chat, verifier: Verifier) -> None:
    """A request of a group with fewer completions than episodes is a failure of all that wait for it."""

    class Mean(ScriptedEngine):
        async def generate(self, *arguments: Any) -> Any:
            return (await super().generate(*arguments))[:-1]

    rows = play(Mean(chat, lambda *_: "3"), MathMultiTurnAgent(context(chat)), verifier)
    assert {row.status for row in rows} == {"failed"}
