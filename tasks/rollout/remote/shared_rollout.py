"""A rollout that many workers play, and what the flow knows of each of them."""

import asyncio
import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from storage.version_names import PolicyVersion
from tasks.rollout.groups import SharedGroups
from tasks.rollout.plan import RolloutPlan
from tasks.rollout.remote.books import Books, News
from tasks.rollout.remote.messages import Failure, GroupOrder, Orders, Report
from tasks.score.scoring import ScoredShard, ShardOrder


class RemoteWorker(Protocol):
    """A `tasks.rollout.remote.worker.Worker` in another process. Its methods raise an error if that process is lost."""

    name: str
    plays: bool
    """False for a worker that only grades."""

    async def give(self, orders: Orders) -> None: ...

    async def report(self) -> Report: ...

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
    grades: bool = True
    """False after an error of its host while it graded."""
    answered: bool = False
    episodes: int = 0
    tokens: int = 0
    heard: float = field(default_factory=time.monotonic)

    def order(self, orders: Orders) -> None:
        """Send orders as soon as possible, after earlier ones."""
        if self.orders:
            self.orders.add(orders)
        else:
            self.orders = orders
        self.has_orders.set()


@dataclass(slots=True)
class Share:
    """A worker's part in a rollout."""

    reported: bool = False
    """Whether it has said how much room it has."""
    room: int = 0
    sent: int = 0
    playing: set[int] = field(default_factory=set)
    """Numbers of the groups that it got and has not finished."""


SWAP_S = 30.0
"""Groups wait so long for a worker that is loading new weights."""


class SharedRollout:
    """A rollout that is played; only the hand-out's thread uses it, and the clerk its books."""

    def __init__(self, number: int, plan: RolloutPlan, groups: SharedGroups) -> None:
        self.number, self.plan, self.groups = number, plan, groups
        self.shares: dict[Attended, Share] = {}
        self.clerk = ThreadPoolExecutor(1, "clerk")
        self.books: Books[Attended] = Books(number, groups)
        self.news: list[News[Attended]] = []
        """What is not booked yet, in order."""
        self.booking: asyncio.Task[None] | None = None
        self.stopping = False

    def add(self, worker: Attended) -> None:
        self.shares[worker] = Share()
        worker.order(Orders(begin={self.number: self.plan}))

    def take(self, worker: Attended, report: Report) -> None:
        """Note what a worker has reported of this rollout."""
        share = self.shares.get(worker)
        if share is None or self.number not in report.rooms:
            return
        share.reported, room = True, report.rooms[self.number]
        share.room = room.groups - (share.sent - room.got)
        finished = [group for number, group in report.finished if number == self.number]
        stored = [shard for shard in report.stored if shard.rollout == self.number]
        share.playing.difference_update(group.number for group in finished)
        if finished or stored:
            self.news.append(News(worker, finished, stored))

    def lose(self, worker: Attended) -> int:
        """Note that a worker is lost; return how many groups it played."""
        share = self.shares.pop(worker, Share())
        self.news.append(News(worker, lost=share.playing))
        return len(share.playing)

    def hand_out(self, newest: PolicyVersion | None) -> None:
        """Give groups to the workers that have room, one to each in turn, first to those that play least.

        Nobody gets more than a fair part, so that the first one that serves a new policy does not get all groups.
        """
        recently = time.monotonic() - SWAP_S
        free = [
            (worker, share)
            for worker, share in self.shares.items()
            if (share.room > 0 or not share.reported)
            and worker.policy
            and (worker.policy == newest or worker.asked > recently)
        ]
        free.sort(key=lambda each: len(each[1].playing))
        available = max((self.groups.available(worker.policy) for worker, _ in free if worker.policy), default=0)
        playing = sum(len(share.playing) for _, share in free)
        most = math.ceil((available + playing) / max(1, len(free)))
        while free:
            free = [(worker, share) for worker, share in free if self._give_group(worker, share, most)]

    def _give_group(self, worker: Attended, share: Share, most: int) -> bool:
        """Give a worker a group, if it plays fewer than `most` and one may begin; return whether it may get more."""
        if share.room <= 0 or len(share.playing) >= most:
            return False
        start = self.groups.next(worker.policy) if worker.policy else None
        if start is None:
            return False
        plan, orders = start.plan, Orders()
        order = GroupOrder(start.number, start.problem.problem_id, plan.name, plan.iteration, plan.policy)
        orders.groups[self.number].append(order)
        worker.order(orders)
        share.playing.add(start.number)
        share.sent += 1
        share.room -= 1
        return share.room > 0
