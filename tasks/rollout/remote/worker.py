"""A worker in a process of its own, perhaps on another host: it plays the groups that the flow gives it.

It stores trajectories, and never commits. `give` and `report` are its interface for playing, so any
way to call two methods of another process connects it (`tasks.cluster` uses Ray).
"""

import asyncio
import contextlib
import functools
import logging
import math
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from storage.objects.store import Store
from storage.records import TRAJECTORY_SCHEMA, Problem, Trajectory
from storage.version_names import PolicyVersion
from storage.versions.datasets import ShardWriter
from storage.versions.drafts import Draft
from storage.versions.manifests import File
from tasks.inference.api import EngineClosedError
from tasks.rollout.outcomes import FinishedGroup
from tasks.rollout.plan import RolloutPlan, Start
from tasks.rollout.play import Change, run_loop
from tasks.rollout.remote.messages import Capacity, Failure, GroupOrder, Orders, Place, Report, StoredShard, StoreOrder
from tasks.rollout.workers import LocalWorkers

BEAT_S = 1.0
"""Longest time between two reports if the flow is not patient; three times its patience comes on top."""
IDLE_S, KEPT_S = 5.0, 30.0
"""A worker that has got no group for `IDLE_S` stores what it has finished `KEPT_S` ago, although the shard is not full.

At the end of an iteration the last groups take long, and in so long a time some worker of many is always lost.
"""
logger = logging.getLogger(__name__)


