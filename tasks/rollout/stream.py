"""The stream: rollouts without a barrier between iterations.

Groups begin whenever there is room, as far ahead of training as `rollout.max_head_offpolicyness` allows
(`tasks.rollout.assignment`). A data set is committed as soon as enough groups have finished, whichever those are. New
weights are swapped in meanwhile: running episodes go on with them, their tokens record which version sampled each, and
they belong to the data set in which they finish.

Groups are numbered in the order of the draws: group 70 is problem 6 of draw 2 if a draw has 32 problems. The manifest
of a data set lists the numbers of its groups, so that a stream that is continued plays no group twice and leaves none
out. The ids of trajectories name the draw.
"""

import asyncio
import functools
import gc
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace

from storage import layout
from storage.objects.store import Store
from storage.records import Problem, Trajectory
from storage.version_names import TrajectoriesVersion
from storage.versions.checkpoints import Checkpoint
from storage.versions.drafts import Provenance
from tasks.inference.api import EngineClosedError
from tasks.inference.engine import Engine
from tasks.rollout.assignment import Assignment
from tasks.rollout.plan import Group, RolloutPlan
from tasks.rollout.play import open_collector, refuse_closed, run_loop
from tasks.rollout.selection import is_rejected, select_episodes
from tasks.rollout.stream_data import OpenDataSet, read_played
from tasks.score.verifier import Verifier

_DRAWS = 16
"""Draws in memory: running groups come from a few."""


