"""The scheduler: the flow's side of workers in other processes. It hands out groups as workers become free.

A worker gets a group when it has capacity for it, and may begin it (`SharedGroups.next`). When it reports the group as
finished, the flow says which data set stores it. When it reports a shard, the flow enters that into the journal of the
data set; only then its groups are safe. A data set with all its groups is flushed by each worker that still holds some,
then it is committed (`tasks.rollout.remote.jobs.SharedRollout.enter`).

A worker that is lost (`RemoteWorker.report` raises, or does not answer) loses the groups that it played and those that
it had not stored: they are handed out again. Whatever it still uploads is named by no journal and no manifest.
"""

import asyncio
import contextlib
import contextvars
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self

from configs import Config
from storage.version_names import PolicyVersion, TrajectoriesVersion
from storage.versions.drafts import Draft
from storage.versions.manifests import read
from tasks.inference.api import EngineClosedError, InferenceError
from tasks.rollout.plan import RolloutPlan
from tasks.rollout.play import SharedGroups
from tasks.rollout.remote.jobs import AT_ONCE, Attended, RemoteWorker, ScoringJob, SharedRollout
from tasks.rollout.remote.messages import Failure, Orders, Report, WorkerFailedError, WorkerLostError
from tasks.score.scoring import NO_ANNOTATIONS, ByRole, Grades, ScoredShard, ShardOrder

_CHECK_S = 1.0
"""Time between two checks for what nothing notes, such as a worker that never came."""


OnLoss = Callable[[RemoteWorker, BaseException, bool], None]


