"""The stream: rollouts without a barrier between iterations.

Groups begin whenever workers have capacity, as far ahead of training as `rollout.max_head_offpolicyness` allows
(`tasks.rollout.places`). A data set is committed as soon as enough groups have finished, whichever those are. New
weights are swapped in meanwhile: running episodes go on with them, their tokens record which version sampled each, and
they belong to the data set in which they finish.

Groups are numbered in the order of the draws: group 70 is problem 6 of draw 2 if a draw has 32 problems. The manifest
of a data set lists the numbers of its groups, so that a stream that is continued plays no group twice and leaves none
out. The ids of trajectories name the draw.
"""

import functools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from opentelemetry import context

from storage import layout
from storage.logs.log import Log
from storage.objects.store import Store
from storage.records import Problem
from storage.telemetry.metrics import WAITING
from storage.version_names import PolicyVersion, TrajectoriesVersion
from storage.versions import manifests
from storage.versions.drafts import JournaledDraft, Provenance
from tasks.rollout.outcomes import FinishedGroup
from tasks.rollout.places import Places
from tasks.rollout.plan import Group, RolloutPlan
from tasks.rollout.play import Change, OpenDataSet, SharedGroups, Stoppable, Workers, run_loop

_DRAWS = 16
"""Draws in memory: running groups come from a few."""


