"""The first turns of a group, sent as one request if they are short."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import replace

from tasks.inference.api import BundledGenerationOutputs, Completion, GenerationConfig, Observation

Generate = Callable[[list[int], GenerationConfig, int], Awaitable[list[Completion]]]
"""(token ids, gconfig, seed) -> completions"""

LONGEST_TOGETHER = 64
"""Longest completion, in tokens, that shares a request: a request ends with its longest completion."""
MOST_AT_ONCE = 128
"""Most completions in one request. vLLM refuses more than its `--max-num-seqs`, whose smallest default is 128."""
PATIENCE_S = 1.0
"""Longest wait of the first observation for the others: an agent that never asks must not block its group."""

_Pending = tuple[Observation, asyncio.Future[BundledGenerationOutputs]]


class FirstTurnBatcher:
    """A batch of the first observations of a group's episodes; equal observations become one request, or few.

    One request with n short completions is about twice as fast as n requests. Long completions are asked for one by
    one, because the whole group would wait for the longest of them. Agents do not notice it: different or later
    observations become separate requests.

    Args:
        size: episodes in the group.
        seed: completion i of the group is sampled with seed + i.
        generate: sends a request.
    """

    def __init__(self, size: int, seed: int, generate: Generate) -> None:
        self._coming, self._seed, self._generate = size, seed, generate
        self._waiting: list[_Pending] = []
        self._patience: asyncio.TimerHandle | None = None
        self._requests: set[asyncio.Task[None]] = set()

    async def ask(self, observation: Observation) -> BundledGenerationOutputs:
        """Return the answer to an episode's first observation."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[BundledGenerationOutputs] = loop.create_future()
        self._waiting.append((observation, future))
        self._patience = self._patience or loop.call_later(PATIENCE_S, self._send)
        self.leave()
        return await future

    def leave(self) -> None:
        """Stop waiting for one episode: it has asked, or has ended without an observation."""
        self._coming -= 1
        if self._waiting and self._coming <= 0:
            self._send()

    def _send(self) -> None:
        if self._patience:
            self._patience.cancel()
        self._patience, waiting, self._waiting = None, self._waiting, []
        batches: dict[tuple[tuple[int, ...], GenerationConfig], list[_Pending]] = defaultdict(list)
        for pending in waiting:
            _, token_ids, gconfig = pending[0]
            batches[tuple(token_ids), gconfig].append(pending)
        for (prompt_ids, gconfig), batch in batches.items():
            size = max(1, MOST_AT_ONCE // gconfig.n) if gconfig.max_new_tokens <= LONGEST_TOGETHER else 1
            for part in (batch[start : start + size] for start in range(0, len(batch), size)):
                request = asyncio.create_task(self._request(list(prompt_ids), gconfig, self._seed, part))
                self._requests.add(request)  # the event loop holds only weak references to tasks
                self._seed += gconfig.n * len(part)

    async def _request(self, token_ids: list[int], gconfig: GenerationConfig, seed: int, batch: list[_Pending]) -> None:
        started, n = time.monotonic(), gconfig.n
        try:
            completions = await self._generate(token_ids, replace(gconfig, n=n * len(batch)), seed)
            spans = [range(place * n, (place + 1) * n) for place in range(len(batch))]
            answers = [([completions[i] for i in span], [seed + i for i in span]) for span in spans]
        except BaseException as error:  # passed on to every episode that waits
            for _, future in batch:
                if not future.done():
                    future.set_exception(error if isinstance(error, Exception) else asyncio.CancelledError())
            if not isinstance(error, Exception):
                raise
            return
        latency = time.monotonic() - started
        for ((qid, prompt_ids, _), future), (sampled, seeds) in zip(batch, answers, strict=True):
            if not future.done():  # an episode may have reached its deadline meanwhile
                future.set_result(BundledGenerationOutputs(qid, prompt_ids, sampled, seeds, latency))
