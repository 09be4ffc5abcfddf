"""The groups of a rollout, which workers play, and the play of one data set.

Workers take one group after another, and give each back when it is finished or lost (`Groups`). A `_Batch` has those of
one data set, `tasks.rollout.stream.Stream` those of a run.
"""

import asyncio
import gc
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from typing import Any, Protocol

from configs import Config
from storage import interrupts
from storage.grouping import grouped
from storage.records import TRAJECTORY_SCHEMA, Problem, Trajectory
from storage.telemetry.metrics import EPISODES, FAULTS, GENERATED, WAITING
from storage.version_names import PolicyVersion, TrajectoriesVersion
from storage.versions.datasets import ShardWriter, adopted
from storage.versions.drafts import Draft, Shard
from storage.versions.manifests import File
from tasks.inference.api import EngineClosedError
from tasks.rollout.guards import AgentThreads
from tasks.rollout.outcomes import FinishedGroup, Tally
from tasks.rollout.plan import Group, RolloutPlan
from tasks.score.scorers import SuccessRule
from tasks.score.scoring import NO_ANNOTATIONS, ByRole, Grades
from tasks.train.orders import Progress

_OBJECTS = 100_000
"""New objects between two garbage collections; Python's default is 700."""


class OpenDataSet:
    """A data set while its groups are played: a draft, which may have a journal, and the counts for its manifest.

    The journal has a note for each group: its problem and whether it was rejected; in a stream also its number.

    Args:
        draft: keeps the shards; the trajectories that it took over from a killed attempt are counted.
        iteration: the iteration whose number the trajectories get.
        config: of the run.
        progress: called with lines of text.
        numbered: whether a group's number means something to later flow runs.
    """

    def __init__(
        self, draft: Draft, iteration: int, config: Config, progress: Progress, *, numbered: bool = False
    ) -> None:
        self.draft, self.iteration = draft, iteration
        self.tally = Tally(progress, SuccessRule.while_playing(config.score), mixed=bool(config.problems.members))
        self.tally.resume(adopted(draft))
        self.adopted: list[dict[str, Any]] = list(draft.notes)
        """The notes of the groups in shards that the draft took over."""
        self.entered: dict[int, FinishedGroup] = {}
        """The groups that finished since, by number."""
        self.pending: set[int] = set()
        """Those among them whose trajectories a worker of another process has not stored yet."""
        self._numbered, self._max_failed_share = numbered, config.rollout.max_failed_share
        self._writer = ShardWriter(draft, TRAJECTORY_SCHEMA, config.rollout.rows_per_shard)

    @property
    def groups(self) -> int:
        return len(self.adopted) + len(self.entered)

    @property
    def numbers(self) -> list[int]:
        """The numbers of its groups, in a stream."""
        return sorted([*(note["group"] for note in self.adopted), *self.entered])

    @property
    def rejected(self) -> int:
        """The number of rejected groups."""
        before = sum(bool(note["rejected"]) for note in self.adopted)
        return before + sum(finished.rejected for finished in self.entered.values())

    def enter(self, finished: FinishedGroup, *, pending: bool = False) -> None:
        """Count a finished group, whose trajectories are stored next, or by a worker later (`pending`)."""
        self.entered[finished.number] = finished
        if pending:
            self.pending.add(finished.number)
        self.tally.counts.update(finished.counts)
        kind = self.draft.kind
        GENERATED.labels(kind).inc(finished.counts["generated", None])
        for (name, key), number in finished.counts.items():
            if name in ("status", "fault"):
                (EPISODES if name == "status" else FAULTS).labels(kind, key).inc(number)
        self.tally.report()

    def write(self, rows: Iterable[Trajectory], finished: FinishedGroup) -> None:
        """Store the trajectories of a group that was entered."""
        own = self.iteration
        kept = [row if row.iteration == own else replace(row, iteration=own) for row in rows]
        self._writer.write_group(kept, self.note(finished))

    def accept(self, stored: Sequence[tuple[File, Sequence[int]]]) -> None:
        """Take over shards that workers have stored, each with all trajectories of the groups with some numbers."""
        shards = [Shard(file, [self.note(self.entered[number]) for number in numbers]) for file, numbers in stored]
        self.draft.accept_shards(shards)
        self.pending.difference_update(*(numbers for _, numbers in stored))

    def lose(self, number: int) -> FinishedGroup:
        """Take back a group that is pending: the worker with its trajectories is gone."""
        self.pending.remove(number)
        finished = self.entered.pop(number)
        self.tally.counts.subtract(finished.counts)
        return finished

    def note(self, finished: FinishedGroup) -> dict[str, Any]:
        """Return what the journal keeps of a group."""
        note = {"problem_id": finished.problem_id, "rejected": finished.rejected}
        return note | {"group": finished.number} if self._numbered else note

    def end(self) -> dict[str, Any]:
        """Store what is still in memory; return the metrics.

        Raises:
            ValueError: too many episodes failed; the next attempt plays all of them again.
        """
        self._writer.flush()
        self.tally.report(last=True)
        try:
            self.tally.check(self._max_failed_share)
        except ValueError:
            self.draft.discard()
            raise
        return self.tally.metrics(groups_rejected=self.rejected)


