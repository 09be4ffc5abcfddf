"""One rollout: the groups of one data set are played and stored as shards of a draft, with progress."""

import asyncio
import gc
import itertools
import sys
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from functools import cache
from typing import Any

from storage import interrupts
from storage.records import Problem
from storage.version_names import PolicyVersion
from storage.versions.drafts import Draft
from tasks.rollout.data_set import FinishedGroup, OpenDataSet
from tasks.rollout.groups import Change
from tasks.rollout.plan import RolloutPlan, Start
from tasks.rollout.threads import AgentThreads
from tasks.rollout.workers import Workers


def play(
    plan: RolloutPlan,
    problems: Sequence[Problem],
    workers: Workers,
    draft: Draft,
    progress: Callable[[str], None],
    spare: Iterable[Problem] = (),
) -> dict[str, Any]:
    """Play the groups of all `problems` with the plan's policy, which `workers` serve; return the rollout's metrics.

    Groups in shards that the draft took over from a killed attempt are not played again.

    If the plan selects, groups of `spare` problems replace the rejected groups, for at most
    `rollout.max_resampling_rounds` rounds. Groups that are rejected after that are not replaced.

    Raises:
        InferenceError: the engine refuses a request, or serves another version.
        ValueError: more than `rollout.max_failed_share` of the episodes failed.
    """
    batch = _Batch(plan, problems, iter(spare), draft, progress)
    run_loop(workers.play(plan, batch))
    return batch.end()


class _Batch:
    """The groups of one data set: those of the drawn problems, then those that replace rejected ones, in rounds."""

    def __init__(
        self,
        plan: RolloutPlan,
        problems: Sequence[Problem],
        spares: Iterator[Problem],
        draft: Draft,
        progress: Callable[[str], None],
    ) -> None:
        settings = plan.config.rollout
        self.changed = Change()
        self._plan, self._spares, self._rounds = plan, spares, settings.max_resampling_rounds
        self._data_set = OpenDataSet(draft, plan.iteration, plan.config, progress)
        self._rejected = {note["problem_id"]: bool(note["rejected"]) for note in draft.notes}  # of all groups played
        self._lock = threading.RLock()
        self._round: Sequence[Problem] = ()
        self._waiting: deque[Problem] = deque()
        self._begun: list[Problem] = []
        """By number of the group."""
        self._running: set[int] = set()
        self._begin_round(problems)

    @property
    def complete(self) -> bool:
        with self._lock:
            return self._all_played and not self._data_set.pending

    def next(self, policy: PolicyVersion) -> Start | None:
        with self._lock:
            if not self._waiting or policy != self._plan.policy:
                return None
            number, problem = len(self._begun), self._waiting.popleft()
            self._begun.append(problem)
            self._running.add(number)
            return Start(self._plan, problem, number)

    def available(self, policy: PolicyVersion) -> int:
        with self._lock:
            return len(self._waiting) if policy == self._plan.policy else 0

    def finish(self, finished: FinishedGroup, *, pending: bool = False) -> OpenDataSet:
        with self._lock:
            self._data_set.enter(finished, pending=pending)
            self._rejected[finished.problem_id] = finished.rejected
            self._running.remove(finished.number)
            if self._all_played and self._rounds:
                self._rounds -= 1
                self._begin_round(self._replacements())
        return self._data_set

    def settle(self) -> None:
        self.changed.note()

    def unstored(self) -> list[OpenDataSet]:
        with self._lock:
            return [self._data_set] if self._all_played and self._data_set.pending else []

    def lose(self, number: int) -> None:
        with self._lock:
            problem = self._begun[number]
            if number in self._running:
                self._running.remove(number)
            else:
                self._data_set.lose(number)
                del self._rejected[problem.problem_id]
            self._waiting.appendleft(problem)
        self.changed.note()

    def end(self) -> dict[str, Any]:
        """Store what is still in memory; return the metrics."""
        self._data_set.flush()
        self._data_set.check(self._plan.config.rollout.max_failed_share)
        return self._data_set.tally.metrics(groups_rejected=sum(self._rejected.values()))

    @property
    def _all_played(self) -> bool:
        return not self._waiting and not self._running

    def _begin_round(self, problems: Sequence[Problem]) -> None:
        """Begin a round, or the first later one that killed attempts have not played."""
        self._round = problems
        self._data_set.tally.expect(len(problems), self._plan.group_size)
        self._waiting.extend(problem for problem in problems if problem.problem_id not in self._rejected)
        if problems and not self._waiting and self._rounds:
            self._rounds -= 1
            self._begin_round(self._replacements())

    def _replacements(self) -> Sequence[Problem]:
        """Return spare problems for the rejected ones of this round."""
        count = sum(self._rejected[problem.problem_id] for problem in self._round)
        return list(itertools.islice(self._spares, count))


def run_loop(playing: Coroutine[Any, Any, None]) -> None:
    """Play in an event loop of this thread.

    Raises:
        RuntimeError: an agent's code ended, cancelled or stopped the whole rollout; says which of these.
    """
    _freeze_libraries()
    try:
        asyncio.run(_with_threads(playing))
    except (SystemExit, asyncio.CancelledError) as error:
        if interrupts.raised_by_handler(error):
            raise
        if isinstance(error, SystemExit):
            cause, remedy = f"a task of an agent called sys.exit({error.code!r})", "raise another exception"
        else:
            cause, remedy = "an agent has cancelled the rollout's own tasks", "cancel only tasks that it started"
        raise RuntimeError(f"{cause}, which ends the rollout: it must {remedy}") from error
    except RuntimeError as error:
        if not str(error).startswith("Event loop stopped"):  # asyncio has no exception class for it
            raise
        raise RuntimeError("an agent stopped the event loop, which ends the rollout: it must return instead") from error


@cache
def _freeze_libraries() -> None:
    """Let garbage collections skip what is in memory now, once: half a million objects of torch and Prefect.

    Otherwise each full collection takes 0.4 s of a flow's process.
    """
    gc.collect()
    gc.freeze()


async def _with_threads(playing: Coroutine[Any, Any, None]) -> None:
    threads = AgentThreads()
    asyncio.get_running_loop().set_default_executor(threads)
    try:
        await playing
    finally:
        if not isinstance(sys.exception(), Exception | None):  # interrupted
            threads.patience_s = 0.0
