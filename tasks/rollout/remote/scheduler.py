"""The scheduler: the flow's side of workers in other processes. It hands out groups as workers become free.

A worker plays a group when it can begin one (`Worker.lacking`), and the groups allow it (`SharedGroups.next`). When the
group is finished, a data set is chosen for it; when enough of them wait, the worker stores a shard, which is entered
into the journal of the data set: only then its groups are safe. What waits for a data set that gets no more groups is
stored at once, then the data set is committed (`tasks.rollout.remote.ledger.SharedRollout`).

A worker that is lost (a call fails, or is not answered) loses the groups that it played and those that it had not
stored: they are handed out again. Whatever it still uploads is named by no journal and no manifest.
"""

import asyncio
import contextvars
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from configs import Config
from storage.errors import StorageError
from storage.version_names import PolicyVersion, TrajectoriesVersion
from storage.versions.drafts import Draft
from storage.versions.manifests import read
from tasks.inference.api import EngineClosedError, InferenceError
from tasks.rollout.plan import RolloutPlan
from tasks.rollout.play import Change, SharedGroups
from tasks.rollout.remote.interface import RemoteWorker, T, WorkerFailedError, WorkerLostError
from tasks.rollout.remote.ledger import Attended, Load, SharedRollout, StoreOrder
from tasks.rollout.remote.worker import Destination, GroupOrder, Worker
from tasks.score.scoring import NO_ANNOTATIONS, ByRole, Grades, ScoredShard, ShardOrder

_CHECK_S = 1.0
"""Time between two checks for what nothing notes, such as a worker that never came."""
_GRADED_AT_ONCE = 2
"""Shards that a worker grades at the same time: it reads and uploads one while its verifier grades the other."""

OnLoss = Callable[[RemoteWorker, BaseException, bool], None]


@dataclass(slots=True)
class ScoringJob:
    """The shards that are dealt out to workers that ask for more. One event loop uses it."""

    waiting: dict[str, ShardOrder]
    """The orders that no worker carries out yet, by path of the trajectories."""
    grading: Counter[Attended] = field(default_factory=Counter)
    """The calls of each worker."""
    scored: list[ScoredShard] = field(default_factory=list)
    changed: Change = field(default_factory=Change)
    """Noted when a shard is done or waits again."""


