"""One episode: it runs the agent, which asks the engine, and ends whatever the agent does.

The agent makes its trajectory with `tasks.agents.episode.Episode`, whose docstring shows an example.
"""

import asyncio
import json
import logging
from collections.abc import Set
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from storage import interrupts
from storage.records import Problem, Trajectory
from tasks.agents.faults import reason_of
from tasks.agents.interface import EpisodeSpec, QueueAgent
from tasks.environments.interface import Environment
from tasks.rollout.admission import RefusedError, admit
from tasks.rollout.turns import BatchedEngine, TurnBatcher, play_with_queues

if TYPE_CHECKING:
    from tasks.rollout.collector import Collector

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
        shared: what all episodes share.
    """

    def __init__(self, prompt: EpisodeSpec, turns: TurnBatcher, shared: "Collector") -> None:
        self.prompt, self._shared = prompt, shared
        self._shown = without(prompt.problem.metadata, shared.private)
        self.engine = BatchedEngine(prompt, turns, shared)
        self.left: list[Trajectory] = []
        """The trajectories of an agent that was ended, at the deadline or by an error that was not its own."""
        self.sampling = False
        """Whether the deadline came while the engine sampled, and sampling took more than half of the time."""

    async def play(self, deadline: asyncio.Timeout) -> list[Trajectory]:
        """Play the episode; return the agent's trajectories after they passed admission.

        Raises:
            AgentError: the agent or its environment raised an exception.
            RefusedError: an observation or the return value of the agent is invalid.
            Exception: an error of the engine, or asyncio's at the deadline.
        """
        engine = self.engine
        player = asyncio.create_task(self._run_agent(), name=self.prompt.record.trajectory_id)
        waiting: set[asyncio.Future[Any]] = {engine.failed, player}
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if not player.done():
                raise engine.failed.result()
            return _agent_result(player)
        except asyncio.CancelledError:
            if deadline.expired() and player.done():
                return player.result()  # the agent's own result or error says more than the deadline
            self.sampling = engine.is_sampling()
            raise
        finally:
            for task in await cancel({player, *engine.close()}):
                logger.warning("%s still runs after its cancellation, and is not waited for: %s", task.get_name(), _WHY)
            returned = player.done() and not player.cancelled() and not player.exception()
            self.left = player.result() if returned else []

    async def _run_agent(self) -> list[Trajectory]:
        """Run the agent and check its trajectories.

        Every exception of the agent fails the episode, also CancelledError and SystemExit, unless a signal raised it.
        """
        task, agent = asyncio.current_task(), self._shared.agent
        assert task
        try:
            asked = _copy_for_agent(self.prompt, self._shown)
            async with AsyncExitStack() as stack:
                environment, metadata = self._shared.make_environment(), self.prompt.problem.metadata
                if close := getattr(environment, "close", None):
                    stack.push_async_callback(close)
                whole = cast(Environment, WholeProblem(environment, self._shown, metadata))
                if isinstance(agent, QueueAgent):
                    returned = await play_with_queues(agent, asked, whole, self.engine)
                else:
                    returned = await agent.play(asked, whole, self.engine)
            served = [completion for outputs in self.engine.exchanges for completion in outputs.completions]
            record = self.prompt.record
            admitted = admit(returned, replace(record, metadata=self._shown), self._shared.chat.vocabulary, served)
            return [replace(trajectory, metadata=record.metadata) for trajectory in admitted]
        except RefusedError:
            raise
        except BaseException as error:
            cancelled = isinstance(error, asyncio.CancelledError | GeneratorExit) and task.cancelling()
            if cancelled or interrupts.raised_by_handler(error):
                raise
            raise AgentError(reason_of(error)) from error


async def cancel(tasks: set[asyncio.Task[object]]) -> set[asyncio.Task[object]]:
    """Cancel tasks and wait `DRAIN_S` for their clean-up; return those that still run."""
    for task in tasks:
        task.cancel()
    await asyncio.sleep(0)  # nearly all tasks end in this step of the event loop
    running = {task for task in tasks if not task.done()}
    if running:
        _, running = await asyncio.wait(running, timeout=DRAIN_S)
    for task in tasks - running:
        if not task.cancelled():
            task.exception()  # marks it as retrieved: the record gets its reason elsewhere
    return running


def _agent_result(player: asyncio.Task[list[Trajectory]]) -> list[Trajectory]:
    """Return the agent's trajectories. If the agent, or a helper of it, cancelled its task, the agent has failed."""
    try:
        return player.result()
    except (asyncio.CancelledError, GeneratorExit) as error:
        own = asyncio.current_task()
        if own and own.cancelling():
            raise
        raise AgentError(reason_of(error)) from error


def _copy_for_agent(prompt: EpisodeSpec, shown: str) -> EpisodeSpec:
    """Copy the prompt, so that an agent cannot change the gold answers or the record used for admission.

    Its metadata are those that the agent is `shown`.
    """
    problem = replace(prompt.problem, solutions=list(prompt.problem.solutions), metadata=shown)
    record = replace(prompt.record, solutions=list(prompt.record.solutions), metadata=shown)
    return replace(prompt, problem=problem, record=record)


def without(metadata: str, private: Set[str]) -> str:
    """Return metadata, JSON of an object, without the private keys.

    >>> without('{"level": 3, "tests": [1]}', {"tests"}), without('{"level":3}', {"tests"})
    ('{"level": 3}', '{"level":3}')
    """
    values = json.loads(metadata) if private else {}
    return json.dumps({key: values[key] for key in values if key not in private}) if private & set(values) else metadata


class WholeProblem:
    """An environment that gets the whole problem, and its metadata as a dictionary, whatever its agent has of them.

    To the agent it is the environment itself: it has its class and attributes, which may also be set.

    Args:
        environment: the environment.
        shown: the metadata that the agent has.
        whole: all metadata.
    """

    def __init__(self, environment: Environment, shown: str, whole: str) -> None:
        vars(self).update(_environment=environment, _shown=shown, _whole=whole)  # not by `__setattr__`

    async def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """See `Environment.reset`."""
        given = (options or {}).get("problem")
        if isinstance(given, Problem):
            problem = replace(given, metadata=self._whole) if given.metadata == self._shown else given
            options = {"metadata": json.loads(problem.metadata), **(options or {}), "problem": problem}
        environment: Environment = self._environment
        return await environment.reset(seed=seed, options=options)

    @property  # type: ignore[misc]
    def __class__(self) -> type[Environment]:  # type: ignore[override]
        return type(self._environment)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_environment"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "reset":  # an agent's own, which calls the one above: on the environment they would call each other
            super().__setattr__(name, value)
        else:
            setattr(self._environment, name, value)
