"""A worker in a process of its own, perhaps on another host: it plays the groups that the flow gives it.

It stores trajectories, and never commits. `give` and `report` are its interface for playing, so any
way to call two methods of another process connects it (`tasks.cluster` uses Ray).
"""

import functools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from storage.errors import DamagedError
from storage.objects.store import Store
from storage.records import TRAJECTORY_SCHEMA, Problem, Trajectory
from storage.version_names import PolicyVersion
from storage.versions.datasets import ShardWriter
from storage.versions.drafts import Draft
from storage.versions.manifests import File
from tasks.rollout.outcomes import FinishedGroup
from tasks.rollout.plan import Group, RolloutPlan
from tasks.rollout.play import Change, Stoppable, run_loop
from tasks.rollout.remote import messages
from tasks.rollout.workers import LocalWorker

BEAT_S = 2.0
"""Longest time between two reports."""
logger = logging.getLogger(__name__)

Problems = Callable[[str], Mapping[str, Problem]]
"""Version of a problem set -> its problems by id."""


class Worker:
    """Plays groups with `local`, and uploads shards to `store`; a context manager that ends its threads.

    One thread serves policies, one stores finished groups, and each rollout is played in one of its own, from the
    first policy that is served on.

    Args:
        local: plays in this process.
        store: the store of the run.
        problems: reads a problem set.
    """

    def __init__(self, local: LocalWorker, store: Store, problems: Problems) -> None:
        self._local, self._store = local, store
        self._problems = functools.lru_cache(2)(problems)
        self._changed = threading.Condition()  # guards what follows
        self._rollouts: dict[int, PlayedRollout] = {}
        self._asked: PolicyVersion | None = None
        self._served: PolicyVersion | None = None
        self._finished: list[tuple[int, FinishedGroup]] = []
        self._stored: list[messages.StoredShard] = []
        self._failure: messages.Failure | None = None
        self._has_events = self._closed = False
        self._drafts: dict[messages.Destination, _WorkersDraft] = {}  # used by the thread that stores
        self._serving, self._storing = ThreadPoolExecutor(1, "serve"), ThreadPoolExecutor(1, "store")
        # Each rollout keeps its thread until it ends, so one that found none would wait: there are far fewer rollouts.
        self._playing = ThreadPoolExecutor(64, "play")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End the threads; what is not stored is lost."""
        with self._changed:
            self._closed = True
            rollouts = list(self._rollouts.values())
            self._changed.notify_all()
        for rollout in rollouts:
            rollout.end()
        for threads in (self._serving, self._playing, self._storing):
            threads.shutdown(cancel_futures=True)
        for draft in self._drafts.values():
            draft.__exit__()

    def give(self, orders: Sequence[messages.Orders]) -> None:
        """Carry out orders, without waiting."""
        for order in orders:
            if order.policy:
                with self._changed:
                    self._asked = order.policy
                self._submit(self._serving, self._serve, order.policy)
            for number, plan in order.begin.items():
                rollout = PlayedRollout(number, plan, self._problems, self.note)
                with self._changed:
                    self._rollouts[number] = rollout
                self._submit(self._playing, self._play, rollout)
                self.note()
            for number, groups in order.groups.items():
                self._rollouts[number].add(groups)
            for finished in order.store:
                self._submit(self._storing, self._write, self._rollouts[finished.rollout], finished)
            for destination in order.flush:
                self._submit(self._storing, self._flush, destination)
            for number in order.end:
                with self._changed:
                    ended = self._rollouts.pop(number)
                ended.end()
                self._submit(self._storing, self._close_drafts, number)

    def report(self) -> messages.Report:
        """Return what has happened since the last report; wait for something, but not for ever (`BEAT_S`)."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_events or self._closed, BEAT_S)
            capacities = {number: rollout.capacity for number, rollout in self._rollouts.items()}
            report = messages.Report(self._served, capacities, self._finished, self._stored, self._failure)
            self._finished, self._stored, self._has_events = [], [], False
            return report

    def note(
        self, finished: tuple[int, FinishedGroup] | None = None, stored: messages.StoredShard | None = None
    ) -> None:
        """Report something; without arguments, that the worker has capacity or serves another policy."""
        with self._changed:
            self._finished += [finished] if finished else []
            self._stored += [stored] if stored else []
            self._has_events = True
            self._changed.notify_all()

    def _submit(self, threads: ThreadPoolExecutor, action: Callable[..., None], *arguments: Any) -> None:
        """Do something in a thread; report its error."""

        def act() -> None:
            try:
                action(*arguments)
            except BaseException as error:  # the flow raises it
                logger.exception("the worker ends")
                self._failure = self._failure or messages.Failure.of(error)
                self.note()

        threads.submit(act)

    def _serve(self, policy: PolicyVersion) -> None:
        if policy == self._asked != self._served and not self._closed and not self._failure:  # no newer order waits
            try:
                self._local.serve(policy)
            except DamagedError:
                if policy != self._asked:  # it was collected while a newer one came, which is served next
                    return
                raise
            self._served = policy
            self.note()

    def _play(self, rollout: "PlayedRollout") -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._served or self._closed or rollout.complete)
        if self._served:
            run_loop(rollout.play(self._local))

    def _write(self, rollout: "PlayedRollout", order: messages.StoreOrder) -> None:
        destination, rows_per_shard = order.destination, rollout.plan.config.rollout.rows_per_shard
        if destination not in self._drafts:
            self._drafts[destination] = _WorkersDraft(self._store, order, rows_per_shard, self.note)
        rows = [replace(row, iteration=destination.iteration) for row in rollout.take(order.number)]
        self._drafts[destination].writer.write_group(rows, order.number)

    def _flush(self, destination: messages.Destination) -> None:
        if draft := self._drafts.pop(destination, None):
            with draft:
                draft.writer.flush()

    def _close_drafts(self, rollout: int) -> None:
        """Close the drafts that were not told to flush at the end, because all that they had was stored."""
        for destination in [each for each, draft in self._drafts.items() if draft.rollout == rollout]:
            self._drafts.pop(destination).__exit__()


