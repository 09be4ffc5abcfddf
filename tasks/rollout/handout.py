"""The flow's side of workers in other processes: it hands out groups as they become free, and keeps the books.

A worker gets a group when it has room for it, and may begin it (`SharedGroups.next`). When it reports the group as
finished, the flow says which data set stores it. When it reports a shard, the flow enters that into the journal of the
data set; only then its groups are safe. A data set with all its groups is flushed by each worker that still holds some,
then it is committed.

A worker that is lost (`RemoteWorker.report` raises, or does not answer) loses the groups that it played and those that
it had not stored: they are handed out again. Whatever it still uploads is named by no journal and no manifest.
"""

import asyncio
import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self

from storage.errors import StorageError
from storage.version_names import PolicyVersion
from storage.versions.drafts import Shard
from tasks.inference.api import InferenceError
from tasks.rollout.data_set import OpenDataSet
from tasks.rollout.groups import SharedGroups
from tasks.rollout.messages import Failure, GroupOrder, Orders, Place, Report, StoredShard
from tasks.rollout.plan import RolloutPlan

_KEEP_S = 30.0
"""Longest wait for the storing of finished groups when a stream ends early."""
_LOOK_S = 1.0
"""Time between two looks for what nothing notes, such as a worker that never came."""
_TELL_S = 30.0
"""Time between two tables of the workers in the log."""


class RemoteWorker(Protocol):
    """A `tasks.rollout.worker.Worker` in another process. Its methods raise any error if that process is lost."""

    name: str

    async def give(self, orders: Orders) -> None: ...

    async def report(self) -> Report: ...

    def end(self) -> None:
        """End its process, without waiting; it may be lost already."""
        ...


@dataclass(slots=True, eq=False)
class _Attended:
    """What the flow knows of a worker."""

    remote: RemoteWorker
    orders: Orders = field(default_factory=Orders)
    """Those that it has not got yet."""
    has_orders: asyncio.Event = field(default_factory=asyncio.Event)
    policy: PolicyVersion | None = None
    room: int = 0
    sent: int = 0
    """Groups of this rollout that it was given."""
    playing: set[int] = field(default_factory=set)
    """Numbers of those that it has not finished."""
    episodes: int = 0
    tokens: int = 0
    heard: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class _Loss:
    """A worker is gone with the groups that it played."""

    playing: set[int]


_News = list[tuple[_Attended, Report | _Loss]]


class _Books:
    """The finished groups of a rollout and the workers that hold them; one thread at a time uses it."""

    def __init__(self, groups: SharedGroups) -> None:
        self._groups = groups
        self._holders: dict[OpenDataSet, dict[_Attended, set[int]]] = defaultdict(lambda: defaultdict(set))
        self._flushing: set[tuple[OpenDataSet, _Attended]] = set()
        """Workers that were told to flush, and got nothing more to store since."""

    def book(self, news: _News) -> dict[_Attended, Orders]:
        """Enter what workers have reported, commit what is complete, and return the orders that follow."""
        orders: dict[_Attended, Orders] = defaultdict(Orders)
        shards: dict[OpenDataSet, list[StoredShard]] = defaultdict(list)
        for worker, report in news:
            if isinstance(report, _Loss):
                self._lose(worker, report)
                continue
            for outcome in report.finished:
                data_set = self._groups.finish(outcome, pending=True)
                self._holders[data_set][worker].add(outcome.number)
                self._flushing.discard((data_set, worker))
                orders[worker].store.append((outcome.number, _place(data_set)))
            for shard in report.stored:
                if known := self._data_set_of(shard):
                    self._holders[known][worker].difference_update(shard.numbers)
                    shards[known].append(shard)
        for data_set, stored in shards.items():
            self._accept(data_set, stored)
        self._groups.settle()
        for data_set in self._groups.unstored():
            for worker, numbers in self._holders[data_set].items():
                if numbers and (data_set, worker) not in self._flushing:
                    self._flushing.add((data_set, worker))
                    orders[worker].flush.append(_place(data_set))
        return orders

    def _lose(self, worker: _Attended, loss: _Loss) -> None:
        held = [holders.pop(worker, set()) for holders in self._holders.values()]
        for number in sorted(loss.playing.union(*held)):
            self._groups.lose(number)

    def _data_set_of(self, shard: StoredShard) -> OpenDataSet | None:
        """Return the data set of a shard; None if its rollout was given up."""
        return next((known for known in self._holders if shard.file.path.startswith(_folder(known))), None)

    def _accept(self, data_set: OpenDataSet, stored: Sequence[StoredShard]) -> None:
        numbers = [number for shard in stored for number in shard.numbers]
        notes = {number: data_set.note(data_set.entered[number]) for number in numbers}
        data_set.accept([Shard(shard.file, [notes[n] for n in shard.numbers]) for shard in stored], numbers)
        if not data_set.pending and not any(self._holders[data_set].values()):
            del self._holders[data_set]


