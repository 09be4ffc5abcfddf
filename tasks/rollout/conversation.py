"""One episode: it runs the agent, which asks the engine, and ends whatever the agent does.

The agent makes its trajectory with `tasks.agents.episode.Episode`, whose docstring shows an example.
"""

import asyncio
import copy
import json
import logging
import time
from collections.abc import Sequence, Set
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, cast

import numpy as np
from wrapt import ObjectProxy

from storage import interrupts
from storage.records import Problem, Status, Trajectory, pack_experts, unpack_experts
from storage.telemetry.metrics import PLAYING
from tasks.agents.episode import Episode
from tasks.agents.faults import fault_of, reason_of
from tasks.agents.interface import EpisodeSpec, QueueAgent
from tasks.environments.interface import Environment
from tasks.inference.api import BundledGenerationOutputs, Completion, ContextLengthError, InferenceError
from tasks.rollout.admission import RefusedError, admit
from tasks.rollout.turns import BatchedEngine, Player, TurnBatcher, play_with_queues

logger = logging.getLogger(__name__)

DRAIN_S = 2.0
"""Time for an agent's clean-up after its deadline; then the rollout goes on while the agent still cleans up."""
_WHY = "its clean-up is slow, or it catches asyncio.CancelledError"


class AgentError(Exception):
    """An exception of the agent or environment that ended the episode; the message is the reason in the record."""


class Conversation:
    """One episode in play.

    Args:
        prompt: the episode to play.
        turns: answers the observations, together with those of its group.
        player: what all episodes share.
    """

    def __init__(self, prompt: EpisodeSpec, turns: TurnBatcher, player: Player) -> None:
        self._prompt, self._player = prompt, player
        self._shown = without(prompt.problem.metadata, player.private)
        self._engine = BatchedEngine(prompt, turns, player)
        self._left: list[Trajectory] = []
        """The trajectories of an agent that was ended, at the deadline or by an error that was not its own."""
        self._sampling = False
        """Whether the deadline came while the engine sampled, and sampling took more than half of the time."""

    async def play(self, *, trained: bool) -> list[Trajectory]:
        """Play the episode; return its trajectories, or one record with the reason why it has none.

        Args:
            trained: whether the policy may be trained on it, which needs the experts that the engine chose.

        Raises:
            InferenceError: the engine refuses a request, or serves another version.
        """
        began, started = time.time(), time.monotonic()
        try:
            async with asyncio.timeout(self._player.settings.episode_deadline_s) as deadline:
                with PLAYING.track_inprogress():
                    rows = await self._await_agent(deadline)
            rows = rows or [self._salvage("rejected", "the agent returned no trajectory")]
        except InferenceError:
            raise
        except Exception as error:
            logger.debug("episode %s failed", self._prompt.record.trajectory_id, exc_info=True)
            rows = self._unfinished(error, late=deadline.expired())
        latency_s, exchanges = time.monotonic() - started, self._engine.exchanges
        rows = [replace(row, started_at=began, latency_s=latency_s) for row in rows]
        # A colon, because a problem's id may end like a sample's: "a/0" is the first sample of "a", or a problem.
        rows[1:] = [replace(row, trajectory_id=f"{row.trajectory_id}:{i}") for i, row in enumerate(rows[1:], 1)]
        return [with_experts(row, exchanges) for row in rows] if trained else rows

    async def _await_agent(self, deadline: asyncio.Timeout) -> list[Trajectory]:
        """Let the agent play; return its trajectories after they passed admission.

        Raises:
            AgentError: the agent or its environment raised an exception.
            RefusedError: an observation or the return value of the agent is invalid.
            Exception: an error of the engine, or asyncio's at the deadline.
        """
        engine = self._engine
        agent = asyncio.create_task(self._run_agent(), name=self._prompt.record.trajectory_id)
        waiting: set[asyncio.Future[Any]] = {engine.failed, agent}
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if not agent.done():
                raise engine.failed.result()
            return _agent_result(agent)
        except asyncio.CancelledError:
            if deadline.expired() and agent.done():
                return agent.result()  # the agent's own result or error says more than the deadline
            self._sampling = engine.is_sampling()
            raise
        finally:
            for task in await cancel({agent, *engine.close()}):
                logger.warning("%s still runs after its cancellation, and is not waited for: %s", task.get_name(), _WHY)
            returned = agent.done() and not agent.cancelled() and not agent.exception()
            self._left = agent.result() if returned else []

    def _unfinished(self, error: Exception, *, late: bool) -> list[Trajectory]:
        """Return what the agent left, or what was sampled for it, with the reason for the end and whose fault it is."""
        full = isinstance(error, ContextLengthError)
        status: Status = "truncated" if full and self._engine.exchanges else "failed"
        if late := late and isinstance(error, TimeoutError):
            reason = f"deadline of {self._player.settings.episode_deadline_s:g} s"
        else:
            reason = str(error) if full or isinstance(error, AgentError | RefusedError) else reason_of(error)
        rows = self._left or [self._salvage(status, reason)]
        fault = fault_of(error, sampled=any(any(row.action_mask) for row in rows), sampling=late and self._sampling)
        return [replace(row, status=status, reason=reason, fault=fault) for row in rows]

    def _salvage(self, status: Status, reason: str) -> Trajectory:
        """Return a record of the completions that were sampled before an episode ended without a trajectory."""
        exchanges = self._engine.exchanges
        episode = Episode(self._prompt, exchanges[0].prompt_ids if exchanges else [])
        for outputs in exchanges:
            sequence = episode.prompt_ids
            if outputs.prompt_ids[: len(sequence)] != sequence:
                episode.start_sequence("", outputs.prompt_ids)
            elif len(outputs.prompt_ids) > len(sequence):
                episode.add_feedback("", outputs.prompt_ids[len(sequence) :])
            episode.add_completion(outputs, self._player.chat.decode(outputs.output_ids[0], outputs.prompt_ids))
        return episode.trajectory(status=status, reason=reason)

    async def _run_agent(self) -> list[Trajectory]:
        """Run the agent and check its trajectories.

        Every exception of the agent fails the episode, also CancelledError and SystemExit, unless a signal raised it.
        """
        task, agent = asyncio.current_task(), self._player.agent
        assert task
        try:
            # Copies, so that the agent can change neither the gold answers nor the record used for admission.
            own, record = self._prompt, self._prompt.record
            problem = replace(own.problem, solutions=[*own.problem.solutions], metadata=self._shown)
            shown = replace(record, solutions=[*record.solutions], metadata=self._shown)
            asked = replace(own, problem=problem, record=shown)
            async with AsyncExitStack() as stack:
                environment, metadata = self._player.make_environment(), self._prompt.problem.metadata
                if close := getattr(environment, "close", None):
                    stack.push_async_callback(close)
                whole = cast(Environment, WholeProblem(environment, self._shown, metadata))
                if hasattr(agent, "collect_trajectory"):  # Python 3.11 needs 20 us to compare with a protocol
                    returned = await play_with_queues(cast(QueueAgent, agent), asked, whole, self._engine)
                else:
                    returned = await agent.play(asked, whole, self._engine)
            served = [completion for outputs in self._engine.exchanges for completion in outputs.completions]
            return admit(returned, record, self._player.chat.vocabulary, served, self._shown)
        except RefusedError:
            raise
        except BaseException as error:
            cancelled = isinstance(error, asyncio.CancelledError | GeneratorExit) and task.cancelling()
            if cancelled or interrupts.raised_by_handler(error):
                raise
            raise AgentError(reason_of(error)) from error