class Change:
    """Wakes the coroutine that waits for a change, now or later; any thread may note one."""

    def __init__(self) -> None:
        self._noted = asyncio.Event()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Let this event loop hear of changes until the block ends; it may close afterwards."""
        with self._lock:
            self._loop = asyncio.get_running_loop()
        try:
            yield
        finally:
            with self._lock:
                self._loop = None

    def note(self) -> None:
        with self._lock:
            if self._loop and not self._loop.is_closed():  # an agent may have stopped it
                self._loop.call_soon_threadsafe(self._noted.set)
            else:  # nobody waits
                self._noted.set()

    async def wait(self, seconds: float | None = None) -> None:
        """Wait for a change since the last call, but not longer than some seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):  # `wait_for` of Python 3.11 can lose a cancellation
                await self._noted.wait()
        self._noted.clear()


class Groups(Protocol):
    """The groups of one rollout. One thread at a time may call `finish`; others may call the rest meanwhile."""

    changed: Change
    """It is noted in three cases: another group may begin, a data set waits to be stored, or no group is left."""

    @property
    def complete(self) -> bool:
        """True if nothing is left to play or to store."""

    def next(self, policy: PolicyVersion) -> Group | None:
        """Begin a group with a policy and return it; None if none may begin now."""

    def finish(self, finished: FinishedGroup, rows: Iterable[Trajectory]) -> None:
        """Count a finished group, and store its trajectories."""


class SharedGroups(Groups, Protocol):
    """The groups of a rollout that many workers share, any of which may be lost.

    One thread at a time may call `finish`, `enter`, `settle`, `unstored` and `lose`.
    """

    def available(self, policy: PolicyVersion) -> int:
        """Return about how many groups may begin now with a policy."""

    def enter(self, finished: FinishedGroup, *, pending: bool = False) -> OpenDataSet:
        """Count a finished group; return the data set that stores it, at once or, if it is `pending`, later."""

    def settle(self) -> None:
        """Go on after groups were stored; a stream commits each data set that has stored all of its groups."""

    def unstored(self) -> list[OpenDataSet]:
        """Return the data sets that get no more groups, but have some that are pending."""

    def lose(self, number: int) -> None:
        """Take back a group that runs or is pending, because its worker is gone: it is played again."""

    def finish(self, finished: FinishedGroup, rows: Iterable[Trajectory]) -> None:
        """See `Groups.finish`; commits what is complete then."""
        self.enter(finished).write(rows, finished)
        self.settle()


class Workers(Protocol):
    """The workers that play the groups of a rollout: this process, or others through a scheduler."""

    def serve(self, policy: PolicyVersion) -> None:
        """Make the engines serve a policy: at once, or as soon as each worker can.

        Raises:
            InferenceError: an engine does not start, or does not serve exactly this policy.
            ValueError: the policy's tokenizer cannot be used.
        """

    async def play(self, plan: RolloutPlan, groups: SharedGroups) -> None:
        """Play and store groups until nothing is left to do."""

    def score(
        self, trajectories: TrajectoriesVersion, draft: Draft, config: Config, annotations: ByRole = NO_ANNOTATIONS
    ) -> Grades:
        """Grade stored trajectories, and add the scores to a draft; scorers may read `annotations` of models."""


class Stoppable:
    """Play that another thread may stop, which is no error then."""

    def __init__(self) -> None:
        self.stopped = False
        self._task: asyncio.Task[None] | None = None
        self._lock = threading.Lock()

    async def play(self, playing: Callable[[], Awaitable[None]]) -> None:
        """Await `playing` until its end, unless it is stopped."""
        with self._lock:
            if self.stopped:
                return
            self._task = asyncio.current_task()
        try:
            await playing()
        except (asyncio.CancelledError, EngineClosedError):
            if not self.stopped:
                raise
        finally:
            with self._lock:
                self._task = None  # no more calls to its loop, which closes now

    def stop(self, *, running: bool = True) -> None:
        """Begin nothing more, and cancel what runs, if anything does."""
        with self._lock:
            self.stopped = True
            if self._task and running:
                self._task.get_loop().call_soon_threadsafe(self._task.cancel)


def play(
    plan: RolloutPlan,
    problems: Sequence[Problem],
    workers: Workers,
    draft: Draft,
    progress: Progress,
    spare: Iterable[Problem] = (),
) -> dict[str, Any]:
    """Play the groups of all `problems` with the plan's policy, which `workers` serve; return the rollout's metrics.

    Groups in shards that the draft took over from a killed attempt are not played again.

    If the plan selects, groups of `spare` problems replace the rejected groups, in a mixture those of the same member,
    for at most `rollout.max_resampling_rounds` rounds. Groups that are rejected after that are not replaced.

    Raises:
        InferenceError: the engine refuses a request, or serves another version.
        ValueError: more than `rollout.max_failed_share` of the episodes failed.
    """
    batch = _Batch(plan, problems, spare, draft, progress)
    WAITING.labels(draft.kind).set_function(lambda: batch.available(plan.policy))
    run_loop(workers.play(plan, batch))
    return batch.data_set.end()


