"""The collector: it plays many episodes at the same time, each with a deadline, and keeps a record of every one."""

import asyncio
import contextvars
import ctypes
import logging
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from configs.rollout import Rollout
from storage.experts import pack, unpack
from storage.records import Status, Trajectory
from storage.telemetry.metrics import PLAYING
from tasks.agents.chat import Chat
from tasks.agents.episode import Episode
from tasks.agents.faults import fault_of, reason_of
from tasks.agents.interface import Agent, EpisodeSpec
from tasks.environments.interface import Environment
from tasks.inference.api import (
    BundledGenerationOutputs,
    Completion,
    ContextLengthError,
    GenerationConfig,
    Generator,
    InferenceError,
)
from tasks.rollout.admission import RefusedError
from tasks.rollout.conversation import AgentError, Conversation, cancel
from tasks.rollout.plan import Group
from tasks.rollout.turns import TurnBatcher
from tasks.rollout.watch import Watch

logger = logging.getLogger(__name__)

CLEAN_UP_S = 60.0
"""Time for all agents that still clean up at the end of a rollout."""


@dataclass(frozen=True, slots=True)
class Collector:
    """The player of an iteration's groups, with everything that episodes need.

    Observations must ask for the distribution of `gconfig`, unless it is None or `rollout.allow_own_sampling` is set.

    An `InferenceError` (the engine refuses a request or serves another version) ends the rollout. Any other error in
    an episode becomes a failed trajectory with its reason.
    """

    generator: Generator
    agent: Agent
    make_environment: Callable[[], Environment]
    chat: Chat
    settings: Rollout
    gconfig: GenerationConfig | None = None
    private: Set[str] = frozenset()  # keys of problems' metadata that agents do not get
    members: Mapping[str, "Collector"] = field(default_factory=dict)  # of a mixture, by the source of their problems

    async def collect(
        self, groups: AsyncIterator[Group], together: int, sink: Callable[[Group, list[Trajectory]], None]
    ) -> None:
        """Play all groups, `concurrency` episodes at a time; pass each finished group to `sink`, in a thread.

        A group is taken from `groups` when there are slots for `together` of its episodes; the others begin one by one.
        The next group is taken when each episode of this one has begun.
        """
        loads = [0] * self.generator.replicas
        slots = asyncio.Semaphore(max(self.settings.concurrency, together))
        writer, loop = ThreadPoolExecutor(1, "rollout-writer"), asyncio.get_running_loop()
        before, collecting = asyncio.all_tasks(), asyncio.current_task()
        assert collecting

        async def play_group(group: Group, group_slots: asyncio.Semaphore) -> None:
            replica = loads.index(min(loads))
            loads[replica] += 1
            try:
                trajectories = await self._play(group, replica, group_slots, slots)
                await loop.run_in_executor(writer, contextvars.copy_context().run, sink, group, trajectories)
            except asyncio.CancelledError:
                if collecting.cancelling():
                    raise
                remedy = "an agent must cancel only tasks that it started"
                raise RuntimeError(f"an agent, or other code, has cancelled an episode or a group: {remedy}") from None
            finally:
                loads[replica] -= 1

        try:
            with Watch(self.settings.episode_deadline_s):
                async with asyncio.TaskGroup() as playing:
                    while True:
                        for _ in range(together):
                            await slots.acquire()
                        if not (group := await anext(groups, None)):
                            break
                        group_slots = asyncio.Semaphore(together)
                        playing.create_task(play_group(group, group_slots), name=f"group {group.problem.problem_id}")
                        for _ in group.prompts[together:]:
                            await slots.acquire()
                            group_slots.release()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            await _end_tasks(before)
            writer.shutdown()

    async def _play(
        self, group: Group, replica: int, group_slots: asyncio.Semaphore, slots: asyncio.Semaphore
    ) -> list[Trajectory]:
        """Play all episodes of a group on one replica.

        Each begins when it gets one of the `group_slots`, and gives it back to the rollout's `slots` when it ends.
        """
        player = self.members.get(group.problem.source, self)
        turns = TurnBatcher(len(group.prompts), player, replica)

        async def play_episode(prompt: EpisodeSpec) -> list[Trajectory]:
            await group_slots.acquire()
            try:
                with PLAYING.track_inprogress():
                    conversation = Conversation(prompt, turns, player)
                    played = await self._episode(conversation)
                trained = group.plan.selecting  # no evaluation, which is not
                return [with_experts(row, conversation.engine.exchanges) for row in played] if trained else played
            finally:
                slots.release()

        # Not a task group, which ignores an episode that somebody else cancels: it would be missing.
        playing = [asyncio.create_task(play_episode(each), name=each.record.trajectory_id) for each in group.prompts]
        return [trajectory for played in await asyncio.gather(*playing) for trajectory in played]

    async def _episode(self, conversation: Conversation) -> list[Trajectory]:
        """Play one episode; return its trajectories, or one record with the reason why it has none."""
        started_at, started = time.time(), time.monotonic()
        try:
            async with asyncio.timeout(self.settings.episode_deadline_s) as deadline:
                trajectories = await conversation.play(deadline)
            if not trajectories:
                trajectories = [self._salvage(conversation, "rejected", "the agent returned no trajectory")]
        except InferenceError:
            raise
        except Exception as error:
            logger.debug("episode %s failed", conversation.prompt.record.trajectory_id, exc_info=True)
            trajectories = self._unfinished(conversation, error, late=deadline.expired())
        return _stamp(trajectories, started_at, time.monotonic() - started)

    def _unfinished(self, conversation: Conversation, error: Exception, *, late: bool) -> list[Trajectory]:
        """Return what the agent left, or what was sampled for it, with the reason for the end and whose fault it is."""
        full = isinstance(error, ContextLengthError)
        status: Status = "truncated" if full and conversation.engine.exchanges else "failed"
        if late := late and isinstance(error, TimeoutError):
            reason = f"deadline of {self.settings.episode_deadline_s:g} s"
        else:
            reason = str(error) if full or isinstance(error, AgentError | RefusedError) else reason_of(error)
        rows = conversation.left or [self._salvage(conversation, status, reason)]
        sampled, sampling = any(any(row.action_mask) for row in rows), late and conversation.sampling
        fault = fault_of(error, sampled=sampled, sampling=sampling)
        return [replace(row, status=status, reason=reason, fault=fault) for row in rows]

    def _salvage(self, conversation: Conversation, status: Status, reason: str) -> Trajectory:
        """Return a record of the completions that were sampled before an episode ended without a trajectory."""
        exchanges = conversation.engine.exchanges
        episode = Episode(conversation.prompt, exchanges[0].prompt_ids if exchanges else [])
        for outputs in exchanges:
            sequence = episode.prompt_ids
            if outputs.prompt_ids[: len(sequence)] != sequence:
                episode.start_sequence("", outputs.prompt_ids)
            elif len(outputs.prompt_ids) > len(sequence):
                episode.add_feedback("", outputs.prompt_ids[len(sequence) :])
            episode.add_completion(outputs, self.chat.decode(outputs.output_ids[0], outputs.prompt_ids))
        return episode.trajectory(status=status, reason=reason)


