"""The groups of a rollout: who plays them takes one after another, and gives each back when it is finished or lost."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

from storage.records import Trajectory
from storage.version_names import PolicyVersion
from tasks.rollout.data_set import FinishedGroup, OpenDataSet
from tasks.rollout.plan import Group, Start


class Sink(Protocol):
    """A place for trajectories."""

    def write(self, rows: Iterable[Trajectory], finished: FinishedGroup) -> None:
        """Store the trajectories of a finished group."""
        ...


class Groups(Protocol):
    """The groups of one rollout. One thread at a time may call `finish` and `settle`; others may call meanwhile."""

    changed: "Change"
    """Noted when a group may begin that could not before, when a data set is unstored, and when nothing is left."""

    @property
    def complete(self) -> bool:
        """True if nothing is left to play or to store."""
        ...

    def next(self, policy: PolicyVersion) -> Start | None:
        """Begin a group with a policy and return it; None if none may begin now."""
        ...

    def finish(self, finished: FinishedGroup) -> Sink:
        """Count a finished group; return the place for its trajectories."""
        ...

    def settle(self) -> None:
        """Commit every data set that has stored all its groups; call it after groups were stored."""
        ...


class SharedGroups(Groups, Protocol):
    """The groups of a rollout that many workers share, any of which may be lost.

    One thread at a time may call `finish`, `settle`, `unstored` and `lose`.
    """

    def available(self, policy: PolicyVersion) -> int:
        """Return about how many groups may begin now with a policy."""
        ...

    def finish(self, finished: FinishedGroup, *, pending: bool = False) -> OpenDataSet:
        """Count a finished group; return the data set that stores it, at once or, if it is `pending`, later."""
        ...

    def unstored(self) -> list[OpenDataSet]:
        """Return the data sets that get no more groups, but have some that are pending."""
        ...

    def lose(self, number: int) -> None:
        """Take back a group that runs or is pending, because its worker is gone: it is played again."""
        ...


class Change:
    """Wakes the coroutine that waits for a change; any thread may note one."""

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
            if self._loop:
                self._loop.call_soon_threadsafe(self._noted.set)

    async def wait(self) -> None:
        """Wait for a change since the last call."""
        await self._noted.wait()
        self._noted.clear()


async def as_they_begin(groups: Groups, policy: Callable[[], PolicyVersion]) -> AsyncIterator[Group]:
    """Yield each group as soon as it may begin with the policy that is served then, until nothing is left to do."""
    while not groups.complete:
        if start := groups.next(policy()):
            yield start.group()
        else:
            await groups.changed.wait()
