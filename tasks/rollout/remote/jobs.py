"""What many workers do together, a rollout or the grading of a data set, and what the flow knows of each of them."""

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from storage.version_names import PolicyVersion
from tasks.rollout.outcomes import FinishedGroup
from tasks.rollout.plan import RolloutPlan
from tasks.rollout.play import OpenDataSet, SharedGroups
from tasks.rollout.remote import messages
from tasks.score.scoring import ScoredShard, ShardOrder


class RemoteWorker(Protocol):
    """A `tasks.rollout.remote.worker.Worker` in another process. Its methods raise an error if that process is lost."""

    name: str
    plays: bool
    """False for a worker that only grades."""

    async def give(self, orders: Sequence[messages.Orders]) -> None: ...

    async def report(self) -> messages.Report: ...

    async def score(self, order: ShardOrder) -> ScoredShard | messages.Failure: ...

    def end(self) -> None:
        """End its process, without waiting; it may be lost already."""


@dataclass(slots=True, eq=False)
class Attended:
    """What the flow knows of a worker."""

    remote: RemoteWorker
    orders: asyncio.Queue[messages.Orders] = field(default_factory=asyncio.Queue)
    """Orders that it has not got yet."""
    policy: PolicyVersion | None = None
    asked: float = 0.0
    """When it was last asked to serve another policy, on the monotonic clock."""
    wrote: set[str] = field(default_factory=set)
    """Paths of the shards that it has stored and that are not scored yet."""
    grading: set[asyncio.Task[None]] = field(default_factory=set)
    answered: bool = False
    useful: bool = False
    """Whether it has finished an episode or graded a shard."""


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
CALLS = 4 + AT_ONCE
"""Calls that a worker's process answers at the same time: orders, a report, metrics, its end, and shards to grade."""
SWAP_S = 30.0
"""Groups wait so long for a worker that is loading new weights."""


class Events(NamedTuple):
    """The events that a worker has reported. If it is lost, `lost` has the numbers of the groups that it played."""

    worker: Attended
    finished: Sequence[FinishedGroup] = ()
    stored: Sequence[messages.StoredShard] = ()
    lost: set[int] | None = None


class SharedRollout:
    """A rollout that is played. Only the scheduler's thread uses it, and `ledger_thread`, which calls `enter`."""

    def __init__(self, number: int, plan: RolloutPlan, groups: SharedGroups) -> None:
        self.number, self.plan, self.groups = number, plan, groups
        self.loads: dict[Attended, Load] = {}
        self.ledger_thread = ThreadPoolExecutor(1, "ledger")
        self.events: list[Events] = []
        """Events that are not entered yet, in order."""
        self.entering: asyncio.Task[None] | None = None
        self.stopping = False
        self._holders: dict[OpenDataSet, dict[Attended, set[int]]] = {}
        """The ledger: the finished groups with a number, by the workers that hold them."""
        self._flushing: set[tuple[OpenDataSet, Attended]] = set()
        """Workers that were told to flush, and got nothing more to store since."""

    def enter(self, events: Sequence[Events]) -> dict[Attended, messages.Orders]:
        """Enter what workers have reported, commit what is complete, and return the orders that follow."""
        orders: dict[Attended, messages.Orders] = defaultdict(messages.Orders)
        shards: dict[OpenDataSet, list[messages.StoredShard]] = defaultdict(list)
        for worker, groups, uploads, lost in events:
            if lost is not None:
                self._lose_groups(worker, lost)
            for finished in groups:
                data_set = self.groups.enter(finished, pending=True)
                self._holders.setdefault(data_set, {}).setdefault(worker, set()).add(finished.number)
                self._flushing.discard((data_set, worker))
                orders[worker].store.append(messages.StoreOrder(self.number, finished.number, _destination(data_set)))
            for shard in uploads:
                path = shard.file.path
                data_set = next(held for held in self._holders if path.startswith(f"{held.draft.version}/"))
                self._holders[data_set][worker].difference_update(shard.numbers)
                shards[data_set].append(shard)
        for data_set, stored in shards.items():
            data_set.accept([(shard.file, shard.numbers) for shard in stored])
            if not any(self._holders[data_set].values()):
                del self._holders[data_set]
        self.groups.settle()
        for data_set in self.groups.unstored():
            for worker, numbers in self._holders.get(data_set, {}).items():
                if numbers and (data_set, worker) not in self._flushing:
                    self._flushing.add((data_set, worker))
                    orders[worker].flush.append(_destination(data_set))
        return orders

    def _lose_groups(self, worker: Attended, playing: set[int]) -> None:
        held = [holders.pop(worker, set()) for holders in self._holders.values()]
        for number in sorted(playing.union(*held)):
            self.groups.lose(number)

    def add(self, worker: Attended) -> None:
        self.loads[worker] = Load()
        worker.orders.put_nowait(messages.Orders(begin={self.number: self.plan}))

    def take(self, worker: Attended, report: messages.Report) -> bool:
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
            (worker, load)
            for worker, load in self.loads.items()
            if load.capacity != 0 and worker.policy and (worker.policy == newest or worker.asked > recently)
        ]
        policies = {worker.policy for worker, _ in free if worker.policy}
        available = max(map(self.groups.available, policies), default=0)
        most = math.ceil((available + sum(len(load.playing) for _, load in free)) / max(1, len(free)))
        while available and free:
            worker, load = least = min(free, key=lambda each: len(each[1].playing))
            if len(load.playing) >= most:
                break
            if not (load.capacity and self._give_group(worker, load)):
                free.remove(least)

    def _give_group(self, worker: Attended, load: Load) -> bool:
        """Give a worker a group; return False if none may begin with its policy."""
        group = self.groups.next(worker.policy) if worker.policy else None
        if group is None or load.capacity is None:
            return False
        plan = group.plan
        order = messages.GroupOrder(group.number, group.problem.problem_id, plan.name, plan.iteration, plan.policy)
        worker.orders.put_nowait(messages.Orders(groups={self.number: [order]}))
        load.playing.add(group.number)
        load.sent += 1
        load.capacity -= 1
        return True


def _destination(data_set: OpenDataSet) -> messages.Destination:
    draft = data_set.draft
    return messages.Destination(draft.version, draft.kind, data_set.iteration)


@dataclass(slots=True)
class ScoringJob:
    """The shards that are dealt out to workers that ask for more. One event loop uses it."""

    waiting: dict[str, ShardOrder]
    """The orders that no worker carries out yet, by path of the trajectories."""
    scored: list[ScoredShard] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a shard is done or waits again."""
