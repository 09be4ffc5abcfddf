"""One episode: it runs the agent, answers its observations, and ends whatever the agent does.

The agent and the answers run in two tasks, which exchange observations and outputs through two queues. The agent makes
its trajectory with `tasks.agents.episode.Episode`, whose docstring shows an example.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Set
from contextlib import asynccontextmanager
from dataclasses import replace

from configs.rollout import Rollout
from storage import interrupts
from storage.records import Trajectory
from tasks.agents.faults import reason_of
from tasks.agents.interface import Agent, EpisodeSpec
from tasks.environments.interface import Environment
from tasks.inference.api import BundledGenerationOutputs, GenerationConfig, Observation
from tasks.inference.client import CUT_S
from tasks.rollout.admission import admit, check_observation
from tasks.rollout.private import WholeProblem, without
from tasks.rollout.turns import TurnBatcher
from tasks.rollout.values import RefusedError
from tasks.rollout.watch import StalledError, Watch
from tasks.seeds import derive

logger = logging.getLogger(__name__)

MOST_UNREAD = 256
"""Most observations, or answers, that may wait in a queue."""
MOST_AT_ONCE = 64
"""Most observations of an episode that are answered at the same time."""
FAREWELL_S = 2.0
"""Time for an agent's clean-up after its deadline; then the rollout goes on while the agent still cleans up."""


class AgentError(Exception):
    """An exception of the agent or environment that ended the episode; the message is the reason in the record."""


class Conversation:
    """One episode in play.

    Args:
        prompt: the episode to play.
        turns: answers the observations, together with those of its group.
        vocabulary: number of token ids that the policy knows.
        settings: how long completions may take, and whether observations may sample in a way of their own.
        gconfig: what they must sample with otherwise; None: anything.
        private: keys of the problem's metadata that the agent does not get.
    """

    def __init__(
        self,
        prompt: EpisodeSpec,
        turns: TurnBatcher,
        vocabulary: int,
        settings: Rollout,
        gconfig: GenerationConfig | None,
        private: Set[str] = frozenset(),
    ) -> None:
        self.prompt, self._turns, self._vocabulary = prompt, turns, vocabulary
        self._settings, self._sampling = settings, None if settings.allow_own_sampling else gconfig
        self._shown = without(prompt.problem.metadata, private)
        self._observations: asyncio.Queue[Observation] = asyncio.Queue(MOST_UNREAD)
        self._actions: asyncio.Queue[BundledGenerationOutputs] = asyncio.Queue()
        self._room = asyncio.Semaphore(MOST_AT_ONCE)
        self._asked: dict[int, float] = {}  # the observations that wait for their answers, and since when
        self._idle_s, self._idle_since = 0.0, time.monotonic()  # how long none waited, and since when
        self.exchanges: list[BundledGenerationOutputs] = []
        """All answers so far, as copies that the agent cannot change."""
        self.left: list[Trajectory] = []
        """The trajectories of an agent that was ended, at the deadline or by an error that was not its own."""
        self.sampling = False
        """True if the deadline struck while the engine was sampling, which took more than half of the episode's time.

        A request that waits for longer than the engine needs to cut it is not being sampled.
        """

    async def play(
        self, agent: Agent, make_environment: Callable[[], Environment], watch: Watch, deadline: asyncio.Timeout
    ) -> list[Trajectory]:
        """Play the episode; return the agent's trajectories after they passed admission.

        Raises:
            AgentError: the agent or its environment raised an exception.
            RefusedError: an observation or the return value of the agent is invalid.
            Exception: an error of the engine, or asyncio's at the deadline.
        """
        began = self._idle_since = time.monotonic()
        server = asyncio.create_task(self._answer_observations())
        player = asyncio.create_task(self._run_agent(agent, make_environment), name=self.prompt.record.trajectory_id)
        with watch.over(player, deadline):
            try:
                await asyncio.wait({server, player}, return_when=asyncio.FIRST_COMPLETED)
                if not player.done():
                    server.result()
                return _agent_result(player)
            except asyncio.CancelledError:
                if deadline.expired() and player.done():
                    return player.result()  # the agent's own result or error says more than the deadline
                self.sampling = self._is_sampling(time.monotonic(), began)
                raise
            except StalledError as error:  # a second one, raised while the first was handled
                raise AgentError(reason_of(error)) from error
            finally:
                self._turns.end(len(self._asked))
                for task in await cancel({server, player}):
                    logger.warning(
                        "%s still runs after its cancellation: its clean-up is slow, or it catches "
                        "asyncio.CancelledError and goes on. The rollout goes on without waiting for it",
                        task.get_name(),
                    )
                self.left = _left_by(player)

    def _is_sampling(self, now: float, began: float) -> bool:
        if not self._asked:
            return False
        overdue = now - min(self._asked.values()) > self._settings.longest_completion_s + CUT_S
        return not overdue and 2 * self._idle_s < now - began

    async def _answer_observations(self) -> None:
        """Answer observations until an error ends the task: those of one qid in order, others at the same time."""
        last: dict[str, asyncio.Task[None]] = {}
        try:
            async with asyncio.TaskGroup() as answering:
                for number in itertools.count():
                    await self._room.acquire()
                    observation = check_observation(await self._observations.get(), self._vocabulary, self._sampling)
                    if self._actions.qsize() >= MOST_UNREAD:
                        raise RefusedError(f"{MOST_UNREAD} answers wait in act_queue: the agent must take each of them")
                    qid = observation[0]
                    last[qid] = answering.create_task(self._answer(observation, number, last.get(qid)))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _answer(self, observation: Observation, number: int, before: asyncio.Task[None] | None) -> None:
        """Answer the observation with this number in the episode, after the one `before` it."""
        _, _, gconfig = observation
        place = (number,) if gconfig.seed is None else ("seed", gconfig.seed)
        if before:
            await asyncio.wait([before])
        if not self._asked:
            self._idle_s += time.monotonic() - self._idle_since
        self._asked[number] = time.monotonic()
        try:
            outputs = await self._turns.ask(observation, derive(self.prompt.seed, *place))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task and task.cancelling():
                raise
            raise RuntimeError("the engine cancelled a request") from None
        del self._asked[number]
        self._idle_since = time.monotonic()
        self.exchanges.append(_copy_outputs(outputs))
        self._actions.put_nowait(outputs)
        self._room.release()

    async def _run_agent(self, agent: Agent, make_environment: Callable[[], Environment]) -> list[Trajectory]:
        """Run the agent and check its trajectories.

        Every exception of the agent fails the episode, also CancelledError and SystemExit, unless a signal raised it.
        """
        task = asyncio.current_task()
        assert task
        try:
            asked = _copy_for_agent(self.prompt, self._shown)
            async with _opened(make_environment()) as environment:
                returned = await agent.collect_trajectory(
                    asked, self._whole(environment), self._observations, self._actions
                )
            served = [completion for outputs in self.exchanges for completion in outputs.completions]
            record = self.prompt.record
            admitted = admit(returned, replace(record, metadata=self._shown), self._vocabulary, served)
            return [replace(trajectory, metadata=record.metadata) for trajectory in admitted]
        except RefusedError:
            raise
        except BaseException as error:
            cancelled = isinstance(error, asyncio.CancelledError | GeneratorExit) and task.cancelling()
            if cancelled or interrupts.raised_by_handler(error):
                raise
            raise AgentError(reason_of(error)) from error

    def _whole(self, environment: Environment) -> Environment:
        """Return an environment that gets the problem's private metadata, too, if there are any."""
        whole = self.prompt.problem.metadata
        return environment if self._shown == whole else WholeProblem(environment, self._shown, whole)