async def cancel(tasks: set[asyncio.Task[object]]) -> set[asyncio.Task[object]]:
    """Cancel tasks and wait `DRAIN_S` for their clean-up; return those that still run."""
    if running := {task for task in tasks if task.cancel()}:
        await asyncio.sleep(0)  # nearly all tasks end in this step of the event loop
    if running := {task for task in running if not task.done()}:
        _, running = await asyncio.wait(running, timeout=DRAIN_S)
    for task in tasks - running:
        if not task.cancelled():
            task.exception()  # marks it as retrieved: the record gets its reason elsewhere
    return running


def _agent_result(agent: asyncio.Task[list[Trajectory]]) -> list[Trajectory]:
    """Return the agent's trajectories. If the agent, or a helper of it, cancelled its task, the agent has failed."""
    try:
        return agent.result()
    except (asyncio.CancelledError, GeneratorExit) as error:
        own = asyncio.current_task()
        if own and own.cancelling():
            raise
        raise AgentError(reason_of(error)) from error


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
        experts = unpack_experts(completion.experts)[: turn.end - begin]
        if table is None:
            table = np.full((len(ids), *experts.shape[1:]), -1, np.int16)
        rows = table[begin : begin + len(experts)]
        unknown = rows < 0
        rows[unknown] = experts[unknown]
    return trajectory if table is None else replace(trajectory, experts=pack_experts(table))


def _find(exchanges: Sequence[BundledGenerationOutputs], prompt: list[int], sampled: list[int]) -> Completion | None:
    """Return the completion of a prompt that is, or begins with, the sampled tokens."""
    answers = (each for outputs in exchanges if outputs.prompt_ids == prompt for each in outputs.completions)
    return next((each for each in answers if each.token_ids[: len(sampled)] == sampled), None)


def without(metadata: str, private: Set[str]) -> str:
    """Return metadata, JSON of an object, without the private keys.

    >>> without('{"level": 3, "tests": [1]}', {"tests"}), without('{"level":3}', {"tests"})
    ('{"level": 3}', '{"level":3}')
    """
    values = json.loads(metadata) if private else {}
    return json.dumps({key: values[key] for key in values if key not in private}) if private & set(values) else metadata


class WholeProblem(ObjectProxy[Environment]):
    """An environment that gets the whole problem, and its metadata as a dictionary, whatever its agent has of them.

    To the agent it is the environment itself: all but `reset` is that of the environment, its class included.

    Args:
        environment: the environment.
        shown: the metadata that the agent has.
        whole: all metadata.
    """

    def __init__(self, environment: Environment, shown: str, whole: str) -> None:
        super().__init__(environment)
        self._self_shown, self._self_whole = shown, whole  # by their prefix these are the proxy's own

    async def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """See `Environment.reset`."""
        given = (options or {}).get("problem")
        if isinstance(given, Problem):
            problem = replace(given, metadata=self._self_whole) if given.metadata == self._self_shown else given
            options = {"metadata": json.loads(problem.metadata), **(options or {}), "problem": problem}
        return await self.__wrapped__.reset(seed=seed, options=options)

    def __deepcopy__(self, memo: dict[int, Any]) -> "WholeProblem":
        """Copy the environment, for an agent that searches a tree."""
        return WholeProblem(copy.deepcopy(self.__wrapped__, memo), self._self_shown, self._self_whole)

    def __copy__(self) -> "WholeProblem":
        return WholeProblem(copy.copy(self.__wrapped__), self._self_shown, self._self_whole)
