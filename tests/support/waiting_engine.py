"""An engine that only waits, as if the rollout ran on another machine."""

import asyncio
import random
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext

from storage.records import Trajectory
from storage.versions.checkpoints import Checkpoint
from tasks.agents.interface import AgentContext, EpisodeEngine, EpisodeSpec
from tasks.agents.math_multi_turn import MathMultiTurnAgent
from tasks.environments.interface import Environment
from tasks.inference.api import Completion, GenerationConfig

IM_END = 2  # its id in the tiny tokenizer
DIGITS = range(20, 30)


class WaitingEngine:
    """Answers every request with digits after some time. It has the interface of `tasks.inference.engine.Engine`.

    Args:
        seconds: duration of a completion, or a function of its seed. A request lasts as long as its longest completion.
        on_request: called at each request with the policy version that is served.
        length: tokens of a completion, the end of its turn included.
    """

    replicas = 1
    closed = False

    def __init__(
        self,
        seconds: float | Callable[[int], float],
        on_request: Callable[[int], None] = lambda _: None,
        length: int = 4,
    ) -> None:
        self.seconds: Callable[[int], float] = seconds if callable(seconds) else lambda _: seconds
        self.on_request, self.length = on_request, length
        self.version, self._served = 0, ""

    def serves(self, version: str) -> bool:
        """See `Engine.serves`."""
        return self._served == version

    def serve(self, policy: Checkpoint) -> None:
        """Serve the policy from the next request on."""
        self.version, self._served = policy.number, policy.version

    def connect(self) -> AbstractAsyncContextManager["WaitingEngine"]:
        return nullcontext(self)

    async def generate(
        self, token_ids: list[int], gconfig: GenerationConfig, seed: int, replica: int
    ) -> list[Completion]:
        """Answer as `tasks.inference.api.Generator` says; a request keeps the version with which it began."""
        version = self.version
        self.on_request(version)
        await asyncio.sleep(max(map(self.seconds, range(seed, seed + gconfig.n))))
        draw, length = random.Random(seed), self.length
        digits = [draw.choices(DIGITS, k=length - 1) for _ in range(gconfig.n)]
        return [Completion([*ids, IM_END], [-2.0] * length, [version] * length, "stop") for ids in digits]


def log_normal(median: float, sigma: float) -> Callable[[int], float]:
    """Return a function from seeds to log-normal numbers."""
    return lambda seed: median * random.Random(seed).lognormvariate(0, sigma)


class TwoToFiveTurns(MathMultiTurnAgent):
    """The agent with 2 to 5 turns, whatever the answers are; the seed of the episode decides."""

    def __init__(self, context: AgentContext) -> None:
        super().__init__(context, stop_on_success=False)

    async def play(self, prompt: EpisodeSpec, env: Environment, engine: EpisodeEngine) -> list[Trajectory]:
        turns = random.Random(prompt.seed).randint(2, 5)
        agent = MathMultiTurnAgent(self.context, num_turns=turns, stop_on_success=False)
        return await agent.play(prompt, env, engine)


def opens(engine: WaitingEngine) -> Callable[[object], object]:
    """Return a replacement of a flow's `open_engine` that yields this engine."""
    return lambda _: nullcontext(engine)
