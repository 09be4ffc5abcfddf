"""The shards of a data set while the workers of a cluster grade them."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence

from tasks.rollout.remote.messages import Failure
from tasks.score.scoring import ScoredShard, ShardOrder

AT_ONCE = 2
"""Shards that a worker grades at the same time: it reads and uploads one while its verifier grades the other."""
CALLS = 3 + AT_ONCE
"""Calls that a worker's process answers at the same time: orders, a report, its end, and shards to grade."""


class ScoringJob:
    """Deals out shards to workers that ask for more; the shard of a worker that is lost goes to another one.

    One event loop uses it.
    """

    def __init__(self, orders: Sequence[ShardOrder]) -> None:
        self.changed = asyncio.Event()
        """Set when a shard is done or waits again."""
        self.scored: list[ScoredShard] = []
        self._waiting = {order.shard.path: order for order in orders}
        self._count = len(orders)

    @property
    def waiting(self) -> bool:
        return bool(self._waiting)

    @property
    def complete(self) -> bool:
        return len(self.scored) == self._count

    async def grade(
        self, wrote: Collection[str], score: Callable[[ShardOrder], Awaitable[ScoredShard | Failure]]
    ) -> Failure | None:
        """Grade shards until none waits, first those that the worker wrote itself; return why the worker cannot.

        Args:
            wrote: paths of the shards in the worker's cache.
            score: asks the worker.
        """
        while self._waiting:
            path = next((path for path in wrote if path in self._waiting), next(iter(self._waiting)))
            order, result = self._waiting.pop(path), None
            try:
                result = await score(order)
            finally:
                if isinstance(result, ScoredShard):
                    self.scored.append(result)
                else:  # the worker is lost or has failed
                    self._waiting[path] = order
                self.changed.set()
            if isinstance(result, Failure):
                return result
        return None