def _place(data_set: OpenDataSet) -> Place:
    draft = data_set.draft
    return Place(draft.version, draft.kind, draft.nonce, data_set.iteration)


def _folder(data_set: OpenDataSet) -> str:
    return f"{data_set.draft.version}/{data_set.draft.nonce}/"


class _Rollout:
    """The rollout that is played, in the thread of the hand-out."""

    def __init__(self, plan: RolloutPlan, number: int, groups: SharedGroups) -> None:
        self.plan, self.number, self.groups = plan, number, groups
        self.books = _Books(groups)
        self.news: _News = []
        """What is not booked yet, in order."""
        self.booking: asyncio.Task[None] | None = None
        self.stopping = False


class Handout:
    """Plays with workers in other processes (`tasks.rollout.workers.Workers`); a context manager that ends them.

    A thread of its own attends to them as long as it is open, also between rollouts. `add` and `fail` may be called by
    any thread.

    Args:
        silence_s: a worker that has not reported for so long is lost.
        start_s: longest wait without any worker.
        progress: called with lines of text.
        on_loss: called with a worker that is lost and the error.
    """

    def __init__(
        self,
        silence_s: float,
        start_s: float,
        progress: Callable[[str], None],
        on_loss: Callable[[RemoteWorker, BaseException], None] = lambda *_: None,
    ) -> None:
        self._silence_s, self._start_s = silence_s, start_s
        self._progress, self._on_loss = progress, on_loss
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="handout", daemon=True)
        self._clerk = ThreadPoolExecutor(1, "clerk")
        self._workers: dict[_Attended, asyncio.Task[None]] = {}
        self._policy: PolicyVersion | None = None
        self._rollout: _Rollout | None = None
        self._rollouts = 0
        self._first_loss: BaseException | None = None
        self._fatal: BaseException | None = None
        self._alone_since = time.monotonic()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._clerk.shutdown()

    def add(self, remote: RemoteWorker) -> None:
        """Attend to one more worker; it gets groups from the next hand-out on."""
        self._loop.call_soon_threadsafe(self._add, remote)

    def fail(self, error: BaseException) -> None:
        """End this rollout, or the next one, with an error."""
        self._loop.call_soon_threadsafe(self._fail, error)

    def serve(self, policy: PolicyVersion) -> None:
        """See `Workers.serve`: each worker serves it as soon as it can."""
        self._loop.call_soon_threadsafe(self._serve, policy)

    async def play(self, plan: RolloutPlan, groups: SharedGroups) -> None:
        """See `Workers.play`."""
        playing = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._play(plan, groups), self._loop))
        try:
            await asyncio.shield(playing)
        except asyncio.CancelledError:
            self._loop.call_soon_threadsafe(self._stop)
            await asyncio.wait([playing])
            raise

    async def _end(self) -> None:
        for worker, task in self._workers.items():
            task.cancel()
            worker.remote.end()
        await asyncio.gather(*self._workers.values(), return_exceptions=True)

    def _add(self, remote: RemoteWorker) -> None:
        worker = _Attended(remote)
        if self._policy:
            self._order(worker, Orders(policy=self._policy))
        if self._rollout:
            self._order(worker, Orders(plan=self._rollout.plan, play=self._rollout.number))
        self._workers[worker] = self._loop.create_task(self._attend(worker))

    def _serve(self, policy: PolicyVersion) -> None:
        self._policy = policy
        for worker in self._workers:
            self._order(worker, Orders(policy=policy))

    def _fail(self, error: BaseException) -> None:
        self._fatal = self._fatal or error
        self._wake()

    def _stop(self) -> None:
        if self._rollout:
            self._rollout.stopping = True
            self._book()
            self._wake()

    def _wake(self) -> None:
        if self._rollout:
            self._rollout.groups.changed.note()

    def _order(self, worker: _Attended, orders: Orders) -> None:
        worker.orders.add(orders)
        worker.has_orders.set()

    async def _play(self, plan: RolloutPlan, groups: SharedGroups) -> None:
        self._rollouts += 1
        rollout = self._rollout = _Rollout(plan, self._rollouts, groups)
        for worker in self._workers:
            worker.sent, worker.room = 0, 0
            self._order(worker, Orders(plan=plan, play=rollout.number))
        with groups.changed.listening():
            telling = self._loop.create_task(self._tell())
            try:
                while not groups.complete and not rollout.stopping:
                    self._check()
                    self._hand_out(rollout)
                    await _within(groups.changed.wait(), _LOOK_S)
                if rollout.stopping:
                    await self._keep(rollout)
                    raise asyncio.CancelledError
            finally:
                telling.cancel()
                if rollout.booking:  # its caller goes on with the data sets
                    await asyncio.wait([rollout.booking])
                self._rollout = None
                for worker in self._workers:
                    worker.playing.clear()
                    self._order(worker, Orders(end=True))

    def _check(self) -> None:
        """Raise what ends the rollout."""
        if not self._fatal and not self._workers and time.monotonic() > self._alone_since + self._start_s:
            waited = f"no rollout worker for {self._start_s:g} s (cluster.start_timeout_s)"
            self._fatal = InferenceError(waited)
            self._fatal.__cause__ = self._first_loss
        if self._fatal:
            raise self._fatal

    def _hand_out(self, rollout: _Rollout) -> None:
        """Give groups to the workers that have room, one to each in turn, first to those that play least."""
        free = sorted((each for each in self._workers if each.room > 0), key=lambda worker: len(worker.playing))
        while free:
            free = [worker for worker in free if self._give_group(rollout, worker)]

    def _give_group(self, rollout: _Rollout, worker: _Attended) -> bool:
        """Give a worker a group, if one may begin with its policy; return whether it has room for more."""
        start = rollout.groups.next(worker.policy) if worker.policy else None
        if start is None:
            return False
        plan = start.plan
        order = GroupOrder(start.number, start.problem.problem_id, plan.name, plan.iteration, plan.policy)
        worker.playing.add(start.number)
        worker.sent += 1
        worker.room -= 1
        self._order(worker, Orders(groups=[order]))
        return worker.room > 0

    async def _keep(self, rollout: _Rollout) -> None:
        """Wait until finished groups are stored, if the rollout wants that (`SharedGroups.unstored`)."""
        deadline = time.monotonic() + _KEEP_S
        while time.monotonic() < deadline and not self._fatal:
            unstored = await self._loop.run_in_executor(self._clerk, rollout.groups.unstored)
            if not unstored and not rollout.booking:
                return
            self._book()
            await _within(rollout.groups.changed.wait(), 0.2)

    async def _attend(self, worker: _Attended) -> None:
        """Exchange orders and reports with a worker until it is lost."""
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._deliver(worker))
                both.create_task(self._listen(worker))
        except BaseExceptionGroup as errors:
            self._lose(worker, errors.exceptions[0])

    async def _deliver(self, worker: _Attended) -> None:
        while True:
            await worker.has_orders.wait()
            worker.has_orders.clear()
            orders, worker.orders = worker.orders, Orders()
            async with self._patiently():
                await worker.remote.give(orders)

    async def _listen(self, worker: _Attended) -> None:
        while True:
            async with self._patiently():
                report = await worker.remote.report()
            self._take(worker, report)
            if report.failure:
                raise WorkerFailedError(report.failure)

    @asynccontextmanager
    async def _patiently(self) -> AsyncIterator[None]:
        """Wait for a worker, but not longer than `silence_s`."""
        try:
            async with asyncio.timeout(self._silence_s):
                yield
        except TimeoutError:
            raise WorkerLostError(f"no answer for {self._silence_s:g} s") from None

    def _take(self, worker: _Attended, report: Report) -> None:
        rollout = self._rollout
        worker.heard, worker.policy = time.monotonic(), report.policy
        if rollout is None or report.play != rollout.number:
            return
        worker.room = report.room - (worker.sent - report.got)
        for outcome in report.finished:
            worker.playing.discard(outcome.number)
            worker.episodes += sum(n for (kind, _), n in outcome.counts.items() if kind == "status")
            worker.tokens += outcome.counts["generated", None]
        if report.finished or report.stored:
            rollout.news.append((worker, report))
            self._book()
        self._wake()

    def _lose(self, worker: _Attended, error: BaseException) -> None:
        del self._workers[worker]
        worker.remote.end()
        self._alone_since = time.monotonic()
        self._first_loss = self._first_loss or error
        self._progress(f"{worker.remote.name} is lost: {error}. Others play its {len(worker.playing)} groups")
        if isinstance(error, WorkerFailedError) and not error.failure.of_its_host:
            self._fail(error.as_own())
        if self._rollout:
            self._rollout.news.append((worker, _Loss(set(worker.playing))))
            self._book()
        self._on_loss(worker.remote, error)

    def _book(self) -> None:
        """Let the clerk book what is new, unless it is at it already."""
        rollout = self._rollout
        if rollout and not rollout.booking:
            rollout.booking = self._loop.create_task(self._book_all(rollout))

    async def _book_all(self, rollout: _Rollout) -> None:
        try:
            while True:
                news, rollout.news = rollout.news, []
                orders = await self._loop.run_in_executor(self._clerk, rollout.books.book, news)
                for worker, own in orders.items():
                    self._order(worker, own)
                if not rollout.news:
                    break
        except Exception as error:  # noqa: BLE001 # the rollout ends with it
            self._fail(error)
        finally:
            rollout.booking = None
            rollout.groups.changed.note()

    async def _tell(self) -> None:
        """Tell from time to time what each worker does."""
        while True:
            await asyncio.sleep(_TELL_S)
            now = time.monotonic()
            for worker in self._workers:
                number = worker.policy.number if worker.policy else "none yet"
                self._progress(
                    f"{worker.remote.name}: {worker.episodes} episodes, {worker.tokens} tokens, "
                    f"{len(worker.playing)} groups playing, policy {number}, heard {now - worker.heard:.0f} s ago"
                )


class WorkerLostError(RuntimeError):
    """A worker does not answer, or its process is gone."""


class WorkerFailedError(RuntimeError):
    """A worker has ended with an error of its own."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.text)
        self.failure = failure

    def as_own(self) -> Exception:
        """Return the error as if it had been raised in the flow's process."""
        kinds = {"ValueError": ValueError, "StorageError": StorageError, "InferenceError": InferenceError}
        error = kinds.get(self.failure.kind, RuntimeError)(self.failure.text)
        error.add_note(f"in a rollout worker:\n{self.failure.traceback}")
        return error


async def _within(waiting: Coroutine[Any, Any, None], seconds: float) -> None:
    """Wait for something, but not longer than some seconds."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):  # `wait_for` of Python 3.11 can lose a cancellation
            await waiting
