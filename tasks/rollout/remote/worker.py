"""A worker in a process of its own, perhaps on another host: it plays the groups that the flow gives it.

It stores trajectories, and never commits. Its methods are called from one event loop, so any way to call methods of
another process connects it (`tasks.cluster` uses Ray). An error of a method ends the worker.
"""

import asyncio
import functools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

from storage.objects.store import Store
from storage.records import TRAJECTORY_SCHEMA, Problem, Trajectory, to_table
from storage.version_names import PolicyVersion
from storage.versions.datasets import write_parquet
from storage.versions.drafts import Draft
from storage.versions.manifests import File, Kind
from tasks.rollout.outcomes import FinishedGroup
from tasks.rollout.plan import Group, RolloutPlan
from tasks.rollout.play import Change, Stoppable, run_loop
from tasks.rollout.workers import LocalWorker
from tasks.score.scoring import ScoredShard, ShardOrder, score_shard

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class GroupOrder:
    """A group to play: its number, and the name, iteration and policy of its plan (`RolloutPlan`)."""

    number: int
    problem_id: str
    name: str
    iteration: int
    policy: PolicyVersion


@dataclass(frozen=True)
class Destination:
    """The version in which a worker stores trajectories. The flow commits it, with the files of all workers."""

    version: str
    kind: Kind
    iteration: int


BEAT_S = 2.0
"""Longest time until `lacking` answers."""

Problems = Callable[[str], Mapping[str, Problem]]
"""Version of a problem set -> its problems by id."""