class Stream:
    """The rollouts of a run, from the data set that `plan.policy` is trained on to the last one.

    `play` plays in its thread until it is done. The other methods are called by the thread that trains.

    Args:
        plan: what all groups share; `policy` is the newest checkpoint, which the engine serves.
        end: the data sets before this one are played.
        draw: returns the problems of a draw.
        engine: answers the requests.
        verifier: for the environments.
        store: the store of the run.
        provenance: who writes the data sets.
        progress: called with lines of text.
    """

    def __init__(
        self,
        plan: RolloutPlan,
        end: int,
        draw: Callable[[int], Sequence[Problem]],
        engine: Engine,
        verifier: Verifier,
        store: Store,
        provenance: Provenance,
        progress: Callable[[str], None],
    ) -> None:
        self._plan, self._engine, self._verifier = plan, engine, verifier
        self._store, self._provenance, self._progress = store, provenance, progress
        self._draw = functools.lru_cache(_DRAWS)(draw)
        settings, run = plan.config.rollout, plan.config.run
        self._policy, first = plan.policy, plan.policy.number
        self._size = settings.problems_per_iteration
        self._places = min(self._size, len(self._draw(first)))
        reach = range(first, min(end, first + settings.max_head_offpolicyness + 1))
        played = read_played(store, run.name, reach, self._size, self._number_of, self._open)
        self._unplayed, self._begun = played.unplayed, played.next
        self._data_set_of: dict[int, int | None] = {**dict.fromkeys(played.unplayed), **played.data_set_of}
        self._open_data_sets, self._committed = played.opened, played.committed
        self._assignment = Assignment(
            first,
            end,
            self._places,
            settings.max_head_offpolicyness,
            self._places * (1 + settings.max_resampling_rounds),
            played.accepted,
            played.rejected,
            played.committed,
        )
        self._last_commit = time.monotonic()
        self._changed = threading.Condition()  # guards everything above that changes, and what follows
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._stopping = self._keeping = self._ended = False
        self._error: BaseException | None = None

    def play(self) -> bool:
        """Play until all data sets of the run are committed, or until `stop`; return whether they are.

        Raises:
            InferenceError: the engine refuses a request, or serves another version.
            ValueError: more than `rollout.max_failed_share` of a data set's episodes failed.
        """
        gc.freeze()  # collections skip half a million objects of torch and Prefect: halves the client's CPU time
        try:
            run_loop(self._play())
            for data_set in self._open_data_sets.values() if self._keeping else ():
                data_set.keep()
        except BaseException as error:
            self._error = error
            raise
        finally:
            gc.unfreeze()
            for data_set in self._open_data_sets.values():
                data_set.close()
            with self._changed:
                self._ended = True
                self._changed.notify_all()
        return self._assignment.complete

    def wait(self, iteration: int) -> TrajectoriesVersion:
        """Wait until a data set is committed; return its version.

        Raises:
            Exception: the error that ended the stream.
        """
        with self._changed:
            self._assignment.take(iteration)
            self._wake_up()
            self._changed.wait_for(lambda: iteration in self._committed or self._ended)
        if iteration in self._committed:
            return layout.trajectories(self._plan.config.run.name, iteration)
        raise self._error or RuntimeError(f"the stream ended without data set {iteration}")

    def advance(self, policy: Checkpoint) -> None:
        """Begin groups with a newer policy from now on; the engine must serve it already."""
        with self._changed:
            self._policy = policy
            trained = [n for n, index in self._data_set_of.items() if index is not None and index < policy.number]
            for number in trained:
                del self._data_set_of[number]
        self._wake_up()

    def stop(self, *, keep: bool) -> None:
        """Cancel what runs. With `keep`, store the finished groups that are still in memory, for the next flow run."""
        with self._changed:
            self._stopping, self._keeping = True, keep
            if self._task:
                self._task.get_loop().call_soon_threadsafe(self._task.cancel)

    async def _play(self) -> None:
        with self._changed:
            if self._stopping:
                return
            self._task = asyncio.current_task()
        try:
            async with open_collector(self._plan, self._engine, self._verifier) as collector:
                await collector.collect(self._groups(), self._plan.together, self._store_group)
        except (asyncio.CancelledError, EngineClosedError):
            if not self._stopping:
                raise
        finally:
            with self._changed:
                self._task = None  # no more calls to its loop, which closes now

    async def _groups(self) -> AsyncIterator[Group]:
        """Yield groups as soon as each may begin."""
        for number, problem in self._problems():
            while True:
                self._wake.clear()
                if self._assignment.complete:
                    return
                if policy := self._begin(number):
                    break
                await self._wake.wait()
            draw = number // self._size
            name = f"{self._plan.config.run.name}/{draw:06d}"
            yield replace(self._plan, name=name, iteration=draw, policy=policy).group(problem, number)

    def _problems(self) -> Iterator[tuple[int, Problem]]:
        """Yield the groups that are still to be played: their numbers and problems."""
        for number in itertools.chain(self._unplayed, itertools.count(self._begun)):
            draw, place = divmod(number, self._size)
            problems = self._draw(draw)
            if place < len(problems):
                yield number, problems[place]

    def _begin(self, number: int) -> Checkpoint | None:
        """Begin a group; return the policy that it begins with, or None if it must wait."""
        with self._changed:
            if not self._assignment.may_begin(self._policy.number):
                return None
            self._assignment.begin(number, self._policy.number)
            self._begun = max(self._begun, number + 1)
            self._data_set_of[number] = None
            return self._policy

    def _store_group(self, group: Group, trajectories: list[Trajectory]) -> None:
        """Store a finished group, and commit every data set that is closed by it. Runs in a thread."""
        refuse_closed(self._engine)
        selected = select_episodes(trajectories, self._plan.config.rollout)
        rejected = is_rejected(trajectories, selected)
        with self._changed:
            index = self._assignment.finish(group.number, rejected=rejected)
            self._data_set_of[group.number] = index
        if index not in self._open_data_sets:
            self._open_data_sets[index] = self._open(index)
        self._open_data_sets[index].add(selected, group.number, rejected=rejected)
        for closed in [i for i in self._open_data_sets if self._assignment.is_closed(i)]:
            self._commit(closed)
        self._wake_up()

    def _open(self, index: int) -> OpenDataSet:
        version = layout.trajectories(self._plan.config.run.name, index)
        return OpenDataSet(self._store, version, self._provenance, self._plan, self._places, self._progress)

    def _commit(self, index: int) -> None:
        data_set = self._open_data_sets.pop(index)
        try:
            with self._changed:
                begun = self._begun
                later = [n for n, other in self._data_set_of.items() if other is None or other > index]
            data_set.commit(begun, sorted(later), since=self._last_commit)
        finally:
            data_set.close()
        with self._changed:
            self._last_commit = time.monotonic()
            self._committed.add(index)
            self._changed.notify_all()

    def _wake_up(self) -> None:
        """Let `_groups` look again whether a group may begin; may be called from any thread."""
        with self._changed:
            if self._task:
                self._task.get_loop().call_soon_threadsafe(self._wake.set)

    def _number_of(self, draw: int, problem_id: str) -> int | None:
        ids = [problem.problem_id for problem in self._draw(draw)]
        return draw * self._size + ids.index(problem_id) if problem_id in ids else None
