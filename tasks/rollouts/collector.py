"""Plays episodes against an engine: many at a time, each under a deadline, none lost without a record."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace

from configs.schema import Rollout
from storage.records import Status, Trajectory
from tasks.agents.chat import Chat
from tasks.agents.episode import Episode
from tasks.agents.interface import Agent, Prompt
from tasks.environments.interface import Environment
from tasks.inference.api import (
    BundledGenerationOutputs,
    Completion,
    ContextLengthError,
    GenerationConfig,
    Generator,
    InferenceError,
    Observation,
)
from tasks.rollouts.opening import Generate, Opening
from tasks.rollouts.plan import Group
from tasks.seeds import derive

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Collector:
    """Everything that episodes need.

    An `InferenceError` (the engine refuses, or serves another version) ends the rollout; any other
    error of an episode is kept as a failed trajectory with its reason.
    """

    generator: Generator
    agent: Agent
    make_environment: Callable[[], Environment]
    chat: Chat
    settings: Rollout

    async def collect(self, groups: Iterable[Group], group_size: int, sink: Callable[[list[Trajectory]], None]) -> None:
        """Play all groups, `concurrency` episodes at a time; each finished group goes to `sink` (in a thread)."""
        pending = iter(groups)
        loads = [0] * self.generator.replicas
        writing = asyncio.Lock()

        async def play_groups() -> None:
            for group in pending:  # shared by all workers: each takes the next
                replica = loads.index(min(loads))
                loads[replica] += 1
                trajectories = await self._play(group, replica)
                loads[replica] -= 1
                async with writing:
                    await asyncio.to_thread(sink, trajectories)

        try:
            async with asyncio.TaskGroup() as workers:
                for _ in range(max(1, self.settings.concurrency // group_size)):
                    workers.create_task(play_groups())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _play(self, group: Group, replica: int) -> list[Trajectory]:
        """All episodes of a group, on one replica for its prefix cache."""

        def generate(token_ids: list[int], gconfig: GenerationConfig, seed: int) -> Awaitable[list[Completion]]:
            # Of every agent: vLLM by itself knows the model's end of text only.
            ends = (*gconfig.stop_token_ids, *self.chat.stop_token_ids)
            return self.generator.generate(token_ids, replace(gconfig, stop_token_ids=ends), seed, replica)

        opening = Opening(len(group.prompts), group.seed, generate)
        try:
            async with asyncio.TaskGroup() as episodes:
                tasks = [episodes.create_task(self._episode(prompt, opening, generate)) for prompt in group.prompts]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [trajectory for task in tasks for trajectory in task.result()]

    async def _episode(self, prompt: Prompt, opening: Opening, generate: Generate) -> list[Trajectory]:
        """One episode's trajectories, or the record of why there is none."""
        exchanges: list[BundledGenerationOutputs] = []
        started_at, started = time.time(), time.monotonic()
        try:
            async with asyncio.timeout(self.settings.episode_deadline_s) as deadline:
                trajectories = await self._converse(prompt, opening, generate, exchanges)
            if not trajectories:
                trajectories = [self._salvage(prompt, exchanges, "rejected", "the agent returned no trajectory")]
        except InferenceError:
            raise
        except ContextLengthError as error:
            status: Status = "truncated" if exchanges else "failed"
            trajectories = [self._salvage(prompt, exchanges, status, str(error))]
        except Exception as error:
            logger.debug("episode %s failed", prompt.record.trajectory_id, exc_info=True)
            late = isinstance(error, TimeoutError) and deadline.expired()
            reason = (
                f"deadline of {self.settings.episode_deadline_s:g} s" if late else f"{type(error).__name__}: {error}"
            )
            trajectories = [self._salvage(prompt, exchanges, "failed", reason)]
        return _stamp(trajectories, started_at, time.monotonic() - started)

    async def _converse(
        self, prompt: Prompt, opening: Opening, generate: Generate, exchanges: list[BundledGenerationOutputs]
    ) -> list[Trajectory]:
        """Run the agent and answer its observations, which are noted in `exchanges`."""
        observations: asyncio.Queue[Observation] = asyncio.Queue()
        actions: asyncio.Queue[BundledGenerationOutputs] = asyncio.Queue()
        asked = False

        async def serve() -> None:
            nonlocal asked
            while True:
                observation = await observations.get()
                if asked:
                    outputs = await _ask(observation, derive(prompt.seed, len(exchanges)), generate)
                else:
                    asked = True
                    outputs = await opening.ask(observation)
                exchanges.append(outputs)
                actions.put_nowait(outputs)

        server = asyncio.create_task(serve())
        player = asyncio.create_task(self._act(prompt, observations, actions))
        try:
            await asyncio.wait({server, player}, return_when=asyncio.FIRST_COMPLETED)
            if not player.done():
                server.result()  # it ends by an error only
            return await player
        finally:
            if not asked:
                opening.leave()
            server.cancel()
            player.cancel()
            await asyncio.gather(server, player, return_exceptions=True)

    async def _act(
        self,
        prompt: Prompt,
        observations: "asyncio.Queue[Observation]",
        actions: "asyncio.Queue[BundledGenerationOutputs]",
    ) -> list[Trajectory]:
        """The agent, in an environment made for it; an exit of theirs would end the event loop, and so the flow."""
        try:
            return await self.agent.collect_trajectory(prompt, self.make_environment(), observations, actions)
        except SystemExit as error:
            raise RuntimeError(f"the agent or its environment called sys.exit({error.code})") from error

    def _salvage(
        self, prompt: Prompt, exchanges: list[BundledGenerationOutputs], status: Status, reason: str
    ) -> Trajectory:
        """A record of what was sampled before an episode ended without the agent's own."""
        episode = Episode(prompt, exchanges[0].prompt_ids if exchanges else [])
        for outputs in exchanges:
            held = episode.prompt_ids
            if outputs.prompt_ids[: len(held)] != held:
                episode.start_sequence("", outputs.prompt_ids)
            elif len(outputs.prompt_ids) > len(held):
                episode.add_feedback("", outputs.prompt_ids[len(held) :])
            episode.add_completion(outputs, self.chat.decode(outputs.output_ids[0]))
        return episode.trajectory(status=status, reason=reason)


async def _ask(observation: Observation, seed: int, generate: Generate) -> BundledGenerationOutputs:
    qid, token_ids, gconfig = observation
    started = time.monotonic()
    completions = await generate(token_ids, gconfig, seed)
    seeds = [seed + i for i in range(len(completions))]
    return BundledGenerationOutputs(qid, token_ids, completions, seeds, time.monotonic() - started)


def _stamp(trajectories: list[Trajectory], started_at: float, latency_s: float) -> list[Trajectory]:
    """Times, and an id for each where an agent returned several."""
    return [
        replace(
            trajectory,
            trajectory_id=f"{trajectory.trajectory_id}/{i}" if i else trajectory.trajectory_id,
            started_at=started_at,
            latency_s=latency_s,
        )
        for i, trajectory in enumerate(trajectories)
    ]