class Stream(SharedGroups):
    """The rollouts of a run, from the data set that `plan.policy` is trained on to the last one.

    `play` plays in its thread until it is done; the workers call the methods of `tasks.rollout.play.Groups`.
    The thread that trains calls `wait`, `advance` and `stop`.

    Args:
        plan: what all groups share; `policy` is the newest checkpoint, which the workers serve.
        end: the data sets before this one are played.
        draw: returns the problems of a draw.
        workers: play the groups.
        store: the store of the run.
        provenance: who writes the data sets.
        progress: called with lines of text.
    """

    def __init__(
        self,
        plan: RolloutPlan,
        end: int,
        draw: Callable[[int], Sequence[Problem]],
        workers: Workers,
        store: Store,
        provenance: Provenance,
        progress: Callable[[str], None],
    ) -> None:
        self.changed = Change()
        self._plan, self._workers = plan, workers
        self._newest = plan.policy  # the newest checkpoint
        self._store, self._provenance, self._progress = store, provenance, progress
        self._draw = functools.lru_cache(_DRAWS)(draw)
        settings = plan.config.rollout
        first = plan.policy.number
        self._to_commit = end - first
        self._size = settings.problems_per_iteration
        self._per_data_set = min(self._size, len(self._draw(first)))
        self._open_data_sets: dict[int, OpenDataSet] = {}
        self._committed: set[int] = set()
        """The committed data sets; the places have this very set, which grows."""
        self._data_set_of: dict[int, int | None] = {}
        """For each group that is not trained on yet: the data set that stores it, or None while it waits or plays."""
        self._unplayed: deque[int] = deque()
        """Groups that began, but are in no data set, because their flow run or their worker ended before they did."""
        self._begun = 0
        """The first group that never began."""
        size, staleness = self._per_data_set, settings.max_head_offpolicyness
        self._resume(range(first, min(end, first + staleness + 1)))
        rejected = Counter({index: data_set.rejected for index, data_set in self._open_data_sets.items()})
        accepted = Counter({index: each.groups - each.rejected for index, each in self._open_data_sets.items()})
        most = size * (1 + settings.max_resampling_rounds)
        self._places = Places(first, end, size, staleness, most, accepted, rejected, self._committed)
        self._last_commit = time.monotonic()
        self._condition = threading.Condition()  # guards everything above that changes, and what follows
        self._playing, self._ended = Stoppable(), False
        self._error: BaseException | None = None

    def play(self) -> bool:
        """Play until all data sets of the run are committed, or until `stop`; return whether they are.

        Raises:
            InferenceError: the engine refuses a request, or serves another version.
            ValueError: more than `rollout.max_failed_share` of a data set's episodes failed.
        """
        try:
            self.settle()  # an earlier flow run may have been killed just before it committed a data set
            WAITING.labels("trajectories").set_function(lambda: self.available(self._newest))
            context.attach(context.Context())  # its spans are of no iteration; the context is the thread's own
            run_loop(self._playing.play(lambda: self._workers.play(self._plan, self)))
        except BaseException as error:
            self._error = error
            raise
        finally:
            for data_set in self._open_data_sets.values():
                data_set.draft.__exit__()  # deletes the local files
            with self._condition:
                self._ended = True
                self._condition.notify_all()
        return self.complete

    def wait(self, iteration: int) -> TrajectoriesVersion:
        """Wait until a data set is committed; return its version.

        Raises:
            Exception: the error that ended the stream.
        """
        with self._condition:
            self._places.take(iteration)
            self.changed.note()
            self._condition.wait_for(lambda: iteration in self._committed or self._ended)
        if iteration in self._committed:
            return layout.trajectories(self._plan.config.run.name, iteration)
        raise self._error or RuntimeError(f"the stream ended without data set {iteration}")

    def advance(self, policy: PolicyVersion) -> None:
        """Forget the data sets that a newer policy is trained on already; the workers begin groups with it."""
        with self._condition:
            self._newest = policy
            self._data_set_of = {n: i for n, i in self._data_set_of.items() if i is None or i >= policy.number}
        self.changed.note()

    def stop(self) -> None:
        """Cancel what runs. The next flow run continues from the shards in the journals."""
        self._playing.stop()

    @property
    def complete(self) -> bool:
        """See `Groups.complete`."""
        with self._condition:
            return len(self._committed) == self._to_commit

    def next(self, policy: PolicyVersion) -> Group | None:
        """See `Groups.next`."""
        with self._condition:
            if not self._places.may_begin(policy.number):
                return None
            number, problem = self._take()
            self._places.begin(number, policy.number)
            self._data_set_of[number] = None
        draw = number // self._size
        name = f"{self._plan.config.run.name}/{draw:06d}"
        return replace(self._plan, name=name, iteration=draw, policy=policy).group(problem, number)

    def available(self, policy: PolicyVersion) -> int:
        """See `SharedGroups.available`."""
        with self._condition:
            return self._places.wanted(policy.number)

    def enter(self, finished: FinishedGroup, *, pending: bool = False) -> OpenDataSet:
        """See `SharedGroups.enter`."""
        with self._condition:
            index = self._places.finish(finished.number, rejected=finished.rejected)
            self._data_set_of[finished.number] = index
        if index not in self._open_data_sets:
            self._open_data_sets[index] = self._open(index)
        self._open_data_sets[index].enter(finished, pending=pending)
        return self._open_data_sets[index]

    def settle(self) -> None:
        """See `SharedGroups.settle`."""
        for index, data_set in list(self._open_data_sets.items()):
            if self._places.is_closed(index) and not data_set.pending:
                self._commit(index)
        self.changed.note()

    def unstored(self) -> list[OpenDataSet]:
        """See `SharedGroups.unstored`."""
        with self._condition:
            pending = [(index, data_set) for index, data_set in self._open_data_sets.items() if data_set.pending]
            return [data_set for index, data_set in pending if self._places.is_closed(index)]

    def lose(self, number: int) -> None:
        """See `SharedGroups.lose`."""
        with self._condition:
            index = self._data_set_of[number]
            if index is None:
                self._places.lose(number)
            else:
                finished = self._open_data_sets[index].lose(number)
                self._places.reopen(index, rejected=finished.rejected)
            self._data_set_of[number] = None
            self._unplayed.append(number)
        self.changed.note()

    def _take(self) -> tuple[int, Problem]:
        """Take the next group that is still to be played: its number and its problem."""
        while True:
            if self._unplayed:
                number = self._unplayed.popleft()
            else:
                number, self._begun = self._begun, self._begun + 1
            draw, position = divmod(number, self._size)
            problems = self._draw(draw)
            if position < len(problems):
                return number, problems[position]

    def _open(self, index: int) -> OpenDataSet:
        version = layout.trajectories(self._plan.config.run.name, index)

        def progress(text: str) -> None:
            self._progress(type(text)(f"iteration {index}: {text}"))

        draft = JournaledDraft(self._store, version, "trajectories", self._provenance.fence)
        if any("group" not in note for note in draft.notes):  # played without `run.overlap`: these are played again
            with draft:
                draft.discard()
            draft = JournaledDraft(self._store, version, "trajectories", self._provenance.fence)
        data_set = OpenDataSet(draft, index, self._plan.config, progress, numbered=True)
        data_set.tally.expect(self._per_data_set, self._plan.group_size)
        return data_set

    def _commit(self, index: int) -> None:
        data_set = self._open_data_sets[index]
        with self._condition:
            begun = self._begun
            later = [n for n, other in self._data_set_of.items() if other is None or other > index]
        data_set.tally.started = self._last_commit
        stream = {"groups": data_set.numbers, "begun": begun, "later": sorted(later)}
        metrics = data_set.end() | {"groups": data_set.groups, "stream": stream}
        run = self._plan.config.run.name
        policies = [layout.checkpoint(run, number) for number in sorted(data_set.tally.policies, reverse=True)]
        data_set.draft.commit(self._provenance, [*policies, self._plan.problem_set], metrics)
        data_set.draft.__exit__()
        with self._condition:
            del self._open_data_sets[index]
            self._last_commit = time.monotonic()
            self._committed.add(index)
            self._condition.notify_all()

    def _resume(self, data_sets: range) -> None:
        """Take over what earlier flow runs have played of some data sets: those that are in reach of training.

        Example: version 3 is to be trained next, with 2 groups in a data set and a staleness of 1. Data set 2 was
        committed when groups 0 to 8 had begun, of which 5, 7 and 8 were in no data set up to 2. The journal of data
        set 3 holds 7. Then groups 5 and 8 are played again, and the next new one is 9.
        """
        run, size = self._plan.config.run.name, self._size
        before = _noted(self._store, layout.trajectories(run, data_sets.start - 1)) if data_sets.start else None
        begun, later = (before["begun"], before["later"]) if before else (data_sets.start * size, [])
        for index in data_sets:
            version = layout.trajectories(run, index)
            groups: Iterable[int] = ()
            if manifests.committed(self._store, version):
                self._committed.add(index)
                noted = _noted(self._store, version)
                groups = noted["groups"] if noted else range(index * size, (index + 1) * size)
            elif Log(self._store, layout.journal(version)).length():
                data_set = self._open_data_sets[index] = self._open(index)
                groups = data_set.numbers
            self._data_set_of |= dict.fromkeys(groups, index)
        self._begun = max([begun, *(number + 1 for number in self._data_set_of)])
        self._unplayed += sorted({*later, *range(begun, self._begun)} - self._data_set_of.keys())
        self._data_set_of |= dict.fromkeys(self._unplayed)


def _noted(store: Store, version: TrajectoriesVersion) -> dict[str, Any] | None:
    """Return what a stream noted in the manifest of a data set; None if no stream played it."""
    noted = manifests.read(store, version).metrics.get("stream")
    return noted if isinstance(noted, dict) else None