class _Batch(SharedGroups):
    """The groups of one data set: those of the drawn problems, then those that replace rejected ones, in rounds."""

    def __init__(
        self, plan: RolloutPlan, problems: Sequence[Problem], spare: Iterable[Problem], draft: Draft, progress: Progress
    ) -> None:
        settings = plan.config.rollout
        self.changed = Change()
        self._plan, self._rounds = plan, settings.max_resampling_rounds
        self._mixed = bool(plan.config.problems.members)
        members = grouped((problem.source, problem) for problem in spare) if self._mixed else {"": spare}
        self._spares = {name: iter(problems) for name, problems in members.items()}
        self.data_set = OpenDataSet(draft, plan.iteration, plan.config, progress)
        self._rejected = {note["problem_id"]: bool(note["rejected"]) for note in draft.notes}  # of all groups played
        self._lock = threading.RLock()
        self._waiting: deque[Problem] = deque()
        self._begun: list[Problem] = []
        """By number of the group."""
        self._running: set[int] = set()
        self._begin_round(problems)
        self._begin_next_rounds()

    @property
    def complete(self) -> bool:
        with self._lock:
            return self._all_played and not self.data_set.pending

    def next(self, policy: PolicyVersion) -> Group | None:
        with self._lock:
            if not self._waiting or policy != self._plan.policy:
                return None
            number, problem = len(self._begun), self._waiting.popleft()
            self._begun.append(problem)
            self._running.add(number)
            return self._plan.group(problem, number)

    def available(self, policy: PolicyVersion) -> int:
        with self._lock:
            return len(self._waiting) if policy == self._plan.policy else 0

    def enter(self, finished: FinishedGroup, *, pending: bool = False) -> OpenDataSet:
        with self._lock:
            self.data_set.enter(finished, pending=pending)
            self._rejected[finished.problem_id] = finished.rejected
            self._running.remove(finished.number)
            self._begin_next_rounds()
        return self.data_set

    def settle(self) -> None:
        self.changed.note()

    def unstored(self) -> list[OpenDataSet]:
        with self._lock:
            return [self.data_set] if self._all_played and self.data_set.pending else []

    def lose(self, number: int) -> None:
        with self._lock:
            problem = self._begun[number]
            if number in self._running:
                self._running.remove(number)
            else:
                self.data_set.lose(number)
                del self._rejected[problem.problem_id]
            self._waiting.appendleft(problem)
        self.changed.note()

    @property
    def _all_played(self) -> bool:
        return not self._waiting and not self._running

    def _begin_round(self, problems: Sequence[Problem]) -> None:
        self._round = problems
        self.data_set.tally.expect(len(problems), self._plan.group_size)
        self._waiting.extend(problem for problem in problems if problem.problem_id not in self._rejected)

    def _begin_next_rounds(self) -> None:
        """After a round, begin the next one that killed attempts have not played, of spares for rejected problems."""
        while self._round and self._all_played and self._rounds:
            self._rounds -= 1
            rejected = [problem for problem in self._round if self._rejected[problem.problem_id]]
            spares = (next(self._spares.get(each.source if self._mixed else "", iter(())), None) for each in rejected)
            self._begin_round([spare for spare in spares if spare])


def run_loop(playing: Coroutine[Any, Any, None], *, freeze: bool = True) -> None:
    """Play in an event loop of this thread.

    Args:
        playing: what to play.
        freeze: whether garbage collections skip from now on what is in memory; not before all libraries are.

    Raises:
        RuntimeError: an agent's code ended, cancelled or stopped the whole rollout; says which of these.
    """
    if freeze:
        _freeze_libraries()
    threads = AgentThreads()
    try:
        with asyncio.Runner() as runner:
            runner.get_loop().set_default_executor(threads)
            try:
                runner.run(playing)
            except BaseException as error:
                if not isinstance(error, Exception):  # interrupted
                    threads.patience_s = 0.0
                raise
    except (SystemExit, asyncio.CancelledError, RuntimeError) as error:
        stopped = str(error).startswith("Event loop stopped")  # asyncio has no exception class for it
        if interrupts.raised_by_handler(error) or (isinstance(error, RuntimeError) and not stopped):
            raise
        if isinstance(error, SystemExit):
            did = f"called sys.exit({error.code!r})"
        else:
            did = "stopped the event loop" if stopped else "has cancelled the rollout's own tasks"
        remedy = "it must return, or raise another exception, and cancel only tasks that it started"
        raise RuntimeError(f"an agent {did}, which ends the rollout: {remedy}") from error


@cache
def _freeze_libraries() -> None:
    """Let garbage collections skip what is in memory now, once: half a million objects of torch and Prefect.

    Without this, a process that plays gets through a sixth fewer episodes. From then on collections are also rarer: at
    Python's default they took 13 % of what remains, since an episode in play has dozens of objects.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_OBJECTS)
