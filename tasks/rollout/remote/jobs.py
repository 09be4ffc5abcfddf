"""What many workers do together, a rollout or the grading of a data set, and what the flow knows of each of them."""

import asyncio
import heapq
import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
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

    async def give(self, orders: Orders) -> None: ...

    async def report(self, patience_s: float) -> Report: ...

    async def score(self, order: ShardOrder) -> ScoredShard | Failure: ...

    def end(self) -> None:
        """End its process, without waiting; it may be lost already."""
        ...


@dataclass(slots=True, eq=False)
class Attended:
    """What the flow knows of a worker."""

    remote: RemoteWorker
    orders: Orders | None = None
    """Those that it has not got yet."""
    has_orders: asyncio.Event = field(default_factory=asyncio.Event)
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

    def order(self, orders: Orders, within_s: float = 0.0) -> None:
        """Send orders after earlier ones: as soon as possible, or together with later ones, but within some seconds."""
        if self.orders:
            self.orders.add(orders)
        else:
            self.orders = orders
        if within_s:
            asyncio.get_running_loop().call_later(within_s, self.has_orders.set)
        else:
            self.has_orders.set()


@dataclass(slots=True)
class Part:
    """A worker's part in a rollout."""

    capacity: int = 0
    sent: int = 0
    playing: set[int] = field(default_factory=set)
    """Numbers of the groups that it got and has not finished."""


AT_ONCE = 2
"""Shards that a worker grades at the same time: it reads and uploads one while its verifier grades the other."""
CALLS = 3 + AT_ONCE
"""Calls that a worker's process answers at the same time: orders, a report, its end, and shards to grade."""
_APART = 16
"""The log has a line for each of so many workers; more are summed up in one line."""
SWAP_S = 30.0
"""Groups wait so long for a worker that is loading new weights."""


class SharedRollout:
    """A rollout that is played; only the scheduler's thread uses it, and `ledger_thread` its ledger."""

    def __init__(self, number: int, plan: RolloutPlan, groups: SharedGroups) -> None:
        self.number, self.plan, self.groups = number, plan, groups
        self.parts: dict[Attended, Part] = {}
        self._free: dict[Attended, Part] = {}
        """Those that have capacity, or have not said how much."""
        self.ledger = Ledger(number, groups)
        self.ledger_thread = ThreadPoolExecutor(1, "ledger")
        self.events: list[Events] = []
        """What is not entered yet, in order."""
        self.entering: asyncio.Task[None] | None = None
        self.stopping = False

    def add(self, worker: Attended) -> None:
        self.parts[worker] = self._free[worker] = Part()
        worker.order(Orders(begin={self.number: self.plan}))

    def take(self, worker: Attended, report: Report) -> bool:
        """Note what a worker has reported of this rollout; return whether it has capacity."""
        part = self.parts.get(worker)
        if part is None or self.number not in report.capacities:
            return False
        capacity = report.capacities[self.number]
        part.capacity = capacity.groups - (part.sent - capacity.got)
        finished = [group for number, group in report.finished if number == self.number]
        stored = [shard for shard in report.stored if shard.rollout == self.number]
        part.playing.difference_update(group.number for group in finished)
        if finished or stored:
            self.events.append(Events(worker, finished, stored))
        if part.capacity > 0:
            self._free[worker] = part
        else:
            self._free.pop(worker, None)
        return part.capacity > 0

    def lose(self, worker: Attended) -> int:
        """Note that a worker is lost; return how many groups it played."""
        part = self.parts.pop(worker, Part())
        self._free.pop(worker, None)
        self.events.append(Events(worker, lost=part.playing))
        return len(part.playing)

    def hand_out(self, newest: PolicyVersion | None) -> None:
        """Give groups to the workers that have capacity, one after another to the one that plays least.

        Nobody gets more than a fair share, so that the first one that serves a new policy does not get all groups.
        """
        policies = {worker.policy for worker in self._free if worker.policy}
        available = {policy: count for policy in policies if (count := self.groups.available(policy))}
        if not available:
            return
        recently = time.monotonic() - SWAP_S
        free = [
            (len(part.playing), number, worker, part)
            for number, (worker, part) in enumerate(self._free.items())
            if worker.policy and (worker.policy == newest or worker.asked > recently)
        ]
        most = math.ceil((max(available.values()) + sum(playing for playing, *_ in free)) / max(1, len(free)))
        queue = [each for each in free if each[3].capacity > 0]
        heapq.heapify(queue)
        while queue and available and queue[0][0] < most:
            playing, number, worker, part = queue[0]
            policy = worker.policy
            if policy in available and not self._give_group(worker, part):
                del available[policy]  # none may begin, though they seemed to be available
            if policy in available and part.capacity > 0:
                heapq.heapreplace(queue, (playing + 1, number, worker, part))
            else:
                heapq.heappop(queue)

    def _give_group(self, worker: Attended, part: Part) -> bool:
        """Give a worker a group; return False if none may begin with its policy."""
        start = self.groups.next(worker.policy) if worker.policy else None
        if start is None:
            return False
        plan, orders = start.plan, Orders()
        order = GroupOrder(start.number, start.problem.problem_id, plan.name, plan.iteration, plan.policy)
        orders.groups[self.number].append(order)
        worker.order(orders)
        part.playing.add(start.number)
        part.sent += 1
        part.capacity -= 1
        if part.capacity <= 0:
            del self._free[worker]
        return True

    def log_lines(self) -> list[str]:
        """Say what each worker does, or what all do together if they are many."""
        if len(self.parts) > _APART:
            return [self._summary()]
        return [_line(worker, len(part.playing)) for worker, part in self.parts.items()]

    def _summary(self) -> str:
        workers = self.parts.keys()
        playing = sum(len(part.playing) for part in self.parts.values())
        policies = Counter(worker.policy.number if worker.policy else "none yet" for worker in workers)
        serving = ", ".join(f"policy {policy} on {count}" for policy, count in policies.items())
        quiet = min(workers, key=lambda worker: worker.heard)
        return (
            f"{len(workers)} workers: {_done(workers)}, {playing} groups playing, {serving}; "
            f"{quiet.remote.name} is the quietest, {_heard(quiet)}"
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


def _line(worker: Attended, playing: int) -> str:
    policy = worker.policy.number if worker.policy else "none yet"
    return f"{worker.remote.name}: {_done([worker])}, {playing} groups playing, policy {policy}, {_heard(worker)}"


def _done(workers: Iterable[Attended]) -> str:
    counts = [(worker.episodes, worker.tokens) for worker in workers]
    return f"{sum(episodes for episodes, _ in counts)} episodes, {sum(tokens for _, tokens in counts)} tokens"


def _heard(worker: Attended) -> str:
    return f"heard {time.monotonic() - worker.heard:.0f} s ago"