async def cancel(tasks: set[asyncio.Task[object]]) -> set[asyncio.Task[object]]:
    """Cancel tasks and wait `FAREWELL_S` for their clean-up; return those that still run."""
    for task in tasks:
        task.cancel()
    await asyncio.sleep(0)  # nearly all tasks end in this step of the event loop
    running = {task for task in tasks if not task.done()}
    if running:
        _, running = await asyncio.wait(running, timeout=FAREWELL_S)
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


def _left_by(player: asyncio.Task[list[Trajectory]]) -> list[Trajectory]:
    """Return what an agent returned, if it has ended without an error."""
    return player.result() if player.done() and not player.cancelled() and not player.exception() else []


@asynccontextmanager
async def _opened(environment: Environment) -> AsyncIterator[Environment]:
    """Close an environment at the end, if it can be closed."""
    try:
        yield environment
    finally:
        if close := getattr(environment, "close", None):
            await close()


def _copy_for_agent(prompt: EpisodeSpec, shown: str) -> EpisodeSpec:
    """Copy the prompt, so that an agent cannot change the gold answers or the record used for admission.

    Its metadata are those that the agent is `shown`.
    """
    problem = replace(prompt.problem, solutions=list(prompt.problem.solutions), metadata=shown)
    record = replace(prompt.record, solutions=list(prompt.record.solutions), metadata=shown)
    return replace(prompt, problem=problem, record=record)


def _copy_outputs(outputs: BundledGenerationOutputs) -> BundledGenerationOutputs:
    completions = [
        replace(c, token_ids=list(c.token_ids), logprobs=list(c.logprobs), versions=list(c.versions))
        for c in outputs.completions
    ]
    return replace(outputs, prompt_ids=list(outputs.prompt_ids), completions=completions)
