"""A worker in a process of its own, perhaps on another host: it plays the groups that the flow gives it.

It stores trajectories in drafts of the flow, and never commits. `give` and `report` are its whole interface, so any
way to call two methods of another process connects it (`tasks.cluster` uses Ray).
"""

import asyncio
import contextlib
import functools
import logging
import shutil
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
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
from tasks.rollout.data_set import Outcome
from tasks.rollout.groups import Change
from tasks.rollout.messages import Failure, GroupOrder, Orders, Place, Report, StoredShard
from tasks.rollout.plan import RolloutPlan, Start
from tasks.rollout.play import run_loop
from tasks.rollout.workers import LocalWorkers

BEAT_S = 1.0
"""A report comes at least this often."""
logger = logging.getLogger(__name__)
Problems = Callable[[str], Mapping[str, Problem]]
"""Version of a problem set -> its problems by id."""


class Worker:
    """Plays groups with `local`, and uploads shards to `store`.

    Each thread of its own does one thing: serve policies, play a plan's groups, store finished ones.

    Args:
        local: plays in this process.
        store: the store of the run.
        cache: keeps a copy of each shard of a remote root, which the score stage may read here.
        problems: reads a problem set.
    """

    def __init__(self, local: LocalWorkers, store: Store, cache: Path, problems: Problems) -> None:
        self._local, self._store, self._cache = local, store, cache
        self._problems = functools.lru_cache(2)(problems)
        self._news = threading.Condition()  # guards what follows
        self._given: _Given | None = None
        self._finished: list[Outcome] = []
        self._stored: list[StoredShard] = []
        self._failure: Failure | None = None
        self._policy: PolicyVersion | None = None
        self._asked: PolicyVersion | None = None
        self._reported: tuple[PolicyVersion | None, int] = None, 0
        self._closed = False
        self._writing: dict[Place, _Writer] = {}
        self._storing = ThreadPoolExecutor(1, "store")
        self._serving = threading.Thread(target=self._guarded, args=[self._serve], name="serve", daemon=True)
        self._serving.start()
        self._playing: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End its threads; what is not stored is lost."""
        with self._news:
            self._closed = True
            self._news.notify_all()
        self._end_play()
        self._serving.join()
        self._storing.shutdown(cancel_futures=True)
        for writer in self._writing.values():
            writer.close()

    def give(self, orders: Orders) -> None:
        """Carry out orders, without waiting; orders that are given one after the other are begun in this order."""
        if orders.policy:
            with self._news:
                self._asked = orders.policy
                self._news.notify_all()
        if orders.end or orders.plan:
            self._end_play()
        if orders.plan:
            self._begin_play(orders.plan, orders.play)
        if orders.groups:
            assert self._given
            self._given.add(orders.groups)
        for number, place in orders.store:
            assert self._given
            self._storing.submit(self._guarded, self._write, self._given, number, place)
        for place in orders.flush:
            self._storing.submit(self._guarded, self._flush, place)

    def report(self) -> Report:
        """Return what has happened since the last report; wait for something, but not longer than `BEAT_S`."""
        with self._news:
            self._news.wait_for(lambda: self._has_news or (self._policy, self._room) != self._reported, BEAT_S)
            self._reported = self._policy, self._room
            play, got = (self._given.play, self._given.got) if self._given else (0, 0)
            report = Report(*self._reported, play, got, self._finished, self._stored, self._failure)
            self._finished, self._stored = [], []
        return report

    @property
    def _has_news(self) -> bool:
        return bool(self._finished or self._stored or self._failure or self._closed)

    @property
    def _room(self) -> int:
        return self._given.room if self._given and self._policy else 0

    def _guarded(self, action: Callable[..., None], *arguments: Any) -> None:
        """Do something in a thread; report its error."""
        try:
            action(*arguments)
        except BaseException as error:  # the flow raises it
            logger.exception("the worker ends")
            with self._news:
                self._failure = self._failure or Failure.of(error)
                self._news.notify_all()

    def _serve(self) -> None:
        """Serve each policy that is asked for; the body of a thread."""
        while True:
            with self._news:
                self._news.wait_for(lambda: self._closed or self._asked != self._policy)
                if self._closed:
                    return
                asked = self._asked
            assert asked
            self._local.serve(asked)
            with self._news:
                self._policy = asked
                self._news.notify_all()
                given = self._given
            if given:
                given.changed.note()

    def _begin_play(self, plan: RolloutPlan, play: int) -> None:
        given = _Given(plan, play, lambda: self._problems(plan.problem_set), self)
        with self._news:
            self._given, self._finished = given, []
            self._news.notify_all()
        self._playing = threading.Thread(target=self._guarded, args=[self._play, given], name="play", daemon=True)
        self._playing.start()

    def _play(self, given: "_Given") -> None:
        """Play the groups of a plan, from the first policy that is served on; the body of a thread."""
        with self._news:
            self._news.wait_for(lambda: self._policy or self._closed or given.complete)
            if self._closed or given.complete:
                return
        run_loop(self._play_until_end(given))

    async def _play_until_end(self, given: "_Given") -> None:
        given.task = asyncio.current_task()
        try:
            await self._local.play(given.plan, given)
        except (asyncio.CancelledError, EngineClosedError):
            if not given.complete:
                raise
        finally:
            given.task = None

    def _end_play(self) -> None:
        if self._playing and self._given:
            self._given.end()
            with self._news:
                self._news.notify_all()
            self._playing.join()

    def note_finished(self, outcome: Outcome | None) -> None:
        """Report a finished group; None: only that there is more room."""
        with self._news:
            if outcome:
                self._finished.append(outcome)
            self._news.notify_all()

    def _write(self, given: "_Given", number: int, place: Place) -> None:
        rows, _ = given.take(number)
        if place not in self._writing:
            rows_per_shard = given.plan.config.rollout.rows_per_shard
            self._writing[place] = _Writer(self, self._store, place, self._cache, rows_per_shard)
        self._writing[place].write(rows, number)

    def _flush(self, place: Place) -> None:
        if writer := self._writing.pop(place, None):
            writer.flush()
            writer.close()

    def note_stored(self, shard: StoredShard) -> None:
        """Report a shard."""
        with self._news:
            self._stored.append(shard)
            self._news.notify_all()


class _Given:
    """The groups that the flow gave to a worker for one plan, as `tasks.rollout.groups.Groups`."""

    def __init__(
        self, plan: RolloutPlan, play: int, problems: Callable[[], Mapping[str, Problem]], worker: Worker
    ) -> None:
        self.plan, self.play, self.changed = plan, play, Change()
        self.got = 0
        """Groups given so far."""
        self._problems, self._worker = problems, worker
        self._lock = threading.Lock()
        self._waiting: deque[GroupOrder] = deque()
        self._running = 0
        self._ended = self._hungry = False
        self.task: asyncio.Task[None] | None = None
        """The task that plays."""
        self._rows: dict[int, tuple[list[Trajectory], Outcome]] = {}
        self._at_once = max(1, plan.config.rollout.concurrency // plan.group_size)

    @property
    def room(self) -> int:
        """The number of groups that could begin now. The last episodes of a group leave room for others."""
        with self._lock:
            if self._ended:
                return 0
            starving = self._hungry and not self._waiting
            return max(self._at_once - self._running - len(self._waiting), int(starving))

    def add(self, orders: Sequence[GroupOrder]) -> None:
        with self._lock:
            self._waiting.extend(orders)
            self.got += len(orders)
            self._hungry = False
        self.changed.note()

    def end(self) -> None:
        """Play no more groups; cancel those that run, which the flow has given up."""
        with self._lock:
            self._ended = True
            task = self.task if self._running else None
        if task:
            with contextlib.suppress(RuntimeError):  # it has just ended, and its loop is closed
                task.get_loop().call_soon_threadsafe(task.cancel)
        self.changed.note()

    def take(self, number: int) -> tuple[list[Trajectory], Outcome]:
        """Return the trajectories of a finished group, once."""
        with self._lock:
            return self._rows.pop(number)

    @property
    def complete(self) -> bool:
        return self._ended

    def next(self, policy: PolicyVersion) -> Start | None:  # a newer one may be served by now
        with self._lock:
            if not self._waiting:
                self._hungry = True
                order = None
            else:
                order = self._waiting.popleft()
                self._running += 1
        if order is None:
            self._worker.note_finished(None)
            return None
        plan = replace(self.plan, name=order.name, iteration=order.iteration, policy=order.policy)
        return Start(plan, self._problems()[order.problem_id], order.number)

    def finish(self, outcome: Outcome) -> "_Given":  # it is counted in `write`
        return self

    def write(self, rows: Iterable[Trajectory], outcome: Outcome) -> None:
        """Keep the trajectories until the flow says where to store them."""
        with self._lock:
            self._rows[outcome.number] = list(rows), outcome
            self._running -= 1
        self._worker.note_finished(outcome)

    def settle(self) -> None:
        """Do nothing: the flow commits."""


class _Writer:
    """Writes trajectories into shards of the flow's draft."""

    def __init__(self, worker: Worker, store: Store, place: Place, cache: Path, rows_per_shard: int) -> None:
        self._draft = _WorkersDraft(worker, store, place, cache)
        prefix = f"part-{uuid.uuid4().hex[:8]}"  # other writers, also of this worker, write into the same draft
        self._writer = ShardWriter(self._draft, TRAJECTORY_SCHEMA, rows_per_shard, prefix)
        self._iteration = place.iteration

    def write(self, rows: Iterable[Trajectory], number: int) -> None:
        self._writer.write_group([replace(row, iteration=self._iteration) for row in rows], number)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._draft.__exit__()


class _WorkersDraft(Draft):
    """The flow's draft in a worker, which reports each shard and keeps a copy in this host's cache."""

    def __init__(self, worker: Worker, store: Store, place: Place, cache: Path) -> None:
        super().__init__(store, place.version, place.kind, place.nonce)
        self._worker, self._cache = worker, cache

    def add_shard(self, path: Path, name: str, rows: int, notes: list[Any]) -> File:
        file = super().add_shard(path, name, rows, notes)
        if not self.store.is_local:
            with contextlib.suppress(OSError):  # a full disk: the score stage fetches the shard instead
                copy = self._cache / file.path
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)
        self._worker.note_stored(StoredShard(self.version, file, notes))
        return file