@dataclass(slots=True)
class RequestsAhead:
    """The number of groups that a worker asks for when it has none left to begin.

    They are as many as make the worker ask for more about as seldom as the flow wishes, but at most `most`.

    Example: with a patience of 3 s and short episodes, one group lasts 0.4 s. The worker asks for 1, 2, 4, 8 groups;
    8 last 3.2 s. With a patience of 0.01 s, which a flow with few workers has, it always asks for 1.
    """

    most: int
    patience_s: float = 0.0
    """The patience of the flow (`Worker.report`)."""
    groups: int = 1
    since: float = -math.inf
    """When the worker had none left last."""

    def note_empty(self, now: float) -> None:
        """Note that the worker has none left."""
        lasted_s, self.since = now - self.since, now
        if lasted_s < self.patience_s:
            self.groups = min(2 * self.groups, self.most)
        elif lasted_s > 4 * self.patience_s:
            self.groups = max(1, self.groups // 2)


Problems = Callable[[str], Mapping[str, Problem]]
"""Version of a problem set -> its problems by id."""


class Worker:
    """Plays groups with `local`, and uploads shards to `store`; a context manager that ends its threads.

    One thread serves policies, one stores finished groups, and each rollout is played in one of its own.

    Args:
        local: plays in this process.
        store: the store of the run.
        cache: keeps a copy of each shard of a remote root, which the score stage may read here.
        problems: reads a problem set.
    """

    def __init__(self, local: LocalWorkers, store: Store, cache: Path, problems: Problems) -> None:
        self._local, self._store, self._cache = local, store, cache
        self._problems = functools.lru_cache(2)(problems)
        self._changed = threading.Condition()  # guards what follows
        self._rollouts: dict[int, PlayedRollout] = {}
        self._unreported = Unreported(self._rollouts)
        self._asked: PolicyVersion | None = None
        self._closed = False
        self._writing: dict[Place, _Writer] = {}  # used by the thread that stores
        self._storing = ThreadPoolExecutor(1, "store")
        self._threads: list[threading.Thread] = []
        self._start_thread(self._serve)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the threads; what is not stored is lost."""
        with self._changed:
            self._closed = True
            rollouts = list(self._rollouts.values())
            self._changed.notify_all()
        for rollout in rollouts:
            rollout.end()
        for thread in self._threads:
            thread.join()
        self._storing.shutdown(cancel_futures=True)
        for writer in self._writing.values():
            writer.close()

    def give(self, orders: Orders) -> None:
        """Carry out orders, without waiting."""
        with self._changed:
            self._asked = orders.policy or self._asked
            for number, plan in orders.begin.items():
                rollout = PlayedRollout(number, plan, self._problems, self.note)
                self._rollouts[number] = rollout
                self._start_thread(self._play, rollout)
            self._changed.notify_all()
        for number, groups in orders.groups.items():
            self._rollouts[number].add(groups)
        for order in orders.store:
            self._storing.submit(self._guarded, self._write, self._rollouts[order.rollout], order)
        for place in orders.flush:
            self._storing.submit(self._guarded, self._flush, place)
        for number in orders.end:
            with self._changed:
                ended = self._rollouts.pop(number)
            ended.end()
            self._storing.submit(self._guarded, self._close_writers, number)

    def report(self, patience_s: float) -> Report:
        """Return what has happened since the last report; wait for something, but not for ever (`BEAT_S`).

        Args:
            patience_s: a group that has finished need not be reported sooner if nothing else happens, and groups are
                asked for about once in such a time.
        """
        with self._changed:
            for rollout in self._rollouts.values():
                rollout.ahead.patience_s = patience_s
            self._changed.wait_for(lambda: self._is_urgent, patience_s)
            self._changed.wait_for(lambda: self._unreported.finished or self._is_urgent, BEAT_S + 2 * patience_s)
            report = self._unreported.take()
            idle = any(rollout.idle for rollout in self._rollouts.values())
        if idle:
            self._storing.submit(self._guarded, self._store_old)
        return report

    def note(self, finished: tuple[int, FinishedGroup] | None = None, stored: StoredShard | None = None) -> None:
        """Report something; without arguments only that there may be more capacity."""
        with self._changed:
            self._unreported.add(finished, stored)
            self._changed.notify_all()

    @property
    def _is_urgent(self) -> bool:
        return self._closed or self._unreported.is_urgent

    def _start_thread(self, action: Callable[..., None], *arguments: Any) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=self._guarded, args=[action, *arguments], name=action.__name__, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _guarded(self, action: Callable[..., None], *arguments: Any) -> None:
        """Do something in a thread; report its error."""
        try:
            action(*arguments)
        except BaseException as error:  # the flow raises it
            logger.exception("the worker ends")
            with self._changed:
                self._unreported.failure = self._unreported.failure or Failure.of(error)
                self._changed.notify_all()

    def _serve(self) -> None:
        """Serve each policy that is asked for; the body of a thread."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._asked != self._unreported.policy)
                if self._closed:
                    return
                asked = self._asked
            assert asked
            self._local.serve(asked)
            with self._changed:
                self._unreported.policy = asked
                self._changed.notify_all()

    def _play(self, rollout: "PlayedRollout") -> None:
        """Play groups of a rollout, from the first policy that is served on; the body of a thread."""
        with self._changed:
            self._changed.wait_for(lambda: self._unreported.policy or self._closed or rollout.complete)
            if self._unreported.policy is None or rollout.complete:
                return
        run_loop(rollout.play(self._local))

    def _write(self, rollout: "PlayedRollout", order: StoreOrder) -> None:
        rows, place = rollout.take(order.number), order.place
        if place not in self._writing:
            draft = _WorkersDraft(self._store, place, self._cache, order.rollout, self.note)
            rows_per_shard = rollout.plan.config.rollout.rows_per_shard
            self._writing[place] = _Writer(draft, order.rollout, place.iteration, rows_per_shard)
        self._writing[place].write(rows, order.number)

    def _store_old(self) -> None:
        for writer in self._writing.values():
            writer.flush_older(KEPT_S)

    def _close_writers(self, rollout: int) -> None:
        """Close the writers that were not told to flush at the end, because all that they had was stored."""
        for place in [place for place, writer in self._writing.items() if writer.rollout == rollout]:
            self._writing.pop(place).close()

    def _flush(self, place: Place) -> None:
        if writer := self._writing.pop(place, None):
            writer.flush()
            writer.close()


class Unreported:
    """What the flow does not know yet of a worker with some rollouts; used under a lock of the caller."""

    def __init__(self, rollouts: Mapping[int, "PlayedRollout"]) -> None:
        self._rollouts = rollouts
        self.policy: PolicyVersion | None = None
        """What it serves."""
        self.finished: list[tuple[int, FinishedGroup]] = []
        self.failure: Failure | None = None
        self._stored: list[StoredShard] = []
        self._reported: tuple[PolicyVersion | None, dict[int, Capacity]] = None, {}

    def add(self, finished: tuple[int, FinishedGroup] | None, stored: StoredShard | None) -> None:
        self.finished += [finished] if finished else []
        self._stored += [stored] if stored else []

    @property
    def is_urgent(self) -> bool:
        """Whether the flow would give other orders if it knew."""
        policy, reported = self._reported
        more = any(now.exceeds(reported.get(number)) for number, now in self._capacities().items())
        return bool(self._stored or self.failure) or self.policy != policy or more

    def take(self) -> Report:
        """Return the report of all this, once."""
        self._reported = self.policy, self._capacities()
        report = Report(*self._reported, self.finished, self._stored, self.failure)
        self.finished, self._stored = [], []
        return report

    def _capacities(self) -> dict[int, Capacity]:
        return {number: rollout.capacity for number, rollout in self._rollouts.items()}


class PlayedRollout:
    """The groups that the flow gave to a worker for one rollout, as `tasks.rollout.play.Groups`."""

    def __init__(self, number: int, plan: RolloutPlan, problems: Problems, note: Callable[..., None]) -> None:
        self.plan, self.changed = plan, Change()
        self._number, self._problems, self._note = number, problems, note
        self._lock = threading.Lock()
        self._waiting: deque[GroupOrder] = deque()
        self._got = self._running = 0
        self._ended = self._lacks_groups = False
        self._task: asyncio.Task[None] | None = None
        self._rows: dict[int, list[Trajectory]] = {}
        self._at_once = max(1, plan.config.rollout.concurrency // plan.group_size)
        self.ahead = RequestsAhead(self._at_once)

    @property
    def capacity(self) -> Capacity:
        """The capacity for more groups. While the last episodes of a group run, others may begin already."""
        with self._lock:
            waits = self._lacks_groups and not self._waiting
            free = max(self._at_once - self._running - len(self._waiting), self.ahead.groups * waits)
            return Capacity(0 if self._ended else free, self._got)

    @property
    def idle(self) -> bool:
        """Whether it could have begun another group for `IDLE_S`."""
        with self._lock:
            return self._lacks_groups and not self._waiting and time.monotonic() - self.ahead.since > IDLE_S

    def add(self, orders: Sequence[GroupOrder]) -> None:
        with self._lock:
            self._waiting.extend(orders)
            self._got += len(orders)
            self._lacks_groups = False
        self.changed.note()

    async def play(self, local: LocalWorkers) -> None:
        with self._lock:
            self._task = asyncio.current_task()
        try:
            await local.play(self.plan, self)
        except (asyncio.CancelledError, EngineClosedError):
            if not self._ended:
                raise
        finally:
            with self._lock:
                self._task = None

    def end(self) -> None:
        """Play no more groups, and cancel those that run: the flow does not want them."""
        with self._lock:
            self._ended = True
            if self._task and self._running:
                self._task.get_loop().call_soon_threadsafe(self._task.cancel)
        self.changed.note()

    def take(self, number: int) -> list[Trajectory]:
        """Return the trajectories of a finished group, once."""
        with self._lock:
            return self._rows.pop(number)

    @property
    def complete(self) -> bool:
        return self._ended

    def next(self, policy: PolicyVersion) -> Start | None:  # a newer one may be served by now
        with self._lock:
            if self._waiting:
                order = self._waiting.popleft()
                self._running += 1
            else:
                order, self._lacks_groups = None, True
                self.ahead.note_empty(time.monotonic())
        if order is None:
            self._note()
            return None
        plan = replace(self.plan, name=order.name, iteration=order.iteration, policy=order.policy)
        return Start(plan, self._problems(plan.problem_set)[order.problem_id], order.number)

    def finish(self, finished: FinishedGroup) -> "PlayedRollout":  # it is reported in `write`
        return self

    def write(self, rows: Iterable[Trajectory], finished: FinishedGroup) -> None:
        """Keep the trajectories until the flow says where to store them."""
        with self._lock:
            self._rows[finished.number] = list(rows)
            self._running -= 1
        self._note((self._number, finished))

    def settle(self) -> None:
        """Do nothing: the flow commits."""


class _Writer:
    """Writes trajectories of the rollout with a number into shards of a draft."""

    def __init__(self, draft: Draft, rollout: int, iteration: int, rows_per_shard: int) -> None:
        self.rollout = rollout
        self._draft, self._iteration = draft, iteration
        # The names differ from those of other writers, whose files will be in the same manifest.
        self._writer = ShardWriter(draft, TRAJECTORY_SCHEMA, rows_per_shard, prefix=f"part-{draft.nonce}")
        self._oldest = 0.0
        """When the first group that is in no shard yet was written here."""

    def write(self, rows: Iterable[Trajectory], number: int) -> None:
        if not self._writer.collected:
            self._oldest = time.monotonic()
        self._writer.write_group([replace(row, iteration=self._iteration) for row in rows], number)

    def flush_older(self, seconds: float) -> None:
        """Write a shard if a group has waited for it so long."""
        if self._writer.collected and time.monotonic() - self._oldest > seconds:
            self._writer.flush()

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._draft.__exit__()


class _WorkersDraft(Draft):
    """A worker's draft, which reports each shard and keeps a copy in this host's cache; the flow commits its files."""

    def __init__(self, store: Store, place: Place, cache: Path, rollout: int, note: Callable[..., None]) -> None:
        super().__init__(store, place.version, place.kind)
        self._cache, self._rollout, self._note = cache, rollout, note

    def add_shard(self, path: Path, name: str, rows: int, notes: list[Any]) -> File:
        file = super().add_shard(path, name, rows, notes)
        if not self.store.is_local:
            with contextlib.suppress(OSError):  # a full disk: the score stage fetches the shard instead
                copy = self._cache / file.path
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)
        self._note(stored=StoredShard(self._rollout, file, notes))
        return file
