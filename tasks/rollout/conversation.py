"""One episode: its agent, and the answers to what it asks. Whatever the agent does comes to an end here."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace

from storage import interrupts
from storage.records import Trajectory
from tasks.agents.interface import Agent, EpisodeSpec
from tasks.environments.interface import Environment
from tasks.inference.api import BundledGenerationOutputs, Completion, Observation
from tasks.rollout.admission import admit, check_observation, reason_of
from tasks.rollout.first_turns import FirstTurnBatcher, Generate
from tasks.rollout.values import RefusedError
from tasks.rollout.watch import StalledError, Watch
from tasks.seeds import derive

logger = logging.getLogger(__name__)

MOST_UNREAD = 256
"""Observations, or answers, that may wait to be taken from a queue."""
FAREWELL_S = 2.0
"""Time that an agent has to clean up after its deadline before the rollout goes on meanwhile."""


class AgentError(Exception):
    """What ended the episode came out of its agent or environment; the message is the reason for the record."""


class Conversation:
    """Plays one episode.

    Args:
        prompt: of the episode.
        opening: of its group.
        generate: answers what comes after the first observation.
        vocabulary: number of token ids that the policy knows.
    """

    def __init__(self, prompt: EpisodeSpec, opening: FirstTurnBatcher, generate: Generate, vocabulary: int) -> None:
        self.prompt, self._opening, self._generate, self._vocabulary = prompt, opening, generate, vocabulary
        self._observations: asyncio.Queue[Observation] = asyncio.Queue(MOST_UNREAD)
        self._actions: asyncio.Queue[BundledGenerationOutputs] = asyncio.Queue()
        self._asked = False
        self.exchanges: list[BundledGenerationOutputs] = []
        """What was answered so far, in copies that the agent cannot change."""

    async def hold(
        self, agent: Agent, make_environment: Callable[[], Environment], watch: Watch, deadline: asyncio.Timeout
    ) -> list[Trajectory]:
        """What the agent returned, admitted.

        Raises:
            AgentError: the agent or its environment raised something.
            RefusedError: it asked or returned what cannot be.
            Exception: of the engine, and asyncio's at the deadline.
        """
        server = asyncio.create_task(self._serve())
        player = asyncio.create_task(self._play(agent, make_environment), name=self.prompt.record.trajectory_id)
        with watch.over(player, deadline):
            try:
                await asyncio.wait({server, player}, return_when=asyncio.FIRST_COMPLETED)
                if not player.done():
                    _end_of(server)
                return _result_of(player)
            except asyncio.CancelledError:
                if deadline.expired() and player.done():
                    return player.result()  # it knows better why it ended
                raise
            except StalledError as error:  # again, while the first was handled
                raise AgentError(reason_of(error)) from error
            finally:
                if not self._asked:
                    self._opening.leave()
                for task in await dismiss({server, player}):
                    logger.warning(
                        "%s still runs after it was cancelled: it cleans up for long, or catches "
                        "asyncio.CancelledError and goes on. The rollout goes on meanwhile",
                        task.get_name(),
                    )

    async def _serve(self) -> None:
        """Answer observations; ends by an error only."""
        while True:
            observation = check_observation(await self._observations.get(), self._vocabulary)
            if self._actions.qsize() >= MOST_UNREAD:
                raise RefusedError(f"the agent took none of {MOST_UNREAD} answers: take each from act_queue")
            if self._asked:
                outputs = await self._ask(observation)
            else:
                self._asked = True
                outputs = await self._opening.ask(observation)
            self.exchanges.append(_copied(outputs))
            self._actions.put_nowait(outputs)

    async def _ask(self, observation: Observation) -> BundledGenerationOutputs:
        qid, token_ids, gconfig = observation
        started, seed = time.monotonic(), derive(self.prompt.seed, len(self.exchanges))
        completions = await self._generate(token_ids, gconfig, seed)
        seeds = [seed + i for i in range(len(completions))]
        return BundledGenerationOutputs(qid, token_ids, completions, seeds, time.monotonic() - started)

    async def _play(self, agent: Agent, make_environment: Callable[[], Environment]) -> list[Trajectory]:
        """Run the agent. All that it raises is its failure, CancelledError and SystemExit, too, but for signals."""
        task = asyncio.current_task()
        assert task
        try:
            returned = await agent.collect_trajectory(
                _copy_for_agent(self.prompt), make_environment(), self._observations, self._actions
            )
            served = [completion for outputs in self.exchanges for completion in outputs.completions]
            return admit(returned, self.prompt.record, self._vocabulary, served)
        except RefusedError:
            raise
        except BaseException as error:
            ended = isinstance(error, asyncio.CancelledError | GeneratorExit) and task.cancelling()
            if ended or interrupts.raised_by_handler(error):
                raise
            raise AgentError(reason_of(error)) from error


async def dismiss(tasks: set[asyncio.Task[object]]) -> set[asyncio.Task[object]]:
    """Cancel tasks and wait a little for their clean-up; returns those that still run."""
    for task in tasks:
        task.cancel()
    done, left = await asyncio.wait(tasks, timeout=FAREWELL_S)
    for task in done:
        if not task.cancelled():
            task.exception()  # heard of: what ended the episode is told otherwise
    return left


def _result_of(player: asyncio.Task[list[Trajectory]]) -> list[Trajectory]:
    """What the agent returned. One that cancels its own task, or whose helper does, fails like any other."""
    try:
        return player.result()
    except (asyncio.CancelledError, GeneratorExit) as error:
        own = asyncio.current_task()
        if own and own.cancelling():
            raise
        raise AgentError(reason_of(error)) from error


def _copy_for_agent(prompt: EpisodeSpec) -> EpisodeSpec:
    """Whatever an agent changes in it, the gold answers and what its trajectories are compared with stay."""
    problem = replace(prompt.problem, solutions=list(prompt.problem.solutions))
    return replace(prompt, problem=problem, record=replace(prompt.record, solutions=list(prompt.record.solutions)))


def _end_of(server: asyncio.Task[None]) -> None:
    """Raises what ended it."""
    if server.cancelled():
        raise RuntimeError("the engine cancelled a request")
    server.result()


def _copied(outputs: BundledGenerationOutputs) -> BundledGenerationOutputs:
    completions = [
        Completion(list(c.token_ids), list(c.logprobs), list(c.versions), c.finish_reason) for c in outputs.completions
    ]
    return replace(outputs, prompt_ids=list(outputs.prompt_ids), completions=completions)