class Worker:
    """Plays groups with `local`, and uploads shards to `store`; a context manager that ends its threads.

    One thread serves policies, one stores finished groups, and each rollout is played in one of its own.

    Args:
        local: plays in this process.
        store: the store of the run.
        problems: reads a problem set.
    """

    def __init__(self, local: LocalWorker, store: Store, problems: Problems) -> None:
        self._local, self._store = local, store
        self._problems = functools.lru_cache(2)(problems)
        self._rollouts: dict[int, PlayedRollout] = {}
        self._ended = set[int]()
        self._changed = Change()
        self._serving, self._storing = ThreadPoolExecutor(1, "serve"), ThreadPoolExecutor(1, "store")
        # Each rollout keeps its thread until it ends, so one that found none would wait: there are far fewer rollouts.
        self._playing = ThreadPoolExecutor(64, "play")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End the threads; what is not stored is lost."""
        for rollout in list(self._rollouts.values()):
            rollout.end()
        for threads in (self._serving, self._playing, self._storing):
            threads.shutdown(cancel_futures=True)

    async def open(self) -> None:
        """Get ready for the other calls; the first call."""

    async def serve(self, policy: PolicyVersion) -> None:
        """Serve a policy; the groups that are played go on."""
        await self._within(self._serving, self._local.serve, policy)

    async def begin(self, rollout: int, plan: RolloutPlan) -> None:
        """Play the groups of a rollout until its `end`, which may overtake this call; a policy is served."""
        if rollout in self._ended:
            return
        played = self._rollouts[rollout] = PlayedRollout(plan, self._problems, self._changed.note)
        await self._within(self._playing, run_loop, played.play(self._local))

    async def lacking(self) -> dict[int, int]:
        """Return the rollouts that could begin another group, each with the number of groups that it has got.

        Wait for a change before, but not longer than `BEAT_S`: the answer shows that this process lives.
        """
        with self._changed.listening():
            await self._changed.wait(BEAT_S)
        return {number: rollout.got for number, rollout in self._rollouts.items() if rollout.lacks}

    async def play(self, rollout: int, order: GroupOrder) -> FinishedGroup | None:
        """Play a group, and keep its trajectories; None if the rollout ended before."""
        played = self._rollouts.get(rollout)
        return await asyncio.wrap_future(played.add(order)) if played else None

    async def store(self, rollout: int, numbers: Sequence[int], to: Destination) -> File | None:
        """Upload a shard with the trajectories of finished groups, which are kept no longer.

        Return None if the rollout ended before.
        """
        if (played := self._rollouts.get(rollout)) is None:
            return None
        rows = [replace(row, iteration=to.iteration) for number in numbers for row in played.take(number)]
        return await self._within(self._storing, self._upload, rows, to)

    async def end(self, rollout: int) -> None:
        """Forget a rollout; its groups that still run are cancelled."""
        self._ended.add(rollout)
        if played := self._rollouts.pop(rollout, None):
            played.end()

    async def score(self, order: ShardOrder) -> ScoredShard:
        """Fetch a shard of trajectories, and grade it."""
        return await asyncio.to_thread(score_shard, self._store, self._local.cache, self._local.verifier, order)

    async def _within(self, threads: ThreadPoolExecutor, step: Callable[..., T], *arguments: Any) -> T:
        """Do something in a thread. Its error goes into the log of this process, too."""
        try:
            return await asyncio.get_running_loop().run_in_executor(threads, step, *arguments)
        except Exception:
            logger.exception("the worker ends")
            raise

    def _upload(self, rows: list[Trajectory], to: Destination) -> File:
        """Upload a shard into a folder of its own, under a name that no other shard of the version has.

        If the worker is lost, no manifest names the folder, and `gc` deletes it.
        """
        with Draft(self._store, to.version, to.kind) as draft:
            path = draft.scratch / f"part-{draft.nonce}.parquet"
            write_parquet(to_table(rows, TRAJECTORY_SCHEMA), path)
            return draft.add(path, path.name, len(rows))


class PlayedRollout:
    """The groups that the flow gave to a worker for one rollout, as `tasks.rollout.play.Groups`."""

    def __init__(self, plan: RolloutPlan, problems: Problems, note: Callable[[], None]) -> None:
        self.changed = Change()
        self.got = 0
        self.lacks = False
        """Whether it could have begun another group since it got the last one."""
        self._plan, self._problems, self._note = plan, problems, note
        self._lock = threading.Lock()
        self._waiting: deque[GroupOrder] = deque()
        self._results: dict[int, Future[FinishedGroup | None]] = {}
        self._rows: dict[int, list[Trajectory]] = {}
        self._playing = Stoppable()

    async def play(self, local: LocalWorker) -> None:
        await self._playing.play(lambda: local.play(self._plan, self))

    def add(self, order: GroupOrder) -> Future[FinishedGroup | None]:
        """Play one more group; return its result, which comes later."""
        result = Future[FinishedGroup | None]()
        result.set_running_or_notify_cancel()  # whoever waits for it may be cancelled, which does not cancel the group
        with self._lock:
            self._waiting.append(order)
            self._results[order.number] = result
            self.got += 1
            self.lacks = False
        self.changed.note()
        return result

    def end(self) -> None:
        """Play no more groups, and cancel those that run: the flow does not want them."""
        with self._lock:
            results, self._results = self._results, {}
        self._playing.stop(running=bool(results))
        self.changed.note()
        for result in results.values():
            result.set_result(None)

    def take(self, number: int) -> list[Trajectory]:
        """Return the trajectories of a finished group, once."""
        return self._rows.pop(number)

    @property
    def complete(self) -> bool:
        return self._playing.stopped

    def next(self, policy: PolicyVersion) -> Group | None:  # a newer one may be served by now
        with self._lock:
            order = self._waiting.popleft() if self._waiting else None
            self.lacks |= order is None
        if order is None:
            self._note()
            return None
        plan = replace(self._plan, name=order.name, iteration=order.iteration, policy=order.policy)
        return plan.group(self._problems(plan.problem_set)[order.problem_id], order.number)

    def finish(self, finished: FinishedGroup, rows: Iterable[Trajectory]) -> None:
        """Keep the trajectories until the flow says where to store them."""
        with self._lock:
            result = self._results.pop(finished.number, None)
            self._rows[finished.number] = list(rows)
        if result:
            result.set_result(finished)
