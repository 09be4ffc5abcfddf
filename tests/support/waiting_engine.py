"""An engine that only waits, as if the rollout ran on another machine."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from storage.versions.checkpoints import Checkpoint
from tasks.inference.api import Completion, GenerationConfig

IM_END = 2  # its id in the tiny tokenizer
DIGITS = range(20, 30)
LENGTH = 4


class WaitingEngine:
    """Answers every request with digits after some time. It has the interface of `tasks.inference.engine.Engine`.

    Args:
        seconds: duration of a completion, or a function of its seed. A request lasts as long as its longest completion.
        on_request: called at each request with the policy version that is served.
    """

    replicas = 1
    closed = False

    def __init__(
        self, seconds: float | Callable[[int], float], on_request: Callable[[int], None] = lambda _: None
    ) -> None:
        self.seconds: Callable[[int], float] = seconds if callable(seconds) else lambda _: seconds
        self.on_request = on_request
        self.version = 0

    def serve(self, policy: Checkpoint, *, or_newer: bool = False) -> None:
        """Serve the policy from the next request on."""
        self.version = max(self.version, policy.number) if or_newer else policy.number

    @asynccontextmanager
    async def connect(self) -> AsyncIterator["WaitingEngine"]:
        yield self

    async def generate(
        self, token_ids: list[int], gconfig: GenerationConfig, seed: int, replica: int
    ) -> list[Completion]:
        """Answer as `tasks.inference.api.Generator` says; a request keeps the version with which it began."""
        version = self.version
        self.on_request(version)
        await asyncio.sleep(max(map(self.seconds, range(seed, seed + gconfig.n))))
        draw = random.Random(seed)
        return [
            Completion([*draw.choices(DIGITS, k=LENGTH - 1), IM_END], [-2.0] * LENGTH, [version] * LENGTH, "stop")
            for _ in range(gconfig.n)
        ]


def opens(engine: WaitingEngine) -> Callable[[object], object]:
    """Return a replacement of a flow's `open_engine` that yields this engine."""

    @contextmanager
    def open_engine(_: object) -> Iterator[WaitingEngine]:
        yield engine

    return open_engine
