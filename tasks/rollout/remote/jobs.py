"""What many workers do together, a rollout or the grading of a data set, and what the flow knows of each of them."""

import asyncio
import heapq
import math
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from storage.version_names import PolicyVersion
from tasks.rollout.plan import RolloutPlan
from tasks.rollout.play import SharedGroups
from tasks.rollout.remote.ledger import Events, Ledger
from tasks.rollout.remote.messages import Failure, GroupOrder, Orders, Report, WorkerFailedError
from tasks.score.scoring import ScoredShard, ShardOrder


class RemoteWorker(Protocol):
    """A `tasks.rollout.remote.worker.Worker` in another process. Its methods raise an error if that process is lost."""

    name: str
    plays: bool
    """False for a worker that only grades."""

    async def give(self, orders: Sequence[Orders]) -> None: ...

    async def report(self) -> Report: ...

    async def score(self, order: ShardOrder) -> ScoredShard | Failure: ...

    def end(self) -> None:
        """End its process, without waiting; it may be lost already."""
        ...


@dataclass(slots=True, eq=False)
class Attended:
    """What the flow knows of a worker."""

    remote: RemoteWorker
    orders: asyncio.Queue[Orders] = field(default_factory=asyncio.Queue)
    """Those that it has not got yet."""
    policy: PolicyVersion | None = None
    asked: float = 0.0
    """When it was last asked to serve another policy, on the monotonic clock."""
    wrote: set[str] = field(default_factory=set)
    """Paths of shards in its cache that are not scored yet."""
    grading: set[asyncio.Task[None]] = field(default_factory=set)
    graded: int = 0
    """Shards."""
    answered: bool = False
    episodes: int = 0
    tokens: int = 0
    heard: float = field(default_factory=time.monotonic)


@dataclass(slots=True)
class Load:
    """What a worker does for a rollout."""

    capacity: int | None = None
    """How many more groups it could begin; None: it has not said so."""
    sent: int = 0
    playing: set[int] = field(default_factory=set)
    """Numbers of the groups that it got and has not finished."""


AT_ONCE = 2
"""Shards that a worker grades at the same time: it reads and uploads one while its verifier grades the other."""
CALLS = 3 + AT_ONCE
"""Calls that a worker's process answers at the same time: orders, a report, its end, and shards to grade."""
SWAP_S = 30.0
"""Groups wait so long for a worker that is loading new weights."""


class SharedRollout:
    """A rollout that is played; only the scheduler's thread uses it, and `ledger_thread` its ledger."""

    def __init__(self, number: int, plan: RolloutPlan, groups: SharedGroups) -> None:
        self.number, self.plan, self.groups = number, plan, groups
        self.loads: dict[Attended, Load] = {}
        self.ledger = Ledger(number, groups)
        self.ledger_thread = ThreadPoolExecutor(1, "ledger")
        self.events: list[Events] = []
        """What is not entered yet, in order."""
        self.entering: asyncio.Task[None] | None = None
        self.stopping = False

    def add(self, worker: Attended) -> None:
        self.loads[worker] = Load()
        worker.orders.put_nowait(Orders(begin={self.number: self.plan}))

    def take(self, worker: Attended, report: Report) -> bool:
        """Note what a worker has reported of this rollout; return whether it has capacity."""
        load = self.loads.get(worker)
        if load is None or self.number not in report.capacities:
            return False
        capacity = report.capacities[self.number]
        load.capacity = max(0, capacity.groups - (load.sent - capacity.got))
        finished = [group for number, group in report.finished if number == self.number]
        stored = [shard for shard in report.stored if shard.rollout == self.number]
        load.playing.difference_update(group.number for group in finished)
        if finished or stored:
            self.events.append(Events(worker, finished, stored))
        return load.capacity > 0

    def lose(self, worker: Attended) -> int:
        """Note that a worker is lost; return how many groups it played."""
        playing = self.loads.pop(worker, Load()).playing
        self.events.append(Events(worker, lost=playing))
        return len(playing)

    def hand_out(self, newest: PolicyVersion | None) -> None:
        """Give groups to the workers that have capacity, one after another to the one that plays least.

        Nobody gets more than a fair share, so that the first one that serves a new policy does not get all groups.
        """
        recently = time.monotonic() - SWAP_S
        free = [
            (len(load.playing), number, worker, load)
            for number, (worker, load) in enumerate(self.loads.items())
            if load.capacity != 0 and worker.policy and (worker.policy == newest or worker.asked > recently)
        ]
        policies = {worker.policy for _, _, worker, _ in free if worker.policy}
        available = max(map(self.groups.available, policies), default=0)
        most = math.ceil((available + sum(playing for playing, *_ in free)) / max(1, len(free)))
        heapq.heapify(free)
        while available and free and free[0][0] < most:
            playing, number, worker, load = heapq.heappop(free)
            if load.capacity and self._give_group(worker, load):
                heapq.heappush(free, (playing + 1, number, worker, load))

    def _give_group(self, worker: Attended, load: Load) -> bool:
        """Give a worker a group; return False if none may begin with its policy."""
        group = self.groups.next(worker.policy) if worker.policy else None
        if group is None or load.capacity is None:
            return False
        plan = group.plan
        order = GroupOrder(group.number, group.problem.problem_id, plan.name, plan.iteration, plan.policy)
        worker.orders.put_nowait(Orders(groups={self.number: [order]}))
        load.playing.add(group.number)
        load.sent += 1
        load.capacity -= 1
        return True

    def summary(self) -> str:
        """Say what the workers do."""
        workers = self.loads.keys()
        playing = sum(len(load.playing) for load in self.loads.values())
        policies = Counter(worker.policy.number if worker.policy else "none yet" for worker in workers)
        serving = ", ".join(f"policy {policy} on {count}" for policy, count in policies.items())
        episodes, tokens = sum(worker.episodes for worker in workers), sum(worker.tokens for worker in workers)
        quiet = min(workers, key=lambda worker: worker.heard)
        return (
            f"{len(workers)} worker(s): {episodes} episodes, {tokens} tokens, {playing} groups playing, {serving}; "
            f"{quiet.remote.name} is the quietest, heard {time.monotonic() - quiet.heard:.0f} s ago"
        )


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

    async def grade(self, worker: Attended) -> None:
        """Let a worker grade shards until none waits, first those that it wrote itself.

        Raises:
            WorkerLostError: the worker is gone.
            WorkerFailedError: it cannot grade.
        """
        while self._waiting:
            path = next((path for path in worker.wrote if path in self._waiting), next(iter(self._waiting)))
            order, result = self._waiting.pop(path), None
            try:
                result = await worker.remote.score(order)
            finally:
                if isinstance(result, ScoredShard):
                    self.scored.append(result)
                    worker.graded += 1
                else:  # the worker is lost or has failed
                    self._waiting[path] = order
                self.changed.set()
            if isinstance(result, Failure):
                raise WorkerFailedError(result)