async def _end_tasks(before: set[asyncio.Task[Any]]) -> None:
    """End the tasks that agents and requests left running, except those in `before`.

    Cancelled agents that still clean up have `CLEAN_UP_S` for it, unless the rollout is interrupted.

    A task that does not end is hidden from `asyncio.run`, which would wait for it for ever. It also gets an extra
    reference, because Python would run it once more on destruction: without end, if it catches every exception.
    """
    cleaning = {task for task in asyncio.all_tasks() - before if task.cancelling()}
    if cleaning and isinstance(sys.exception(), Exception | None):
        await asyncio.wait(cleaning, timeout=CLEAN_UP_S)
    rest = asyncio.all_tasks() - before
    for task in await cancel(rest) if rest else ():
        remedy = "an agent must end then, and must not catch asyncio.CancelledError"
        logger.warning("%s still runs %g s after its cancellation: %s", task.get_name(), CLEAN_UP_S, remedy)
        asyncio.tasks._unregister_task(task)  # Python documents it for implementers of tasks
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(task))


def _stamp(trajectories: list[Trajectory], started_at: float, latency_s: float) -> list[Trajectory]:
    """Add the times, and give each of several trajectories its own id: `<id>`, `<id>:1` …

    The separator is a colon, because a problem's id may end like a sample's: "a/0" is the first sample of "a", or a
    problem.
    """
    first, *others = [replace(row, started_at=started_at, latency_s=latency_s) for row in trajectories]
    return [first, *(replace(row, trajectory_id=f"{row.trajectory_id}:{i}") for i, row in enumerate(others, 1))]


def with_experts(trajectory: Trajectory, exchanges: Sequence[BundledGenerationOutputs]) -> Trajectory:
    """Add the experts of all tokens that the engine read, if it returned any.

    An answer has the experts of its prompt, too, so those of a feedback come with the turn that follows it. Of a token
    in several prompts the first answer counts, since the token was sampled with these, or the turn after it was.

    Args:
        trajectory: an episode's, from any agent.
        exchanges: all answers that the episode got, in their order.
    """
    if not any(completion.experts for outputs in exchanges for completion in outputs.completions):
        return trajectory
    ids, table = trajectory.token_ids, None
    for turn in trajectory.turns:
        begin = max(start for start in trajectory.sequence_starts if start <= turn.start)
        if (completion := _find(exchanges, ids[begin : turn.start], ids[turn.start : turn.end])) is None:
            continue
        experts = unpack(completion.experts)[: turn.end - begin]
        if table is None:
            table = np.full((len(ids), *experts.shape[1:]), -1, np.int16)
        rows = table[begin : begin + len(experts)]
        unknown = rows < 0
        rows[unknown] = experts[unknown]
    return trajectory if table is None else replace(trajectory, experts=pack(table))


def _find(exchanges: Sequence[BundledGenerationOutputs], prompt: list[int], sampled: list[int]) -> Completion | None:
    """Return the completion of a prompt that is, or begins with, the sampled tokens."""
    answers = (each for outputs in exchanges if outputs.prompt_ids == prompt for each in outputs.completions)
    return next((each for each in answers if each.token_ids[: len(sampled)] == sampled), None)
