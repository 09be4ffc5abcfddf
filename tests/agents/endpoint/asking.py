"""Episodes of an agent that does what a test says with the given client, for an engine that a test scripts."""

from collections.abc import Awaitable, Callable, Sequence
from itertools import chain, repeat
from typing import Any

from configs.rollout import Rollout
from storage.records import Trajectory
from tasks.agents.chat import Chat
from tasks.agents.endpoint.agent import AgentTask, EndpointAgent
from tasks.agents.endpoint.completions import Completions
from tasks.agents.endpoint.protocol import ResponseFormats
from tasks.agents.openai_agent import open_client
from tasks.environments.math_verify import MathVerifyEnvironment
from tasks.score.verifier import Verifier
from tests.agents.endpoint.solvers import question as question
from tests.support.rollout_helpers import RIGHT as RIGHT
from tests.support.rollout_helpers import WRONG as WRONG
from tests.support.rollout_helpers import ScriptedEngine, context, play

Ask = Callable[[AgentTask, Any], Awaitable[object]]


class Asking(EndpointAgent):
    """An agent that is a function of a test."""

    def __init__(self, chat: Chat, ask: Ask, response_format: ResponseFormats = "refuse") -> None:
        super().__init__(context(chat, 4000), max_requests=100, response_format=response_format)
        self._ask = ask

    async def solve(self, task: AgentTask, completions: Completions) -> object:
        async with open_client(completions, task.base_url, task.api_key) as client:
            return await self._ask(task, client)


def asked(
    chat: Chat,
    verifier: Verifier,
    ask: Ask,
    says: Sequence[str] = (RIGHT,),
    delays: Sequence[float] = (0.0,),
    environment: Any = MathVerifyEnvironment,
    episodes: int = 1,
) -> list[Trajectory]:
    """Play episodes; return their rows.

    The engine's n-th completion is `says[n]`, and its n-th request takes `delays[n]` seconds. The last ones repeat.
    """
    replies = chain(says, repeat(says[-1]))
    engine = ScriptedEngine(chat, lambda *_: next(replies), delays=chain(delays, repeat(delays[-1])))
    settings = Rollout(episode_deadline_s=60)
    return play(engine, Asking(chat, ask), verifier, None, episodes, settings, environment)