class PlayedRollout:
    """The groups that the flow gave to a worker for one rollout, as `tasks.rollout.play.Groups`."""

    def __init__(self, number: int, plan: RolloutPlan, problems: Problems, note: Callable[..., None]) -> None:
        self.plan, self.changed = plan, Change()
        self._number, self._problems, self._note = number, problems, note
        self._lock = threading.Lock()
        self._waiting: deque[messages.GroupOrder] = deque()
        self._got = self._running = 0
        self._lacks = False
        """Whether it could have begun another group since it got the last one."""
        self._playing = Stoppable()
        self._rows: dict[int, list[Trajectory]] = {}
        self._at_once = max(1, plan.config.rollout.concurrency // plan.group_size)

    @property
    def capacity(self) -> messages.Capacity:
        """The capacity for more groups. While the last episodes of a group run, others may begin already."""
        with self._lock:
            free = max(self._at_once - self._running - len(self._waiting), int(self._lacks))
            return messages.Capacity(0 if self.complete else free, self._got)

    def add(self, orders: Sequence[messages.GroupOrder]) -> None:
        with self._lock:
            self._waiting.extend(orders)
            self._got += len(orders)
            self._lacks = False
        self.changed.note()

    async def play(self, local: LocalWorker) -> None:
        await self._playing.play(lambda: local.play(self.plan, self))

    def end(self) -> None:
        """Play no more groups, and cancel those that run: the flow does not want them."""
        self._playing.stop(running=self._running > 0)
        self.changed.note()

    def take(self, number: int) -> list[Trajectory]:
        """Return the trajectories of a finished group, once."""
        with self._lock:
            return self._rows.pop(number)

    @property
    def complete(self) -> bool:
        return self._playing.stopped

    def next(self, policy: PolicyVersion) -> Group | None:  # a newer one may be served by now
        with self._lock:
            order = self._waiting.popleft() if self._waiting else None
            self._running += order is not None
            self._lacks |= order is None
        if order is None:
            self._note()
            return None
        plan = replace(self.plan, name=order.name, iteration=order.iteration, policy=order.policy)
        return plan.group(self._problems(plan.problem_set)[order.problem_id], order.number)

    def finish(self, finished: FinishedGroup, rows: Iterable[Trajectory]) -> None:
        """Keep the trajectories until the flow says where to store them."""
        with self._lock:
            self._rows[finished.number] = list(rows)
            self._running -= 1
        self._note((self._number, finished))


class _WorkersDraft(Draft):
    """A worker's draft, which reports each shard; the flow commits its files.

    The names of its shards differ from those of other workers, whose files will be in the same manifest.
    """

    def __init__(
        self, store: Store, order: messages.StoreOrder, rows_per_shard: int, note: Callable[..., None]
    ) -> None:
        super().__init__(store, order.destination.version, order.destination.kind)
        self.rollout, self._note = order.rollout, note
        self.writer = ShardWriter(self, TRAJECTORY_SCHEMA, rows_per_shard, prefix=f"part-{self.nonce}")

    def add_shard(self, path: Path, name: str, rows: int, notes: list[Any]) -> File:
        file = super().add_shard(path, name, rows, notes)
        self._note(stored=messages.StoredShard(self.rollout, file, notes))
        return file
