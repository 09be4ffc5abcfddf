"""The first turn of a group as one request."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import replace

from tasks.inference.api import BundledGenerationOutputs, Completion, GenerationConfig, Observation

Generate = Callable[[list[int], GenerationConfig, int], Awaitable[list[Completion]]]
"""(token ids, gconfig, seed) -> completions"""


class Opening:
    """Gathers the first observations of a group's episodes; equal ones become one request with n.

    One request with n completions is about twice as fast as n requests, since the prompt is
    processed once. An agent need not know: episodes that ask something else are asked apart.

    Args:
        size: episodes in the group.
        seed: completion i of a shared request is sampled with seed + i.
        generate: sends a request.
    """

    def __init__(self, size: int, seed: int, generate: Generate) -> None:
        self._expected, self._seed, self._generate = size, seed, generate
        self._waiting: list[tuple[Observation, asyncio.Future[BundledGenerationOutputs]]] = []
        self._requests: set[asyncio.Task[None]] = set()

    async def ask(self, observation: Observation) -> BundledGenerationOutputs:
        """The answer to an episode's first observation."""
        future: asyncio.Future[BundledGenerationOutputs] = asyncio.get_running_loop().create_future()
        self._waiting.append((observation, future))
        self._send_if_complete()
        return await future

    def leave(self) -> None:
        """An episode ended without a first observation: the others need not wait for it."""
        self._expected -= 1
        self._send_if_complete()

    def _send_if_complete(self) -> None:
        if not self._waiting or len(self._waiting) < self._expected:
            return
        alike: dict[tuple[tuple[int, ...], GenerationConfig], list[int]] = defaultdict(list)
        for index, ((_, token_ids, gconfig), _) in enumerate(self._waiting):
            alike[tuple(token_ids), gconfig].append(index)
        for (shared, gconfig), indices in alike.items():
            request = asyncio.create_task(self._request(list(shared), gconfig, indices))
            self._requests.add(request)  # the loop itself holds tasks only weakly

    async def _request(self, token_ids: list[int], gconfig: GenerationConfig, indices: list[int]) -> None:
        started = time.monotonic()
        n, seed = gconfig.n, self._seed + indices[0] * gconfig.n
        together = replace(gconfig, n=n * len(indices))
        futures = [self._waiting[index][1] for index in indices]
        try:
            completions = await self._generate(token_ids, together, seed)
        except Exception as error:  # noqa: BLE001 - handed to every episode that waits
            for future in futures:
                if not future.done():
                    future.set_exception(error)
            return
        latency = time.monotonic() - started
        for place, (index, future) in enumerate(zip(indices, futures, strict=True)):
            qid, prompt_ids, _ = self._waiting[index][0]
            mine = range(place * n, (place + 1) * n)
            outputs = [completions[i] for i in mine]
            if not future.done():  # an episode may have met its deadline meanwhile
                future.set_result(BundledGenerationOutputs(qid, prompt_ids, outputs, [seed + i for i in mine], latency))