class Scheduler:
    """Plays with workers in other processes (`tasks.rollout.workers.Workers`); a context manager that ends them.

    A thread of its own attends to them as long as it is open, also between rollouts. `add` and `fail` may be called by
    any thread.

    Args:
        silence_s: a worker that has not answered for so long is lost.
        start_s: longest wait without any worker.
        progress: called with lines of text.
        on_loss: called with a worker that is lost, the error, and whether it had finished a group or graded a shard.
    """

    def __init__(
        self, silence_s: float, start_s: float, progress: Callable[[str], None], on_loss: OnLoss = lambda *_: None
    ) -> None:
        self._silence_s, self._start_s = silence_s, start_s
        self._progress, self._on_loss = progress, on_loss
        self._loop = asyncio.new_event_loop()
        # With the caller's context, in which Prefect knows where logs go.
        around = contextvars.copy_context().run
        self._thread = threading.Thread(target=around, args=[self._loop.run_forever], name="scheduler", daemon=True)
        self._workers: dict[Attended, set[asyncio.Task[None]]] = {}
        """The workers with the calls that they have not answered."""
        self._entering: set[asyncio.Task[None]] = set()
        """Referred to here only: an event loop does not keep its tasks."""
        self._policy: PolicyVersion | None = None
        self._rollouts: list[SharedRollout] = []
        """Those that are played, such as a stream and an evaluation."""
        self._numbers = itertools.count(1)
        self._idle = asyncio.Event()
        self._idle.set()
        self._scoring: ScoringJob | None = None
        self.first_loss: BaseException | None = None
        """The error of the first worker that was lost after the last group was finished; None if there is none."""
        self._fatal: BaseException | None = None
        self._alone_since = time.monotonic()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def add(self, remote: RemoteWorker) -> None:
        """Attend to one more worker; it gets groups as soon as it can begin them."""
        self._loop.call_soon_threadsafe(self._add, remote)

    def fail(self, error: BaseException) -> None:
        """End this rollout, or the next one, with an error."""
        self._loop.call_soon_threadsafe(self._fail, error)

    def serve(self, policy: PolicyVersion) -> None:
        """See `Workers.serve`: each worker serves it as soon as it can."""
        self._loop.call_soon_threadsafe(self._serve, policy)

    async def play(self, plan: RolloutPlan, groups: SharedGroups) -> None:
        """See `Workers.play`."""
        rollout = SharedRollout(next(self._numbers), plan, groups)
        playing = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._play(rollout), self._loop))
        try:
            await asyncio.shield(playing)
        except asyncio.CancelledError:
            rollout.stopping = True
            groups.changed.note()
            await asyncio.wait([playing])
            raise

    async def _play(self, rollout: SharedRollout) -> None:
        groups = rollout.groups
        self._rollouts.append(rollout)
        self._idle.clear()
        for worker in self._workers:
            self._take_part(worker, rollout)
        with groups.changed.listening():
            try:
                while not groups.complete and not rollout.stopping:
                    self._check(able=any(worker.remote.plays for worker in self._workers))
                    for worker, order in rollout.hand_out(self._policy):
                        self._start(worker, self._play_group, worker, rollout, order)
                    await groups.changed.wait(_CHECK_S)
                if rollout.stopping:
                    raise asyncio.CancelledError
            finally:
                rollout.over = True
                # The caller goes on with the data sets.
                await asyncio.to_thread(rollout.thread.shutdown, cancel_futures=True)
                self._rollouts.remove(rollout)
                if not self._rollouts:
                    self._idle.set()
                for worker in rollout.loads:
                    self._start(worker, worker.remote.call, Worker.end, rollout.number)

    def _take_part(self, worker: Attended, rollout: SharedRollout) -> None:
        """Let a worker that serves a policy play groups of a rollout."""
        if worker.policy and worker not in rollout.loads:
            rollout.loads[worker] = Load()
            self._start(worker, worker.remote.call, Worker.begin, rollout.number, rollout.plan)
            rollout.groups.changed.note()

    async def _play_group(self, worker: Attended, rollout: SharedRollout, order: GroupOrder) -> None:
        finished = await worker.remote.call(Worker.play, rollout.number, order)
        if finished is None:
            return
        self.first_loss, worker.useful = None, True  # the others do without the one that was lost
        rollout.loads[worker].playing.discard(order.number)
        rollout.groups.changed.note()
        self._enter(worker, rollout, rollout.finish, worker, finished)

    async def _store(self, rollout: SharedRollout, order: StoreOrder) -> None:
        call, draft = order.worker.remote.call, order.data_set.draft
        to = Destination(draft.version, draft.kind, order.data_set.iteration)
        file = await call(Worker.store, rollout.number, order.numbers, to)
        if file is None:
            return
        order.worker.wrote.add(file.path)
        rollout.stored.append((order, file))
        self._enter(order.worker, rollout, rollout.accept)

    def _enter(
        self, worker: Attended, rollout: SharedRollout, step: Callable[..., list[StoreOrder]], *args: Any
    ) -> None:
        """Begin to enter something of a worker. Its loss does not cancel that: others store what follows from it."""
        task = self._loop.create_task(self._guarded(worker, self._enter_fully, rollout, step, *args))
        self._entering.add(task)
        task.add_done_callback(self._entering.discard)

    async def _enter_fully(self, rollout: SharedRollout, step: Callable[..., list[StoreOrder]], *args: Any) -> None:
        """Enter something in the rollout's thread; let workers store the shards that follow from it."""
        if rollout.over:
            return
        within = contextvars.copy_context().run  # Prefect's context
        orders = await self._loop.run_in_executor(rollout.thread, within, step, *args)
        if rollout.over:
            return
        for order in orders:
            self._start(order.worker, self._store, rollout, order)
        rollout.groups.changed.note()

    def score(
        self, trajectories: TrajectoriesVersion, draft: Draft, config: Config, annotations: ByRole = NO_ANNOTATIONS
    ) -> Grades:
        """See `Workers.score`: workers grade the shards that they have stored, or else others."""
        files = [file for file in read(draft.store, trajectories).files if file.name.endswith(".parquet")]
        size = config.rollout.rows_per_shard
        orders = [ShardOrder(file, draft.version, config.score, size, annotations) for file in files]
        scored = asyncio.run_coroutine_threadsafe(self._score(orders), self._loop).result()
        grades = Grades()
        for files_of_shard, found in scored:
            draft.accept(files_of_shard)
            grades.join(found)
        return grades

    async def _score(self, orders: Sequence[ShardOrder]) -> list[ScoredShard]:
        job = self._scoring = ScoringJob({order.shard.path: order for order in orders})
        try:
            with job.changed.listening():
                while len(job.scored) < len(orders):
                    self._check(able=bool(self._workers))
                    self._let_grade(job)
                    await job.changed.wait(_CHECK_S)
        finally:
            self._scoring = None
            for worker in self._workers:
                worker.wrote.difference_update(order.shard.path for order in orders)
            job.waiting.clear()
        return job.scored

    def _let_grade(self, job: ScoringJob) -> None:
        for _ in range(_GRADED_AT_ONCE):  # one more for each in turn, so that few shards go to many workers
            for worker in [worker for worker in self._workers if worker.ready and job.waiting]:
                if job.grading[worker] < _GRADED_AT_ONCE:
                    job.grading[worker] += 1
                    self._start(worker, self._grade, worker, job)

    async def _grade(self, worker: Attended, job: ScoringJob) -> None:
        """Let a worker grade shards until none waits, first those that it wrote; if it is lost, another one goes on."""
        while job.waiting:
            path = next((path for path in worker.wrote if path in job.waiting), next(iter(job.waiting)))
            order = job.waiting.pop(path)
            try:
                job.scored.append(await worker.remote.call(Worker.score, order))
                worker.useful = True
            except BaseException:
                job.waiting[path] = order
                raise
            finally:
                job.changed.note()
        job.grading[worker] -= 1

    async def _end(self) -> None:
        self._fail(EngineClosedError("the workers were ended while a rollout was playing"))
        await self._idle.wait()
        tasks = [task for of_worker in self._workers.values() for task in of_worker]
        for task in tasks:
            task.cancel()
        for worker in self._workers:
            worker.remote.end()
        await asyncio.gather(*tasks, *self._entering, return_exceptions=True)
        await self._loop.shutdown_default_executor()

    def _check(self, *, able: bool) -> None:
        """Raise the error that ends a rollout or a score stage, or InferenceError if no worker came for too long."""
        if not self._fatal and not able and time.monotonic() > self._alone_since + self._start_s:
            why = f": {self.first_loss}" if self.first_loss else ""
            text = f"there was no worker for {self._start_s:g} s (cluster.startup_timeout_s){why}"
            self._fatal = InferenceError(text)
            self._fatal.__cause__ = self.first_loss
        if self._fatal:
            raise self._fatal

    def _fail(self, error: BaseException) -> None:
        self._fatal = self._fatal or error
        self._note_all()

    def _note_all(self) -> None:
        for changed in [rollout.groups.changed for rollout in self._rollouts]:
            changed.note()
        if self._scoring:
            self._scoring.changed.note()

    def _add(self, remote: RemoteWorker) -> None:
        worker = Attended(remote)
        self._workers[worker] = set()
        self._start(worker, self._attend, worker)

    def _serve(self, policy: PolicyVersion) -> None:
        self._policy = policy
        for worker in self._workers:
            worker.asked = time.monotonic()
            worker.renewed.set()

    async def _attend(self, worker: Attended) -> None:
        """Ask a worker what it lacks, until it is lost."""
        await self._within(self._start_s, worker.remote.call(Worker.open))
        worker.ready = True
        self._note_all()
        if worker.remote.plays:
            self._start(worker, self._keep_serving, worker)
        while True:
            lacking = await self._within(self._silence_s, worker.remote.call(Worker.lacking))
            for rollout in self._rollouts:
                if (load := rollout.loads.get(worker)) and rollout.number in lacking:
                    load.lacking = lacking[rollout.number]
                    rollout.groups.changed.note()

    async def _within(self, seconds: float, call: Coroutine[Any, Any, T]) -> T:
        try:
            async with asyncio.timeout(seconds):
                return await call
        except TimeoutError:
            raise WorkerLostError(f"no answer for {seconds:g} s") from None

    async def _keep_serving(self, worker: Attended) -> None:
        """Let a worker serve the newest policy, whenever there is one, and then play what is played."""
        while True:
            worker.renewed.clear()
            if (policy := self._policy) is None or policy == worker.policy:
                await worker.renewed.wait()
                continue
            try:
                await worker.remote.call(Worker.serve, policy)
            except WorkerFailedError as error:
                if policy == self._policy or not isinstance(error.cause, StorageError):
                    raise
                continue  # it was collected while a newer one came, which is served next
            worker.policy = policy
            for rollout in self._rollouts:
                self._take_part(worker, rollout)
            self._note_all()

    def _start(self, worker: Attended, step: Callable[..., Coroutine[Any, Any, object]], *args: Any) -> None:
        """Begin something with a worker, whose loss cancels it."""
        task = self._loop.create_task(self._guarded(worker, step, *args))
        if (tasks := self._workers.get(worker)) is None:
            task.cancel()
        else:
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def _guarded(self, worker: Attended, step: Callable[..., Coroutine[Any, Any, object]], *args: Any) -> None:
        """Await a step; its error means that the worker is lost, or else that the rollout ends."""
        try:
            await step(*args)
        except (WorkerLostError, WorkerFailedError) as error:
            self._lose(worker, error)
        except Exception as error:  # noqa: BLE001 # the flow raises it
            self._fail(error)

    def _lose(self, worker: Attended, error: WorkerLostError | WorkerFailedError) -> None:
        if worker not in self._workers:
            return
        for task in self._workers.pop(worker):
            task.cancel()
        self._alone_since = time.monotonic()
        self.first_loss = self.first_loss or error
        playing = 0
        for rollout in self._rollouts:
            if load := rollout.loads.pop(worker, None):
                playing += len(load.playing)
                self._enter(worker, rollout, rollout.lose, worker, load)
        self._progress(f"{worker.remote.name} is lost: {error}. Others play its {playing} groups")
        others = [each for each in self._workers if each.remote.plays or not worker.remote.plays]
        if isinstance(error, WorkerFailedError) and not (error.of_its_host and others):
            self._fail(error.cause)
        self._on_loss(worker.remote, error, worker.useful)
        worker.remote.end()