class Scheduler:
    """Plays with workers in other processes (`tasks.rollout.workers.Workers`); a context manager that ends them.

    A thread of its own attends to them as long as it is open, also between rollouts. `add` and `fail` may be called by
    any thread.

    Args:
        silence_s: a worker that has not reported for so long is lost.
        start_s: longest wait without any worker.
        progress: called with lines of text.
        on_loss: called with a worker that is lost, the error, and whether it had finished an episode or graded a shard.
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
        self._workers: dict[Attended, asyncio.Task[None]] = {}
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
        """Attend to one more worker; it gets groups as soon as it has capacity."""
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
            self._loop.call_soon_threadsafe(self._stop, rollout)
            await asyncio.wait([playing])
            raise

    def score(
        self, trajectories: TrajectoriesVersion, draft: Draft, config: Config, annotations: ByRole = NO_ANNOTATIONS
    ) -> Grades:
        """See `Workers.score`: workers grade the shards that they have stored, or else others."""
        files = [file for file in read(draft.store, trajectories).files if file.name.endswith(".parquet")]
        size = config.rollout.rows_per_shard
        orders = [ShardOrder(file, draft.version, config.score, size, annotations) for file in files]
        scored = asyncio.run_coroutine_threadsafe(self._score(orders), self._loop).result()
        grades = Grades()
        for shard in scored:
            draft.accept(shard.files)
            grades.join(shard.grades)
        return grades

    async def _score(self, orders: Sequence[ShardOrder]) -> list[ScoredShard]:
        job = self._scoring = ScoringJob({order.shard.path: order for order in orders})
        try:
            while len(job.scored) < len(orders):
                self._check(able=bool(self._workers))
                self._let_grade(job)
                job.changed.clear()
                await _within(job.changed.wait(), _CHECK_S)
        finally:
            self._scoring = None
            for worker in self._workers:
                worker.wrote.difference_update(order.shard.path for order in orders)
                for task in worker.grading:
                    task.cancel()
        return job.scored

    def _let_grade(self, job: ScoringJob) -> None:
        for _ in range(AT_ONCE):  # one more for each in turn, so that few shards go to many workers
            for worker in self._workers if job.waiting else ():
                if len(worker.grading) < AT_ONCE:
                    task = self._loop.create_task(self._grade(worker, job))
                    worker.grading.add(task)
                    task.add_done_callback(worker.grading.discard)

    async def _grade(self, worker: Attended, job: ScoringJob) -> None:
        """Let a worker grade shards until none waits, first those that it wrote; if it is lost, another one goes on."""
        while job.waiting:
            path = next((path for path in worker.wrote if path in job.waiting), next(iter(job.waiting)))
            order = job.waiting.pop(path)
            try:
                result = await worker.remote.score(order)
                if isinstance(result, Failure):
                    raise WorkerFailedError(result)
                job.scored.append(result)
                worker.useful = True
            except BaseException as error:
                job.waiting[path] = order
                if not isinstance(error, WorkerLostError | WorkerFailedError):
                    raise
                self._lose(worker, error)
                return
            finally:
                job.changed.set()

    async def _end(self) -> None:
        self._fail(EngineClosedError("the workers were ended while a rollout was playing"))
        await self._idle.wait()
        for worker, task in self._workers.items():
            task.cancel()
            worker.remote.end()
        await asyncio.gather(*self._workers.values(), return_exceptions=True)

    def _add(self, remote: RemoteWorker) -> None:
        worker = Attended(remote)
        if remote.plays:
            worker.orders.put_nowait(Orders(policy=self._policy))
            for rollout in self._rollouts:
                rollout.add(worker)
        self._workers[worker] = self._loop.create_task(self._attend(worker))

    def _serve(self, policy: PolicyVersion) -> None:
        self._policy = policy
        for worker in self._players:
            worker.asked = time.monotonic()
            worker.orders.put_nowait(Orders(policy=policy))

    def _fail(self, error: BaseException) -> None:
        self._fatal = self._fatal or error
        for rollout in self._rollouts:
            rollout.groups.changed.note()
        if self._scoring:
            self._scoring.changed.set()

    def _stop(self, rollout: SharedRollout) -> None:
        rollout.stopping = True
        rollout.groups.changed.note()

    async def _play(self, rollout: SharedRollout) -> None:
        groups = rollout.groups
        self._rollouts.append(rollout)
        self._idle.clear()
        for worker in self._players:
            rollout.add(worker)
        with groups.changed.listening():
            try:
                while not groups.complete and not rollout.stopping:
                    self._check(able=any(worker.remote.plays for worker in self._workers))
                    rollout.hand_out(self._policy)
                    await _within(groups.changed.wait(), _CHECK_S)
                if rollout.stopping:
                    raise asyncio.CancelledError
            finally:
                if rollout.entering:  # the caller goes on with the data sets
                    await asyncio.wait([rollout.entering])
                rollout.ledger_thread.shutdown()
                self._rollouts.remove(rollout)
                if not self._rollouts:
                    self._idle.set()
                for worker in rollout.loads:
                    worker.orders.put_nowait(Orders(end=[rollout.number]))

    @property
    def _players(self) -> list[Attended]:
        return [worker for worker in self._workers if worker.remote.plays]

    def _check(self, *, able: bool) -> None:
        """Raise the error that ends a rollout or a score stage, or InferenceError if no worker came for too long."""
        if not self._fatal and not able and time.monotonic() > self._alone_since + self._start_s:
            self._fatal = InferenceError(f"there was no worker for {self._start_s:g} s (cluster.startup_timeout_s)")
            self._fatal.__cause__ = self.first_loss
        if self._fatal:
            raise self._fatal

    async def _attend(self, worker: Attended) -> None:
        """Exchange orders and reports with a worker until it is lost."""
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._deliver(worker))
                both.create_task(self._listen(worker))
        except BaseExceptionGroup as errors:
            self._lose(worker, errors.exceptions[0])

    async def _deliver(self, worker: Attended) -> None:
        while True:
            orders = [await worker.orders.get()]
            while not worker.orders.empty():
                orders.append(worker.orders.get_nowait())
            async with self._patiently(worker):
                await worker.remote.give(orders)

    async def _listen(self, worker: Attended) -> None:
        while True:
            async with self._patiently(worker):
                report = await worker.remote.report()
            self._take(worker, report)
            if report.failure:
                raise WorkerFailedError(report.failure)

    @asynccontextmanager
    async def _patiently(self, worker: Attended) -> AsyncIterator[None]:
        """Wait for a worker, but not longer than `silence_s`; for its first answer, not longer than `start_s`."""
        seconds = self._silence_s if worker.answered else self._start_s
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError:
            raise WorkerLostError(f"no answer for {seconds:g} s") from None

    def _take(self, worker: Attended, report: Report) -> None:
        worker.policy, worker.answered = report.policy, True
        if report.finished:
            self.first_loss, worker.useful = None, True  # the others do without the one that was lost
        worker.wrote.update(shard.file.path for shard in report.stored)
        for rollout in self._rollouts:
            if rollout.take(worker, report):
                rollout.groups.changed.note()
            self._enter_events(rollout)

    def _lose(self, worker: Attended, error: BaseException) -> None:
        if worker not in self._workers:
            return
        for task in [self._workers.pop(worker), *worker.grading]:  # others get its shards
            task.cancel()
        self._alone_since = time.monotonic()
        self.first_loss = self.first_loss or error
        playing = sum(rollout.lose(worker) for rollout in self._rollouts)
        self._progress(f"{worker.remote.name} is lost: {error}. Others play its {playing} groups")
        for rollout in self._rollouts:
            self._enter_events(rollout)
        if isinstance(error, WorkerFailedError) and not error.failure.of_its_host:
            self._fail(error.failure.as_own())
        self._on_loss(worker.remote, error, worker.useful)
        worker.remote.end()

    def _enter_events(self, rollout: SharedRollout) -> None:
        """Enter what is new into the ledger, unless its thread is at it already."""
        if not rollout.entering and rollout.events:
            rollout.entering = self._loop.create_task(self._enter_all(rollout))

    async def _enter_all(self, rollout: SharedRollout) -> None:
        try:
            while rollout.events:
                events, rollout.events = rollout.events, []
                within = contextvars.copy_context().run  # Prefect's context
                entering = self._loop.run_in_executor(rollout.ledger_thread, within, rollout.enter, events)
                for worker, own in (await entering).items():
                    worker.orders.put_nowait(own)
        except Exception as error:  # noqa: BLE001 # the rollout ends with it
            self._fail(error)
        finally:
            rollout.entering = None
            rollout.groups.changed.note()


async def _within(waiting: Coroutine[Any, Any, object], seconds: float) -> None:
    """Wait for something, but not longer than some seconds."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):  # `wait_for` of Python 3.11 can lose a cancellation
            await waiting
