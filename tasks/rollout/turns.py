"""The turns of a group's episodes: short completions of equal prompts become one request."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from tasks.inference.api import BundledGenerationOutputs, Completion, GenerationConfig, Observation

Generate = Callable[[list[int], GenerationConfig, int], Awaitable[list[Completion]]]
"""(token ids, gconfig, seed) -> completions"""

LONGEST_TOGETHER = 64
"""Longest completion, in tokens, that shares a request: a request ends with its longest completion."""
MOST_AT_ONCE = 128
"""Most completions in one request. vLLM refuses more than its `--max-num-seqs`, whose smallest default is 128."""
PATIENCE_S = 0.2
"""Longest wait of an observation for those of other episodes, which may be slow, or may not have begun."""


class _Pending(NamedTuple):
    observation: Observation
    seed: int
    future: asyncio.Future[BundledGenerationOutputs]


class TurnBatcher:
    """A batch of the observations of a group's episodes; equal observations become one request, or few.

    One request with n short completions is about twice as fast as n requests. The first observations of a group are
    equal, and later ones often are, if answers are short. Observations wait until no episode of the group is between
    two of them. Long completions are asked for at once and one by one, because all would wait for the longest. Agents
    do not notice it.

    Args:
        episodes: episodes in the group.
        generate: sends a request.
    """

    def __init__(self, episodes: int, generate: Generate) -> None:
        self._coming, self._generate = episodes, generate  # episodes that may ask next
        self._waiting: list[_Pending] = []
        self._patience: asyncio.TimerHandle | None = None
        self._requests: set[asyncio.Task[None]] = set()

    async def ask(self, observation: Observation, seed: int) -> BundledGenerationOutputs:
        """Return the answer to an observation.

        The completions have the seeds `seed`, `seed + 1` …, or those after the smallest seed of their request.
        """
        loop = asyncio.get_running_loop()
        pending = _Pending(observation, seed, loop.create_future())
        _, _, gconfig = observation
        if gconfig.max_new_tokens > LONGEST_TOGETHER:
            self._send([pending])
        else:
            self._waiting.append(pending)
            self._patience = self._patience or loop.call_later(PATIENCE_S, self._send_waiting)
        self.leave()
        try:
            return await pending.future
        except asyncio.CancelledError:
            if not pending.future.cancelled():  # the answer is there, so the episode counted as coming again
                self.leave()
            raise

    def end(self, asking: int) -> None:
        """Note that an episode has ended, of which `asking` observations wait for answers that it no longer takes."""
        self._coming += asking
        self.leave()

    def leave(self) -> None:
        """Stop waiting for one episode: it has asked, or has ended."""
        self._coming -= 1
        if self._waiting and self._coming <= 0:
            self._send_waiting()

    def _send_waiting(self) -> None:
        if self._patience:
            self._patience.cancel()
        self._patience, waiting, self._waiting = None, self._waiting, []
        batches: dict[tuple[tuple[int, ...], GenerationConfig], list[_Pending]] = defaultdict(list)
        for pending in sorted(waiting, key=lambda pending: pending.seed):  # whatever the order in which they came
            _, token_ids, gconfig = pending.observation
            if not pending.future.done():  # an episode may have reached its deadline meanwhile
                batches[tuple(token_ids), gconfig].append(pending)
        for (_, gconfig), batch in batches.items():
            size = max(1, MOST_AT_ONCE // gconfig.n)
            for start in range(0, len(batch), size):
                self._send(batch[start : start + size])

    def _send(self, batch: Sequence[_Pending]) -> None:
        request = asyncio.create_task(self._request(batch))
        self._requests.add(request)  # the event loop holds only weak references to tasks
        request.add_done_callback(self._requests.discard)

    async def _request(self, batch: Sequence[_Pending]) -> None:
        _, token_ids, gconfig = batch[0].observation
        started, n, seed = time.monotonic(), gconfig.n, batch[0].seed
        try:
            completions = await self._generate(list(token_ids), replace(gconfig, n=n * len(batch)), seed)
            spans = [range(place * n, (place + 1) * n) for place in range(len(batch))]
            answers = [([completions[i] for i in span], [seed + i for i in span]) for span in spans]
        except BaseException as error:  # passed on to every episode that waits
            for pending in batch:
                if not pending.future.done():
                    pending.future.set_exception(error if isinstance(error, Exception) else asyncio.CancelledError())
            if not isinstance(error, Exception):
                raise
            return
        latency = time.monotonic() - started
        for ((qid, prompt_ids, _), _, future), (sampled, seeds) in zip(batch, answers, strict=True):
            if not future.done():
                self._coming += 1
                future.set_result(BundledGenerationOutputs(qid, prompt_ids, sampled, seeds, latency))
