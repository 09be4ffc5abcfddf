"""The first turn of a group as one request."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import replace

from tasks.inference.api import BundledGenerationOutputs, Completion, GenerationConfig, Observation

Generate = Callable[[list[int], GenerationConfig, int], Awaitable[list[Completion]]]
"""(token ids, gconfig, seed) -> completions"""

PATIENCE_S = 1.0
"""How long the first observation waits for the others: one agent that never asks shall not hold up its group."""

_Asked = tuple[Observation, asyncio.Future[BundledGenerationOutputs]]


class FirstTurnBatcher:
    """Gathers the first observations of a group's episodes; equal ones become one request with n.

    One request with n completions is about twice as fast as n requests, since the prompt is
    processed once. An agent need not know: episodes that ask something else, or later, are asked apart.

    Args:
        size: episodes in the group.
        seed: completion i of the group is sampled with seed + i.
        generate: sends a request.
    """

    def __init__(self, size: int, seed: int, generate: Generate) -> None:
        self._coming, self._seed, self._generate = size, seed, generate
        self._waiting: list[_Asked] = []
        self._patience: asyncio.TimerHandle | None = None
        self._requests: set[asyncio.Task[None]] = set()

    async def ask(self, observation: Observation) -> BundledGenerationOutputs:
        """The answer to an episode's first observation."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[BundledGenerationOutputs] = loop.create_future()
        self._waiting.append((observation, future))
        self._patience = self._patience or loop.call_later(PATIENCE_S, self._send)
        self.leave()
        return await future

    def leave(self) -> None:
        """An episode asked, or ended without a first observation: the others need not wait for it."""
        self._coming -= 1
        if self._waiting and self._coming <= 0:
            self._send()

    def _send(self) -> None:
        if self._patience:
            self._patience.cancel()
        self._patience, waiting, self._waiting = None, self._waiting, []
        alike: dict[tuple[tuple[int, ...], GenerationConfig], list[_Asked]] = defaultdict(list)
        for asked in waiting:
            _, token_ids, gconfig = asked[0]
            alike[tuple(token_ids), gconfig].append(asked)
        for (shared, gconfig), group in alike.items():
            request = asyncio.create_task(self._request(list(shared), gconfig, self._seed, group))
            self._requests.add(request)  # the loop itself holds tasks only weakly
            self._seed += gconfig.n * len(group)

    async def _request(self, token_ids: list[int], gconfig: GenerationConfig, seed: int, group: list[_Asked]) -> None:
        started, n = time.monotonic(), gconfig.n
        try:
            completions = await self._generate(token_ids, replace(gconfig, n=n * len(group)), seed)
            mine = [range(place * n, (place + 1) * n) for place in range(len(group))]
            outputs = [([completions[i] for i in places], [seed + i for i in places]) for places in mine]
        except BaseException as error:  # handed to every episode that waits
            for _, future in group:
                if not future.done():
                    future.set_exception(error if isinstance(error, Exception) else asyncio.CancelledError())
            if not isinstance(error, Exception):
                raise
            return
        latency = time.monotonic() - started
        for ((qid, prompt_ids, _), future), (found, seeds) in zip(group, outputs, strict=True):
            if not future.done():  # an episode may have met its deadline meanwhile
                future.set_result(BundledGenerationOutputs(qid, prompt_ids, found, seeds, latency))
