"""An agent without verdicts, to measure the engine or to replace an agent in a test."""

import asyncio

from storage.records import Trajectory
from tasks.agents.episode import Episode
from tasks.agents.interface import AgentContext, EpisodeSpec
from tasks.environments.interface import Environment
from tasks.inference.api import BundledGenerationOutputs, Observation
from tasks.problems.messages import first_messages


class NullAgent:
    """An agent that requests one completion of the bare problem and never steps the environment."""

    def __init__(self, context: AgentContext) -> None:
        self.context = context

    async def collect_trajectory(
        self,
        prompt: EpisodeSpec,
        env: Environment,
        obs_queue: "asyncio.Queue[Observation]",
        act_queue: "asyncio.Queue[BundledGenerationOutputs]",
    ) -> list[Trajectory]:
        chat = self.context.chat
        episode = Episode(prompt, chat.prompt(first_messages(prompt.problem, prompt.problem.prompt)))
        await obs_queue.put((prompt.qid, episode.prompt_ids, self.context.gconfig))
        outputs = await act_queue.get()
        episode.add_completion(outputs, chat.decode(outputs.output_ids[0]))
        return [episode.trajectory()]
