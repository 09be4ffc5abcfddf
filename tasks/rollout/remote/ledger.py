"""A rollout that many workers play: which groups each of them has, and which shards they are to store."""

import asyncio
import math
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

from storage.version_names import PolicyVersion
from storage.versions.manifests import File
from tasks.rollout.outcomes import FinishedGroup
from tasks.rollout.plan import RolloutPlan
from tasks.rollout.play import OpenDataSet, SharedGroups
from tasks.rollout.remote.interface import RemoteWorker
from tasks.rollout.remote.worker import GroupOrder

SWAP_S = 30.0
"""Groups wait so long for a worker that is loading new weights."""


@dataclass(slots=True, eq=False)
class Attended:
    """The flow's knowledge of a worker."""

    remote: RemoteWorker
    ready: bool = False
    """True once it has answered the first call."""
    policy: PolicyVersion | None = None
    """The policy that it serves; None: nothing yet."""
    asked: float = 0.0
    """The time on the monotonic clock at which it was last asked to serve another policy."""
    renewed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set then."""
    wrote: set[str] = field(default_factory=set)
    """Paths of the shards that it has stored and that are not scored yet."""
    useful: bool = False
    """True once it has finished a group or graded a shard."""


@dataclass(slots=True)
class Load:
    """A worker's part in a rollout."""

    sent: int = 0
    """The number of groups that it got."""
    lacking: int = -1
    """`sent` as the worker knew it when it last could begin one more group; -1: it has not begun the rollout."""
    playing: set[int] = field(default_factory=set)
    """Numbers of the groups that it got and has not finished."""
    unsafe: set[int] = field(default_factory=set)
    """Numbers of the groups that are lost with it: those that it plays, and those that are in no journal yet."""


class StoreOrder(NamedTuple):
    """A shard that a worker is to store: finished groups of one data set."""

    worker: Attended
    data_set: OpenDataSet
    numbers: list[int]


class SharedRollout:
    """A rollout that is played. Only the scheduler's thread uses it, and `thread`, which enters what is finished."""

    def __init__(self, number: int, plan: RolloutPlan, groups: SharedGroups) -> None:
        self.number, self.plan, self.groups = number, plan, groups
        self.loads: dict[Attended, Load] = {}
        self.thread = ThreadPoolExecutor(1, "ledger")
        self.stopping = False
        self.over = False
        self.stored: deque[tuple[StoreOrder, File]] = deque()
        """Uploaded shards that are not entered yet."""
        self._at_once = max(1, plan.config.rollout.concurrency // plan.group_size)
        self._waiting: dict[tuple[OpenDataSet, Attended], list[FinishedGroup]] = defaultdict(list)
        """Finished groups that nobody was told to store, by data set and worker."""

    def finish(self, worker: Attended, finished: FinishedGroup) -> list[StoreOrder]:
        """Enter a finished group; return the shards to store now."""
        data_set = self.groups.enter(finished, pending=True)
        waiting = self._waiting[data_set, worker]
        waiting.append(finished)
        is_full = sum(group.episodes for group in waiting) >= self.plan.config.rollout.rows_per_shard
        return [*([self._order(data_set, worker)] if is_full else []), *self._settle()]

    def accept(self) -> list[StoreOrder]:
        """Enter the uploaded shards, with one entry for each data set; return the shards to store now."""
        by_data_set: dict[OpenDataSet, list[tuple[File, Sequence[int]]]] = defaultdict(list)
        accepted: list[tuple[Load, list[int]]] = []
        while self.stored:
            (worker, data_set, numbers), file = self.stored.popleft()
            if load := self.loads.get(worker):  # otherwise it is lost, and others play these groups
                by_data_set[data_set].append((file, numbers))
                accepted.append((load, numbers))
        for data_set, shards in by_data_set.items():
            data_set.accept(shards)
        for load, numbers in accepted:
            load.unsafe.difference_update(numbers)
        return self._settle()

    def lose(self, worker: Attended, load: Load) -> list[StoreOrder]:
        """Take back the groups of a worker that is lost; return the shards to store now."""
        for key in [key for key in self._waiting if key[1] is worker]:
            del self._waiting[key]
        for number in sorted(load.unsafe):
            self.groups.lose(number)
        return self._settle()

    def _settle(self) -> list[StoreOrder]:
        """Commit what is complete. What waits for a data set that gets no more groups is stored, in shards not full."""
        self.groups.settle()
        closed = self.groups.unstored()
        return [self._order(*key) for key in [key for key in self._waiting if key[0] in closed]]

    def _order(self, data_set: OpenDataSet, worker: Attended) -> StoreOrder:
        return StoreOrder(worker, data_set, [group.number for group in self._waiting.pop((data_set, worker))])

    def hand_out(self, newest: PolicyVersion | None) -> Iterator[tuple[Attended, GroupOrder]]:
        """Yield groups for the workers that can begin one, each for the worker that plays least.

        Nobody gets more than a fair share, so that the first one that serves a new policy, or has begun the rollout,
        does not get all groups.
        """
        recently = time.monotonic() - SWAP_S
        free = [
            (worker, load)
            for worker, load in self.loads.items()
            if (load.lacking < 0 or self._could_begin(load)) and (worker.policy == newest or worker.asked > recently)
        ]
        policies = {worker.policy for worker, _ in free if worker.policy}
        available = max(map(self.groups.available, policies), default=0)
        most = math.ceil((available + sum(len(load.playing) for _, load in free)) / max(1, len(free)))
        while available and free:
            worker, load = least = min(free, key=lambda each: len(each[1].playing))
            if len(load.playing) >= most:
                break
            assert worker.policy
            if not self._could_begin(load) or not (group := self.groups.next(worker.policy)):
                free.remove(least)
                continue
            load.playing.add(group.number)
            load.unsafe.add(group.number)
            load.sent += 1
            plan = group.plan
            yield worker, GroupOrder(group.number, group.problem.problem_id, plan.name, plan.iteration, plan.policy)

    def _could_begin(self, load: Load) -> bool:
        """Return whether a worker could begin a group: also while the last episodes of earlier ones still run.

        It must have said once that it lacks groups: calls may overtake each other, and it refuses those of a rollout
        that it has not begun.
        """
        return load.lacking >= 0 and (len(load.playing) < self._at_once or load.lacking == load.sent)
