"""Workers that the flow takes for processes on other hosts; they run in threads of the test's process."""

import asyncio
import errno
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from storage.objects.store import Store
from storage.records import Problem
from storage.version_names import PolicyVersion
from storage.versions.checkpoints import Checkpoint
from tasks.rollout.remote.messages import Failure, Orders, Report, WorkerFailedError, WorkerLostError
from tasks.rollout.remote.worker import Worker
from tasks.rollout.workers import LocalWorker
from tasks.score.scoring import ScoredShard, ShardOrder, score_shard
from tasks.score.verifier import Verifier
from tests.support.waiting_engine import WaitingEngine


class ThreadWorker:
    """A worker that `kill` ends as SIGKILL would: what it does from then on reaches nobody.

    Args:
        name: its name.
        engine: answers its requests.
        verifier: grades.
        store: the store of the run.
        problems: all problems.
        open_policy: opens a checkpoint.
    """

    def __init__(
        self,
        name: str,
        engine: WaitingEngine,
        verifier: Verifier,
        store: Store,
        problems: list[Problem],
        open_policy: Callable[[PolicyVersion], Checkpoint],
    ) -> None:
        self.name, self.plays, self.scored, self.got = name, True, 0, 0
        self._store, self._verifier = store, verifier

        def open_slowly(version: PolicyVersion) -> Checkpoint:
            time.sleep(self.delay_s)
            return open_policy(version)

        local = LocalWorker(engine, verifier, open_slowly)  # type: ignore[arg-type] # it has the interface
        by_id = {problem.problem_id: problem for problem in problems}
        self.worker = Worker(local, store, lambda _: by_id)
        self.killed = False
        self.silent = False
        self.delay_s = 0.0
        """How long it takes to open a policy."""
        self.full = False
        """Its disk is."""
        self.raises = False
        """An error leaves its process while it grades."""

    async def give(self, orders: Sequence[Orders]) -> None:
        self._check()
        self.got += sum(len(groups) for each in orders for groups in each.groups.values())
        await asyncio.to_thread(self.worker.give, orders)

    async def report(self) -> Report:
        self._check()
        report = await asyncio.to_thread(self.worker.report)
        self._check()
        if self.silent:
            await asyncio.Event().wait()
        return report

    async def score(self, order: ShardOrder) -> ScoredShard | Failure:
        self._check()
        self.scored += 1
        if self.raises:
            raise WorkerFailedError(Failure("RuntimeError", "the result cannot be sent", ""))
        try:
            if self.full:
                raise OSError(errno.ENOSPC, "No space left on device")
            scored = await asyncio.to_thread(score_shard, self._store, Path("/nowhere"), self._verifier, order)
        except Exception as error:  # noqa: BLE001 # as in a process of its own
            return Failure.of(error)
        self._check()
        return scored

    def end(self) -> None:
        """Do nothing: `close` joins the threads."""

    def kill(self) -> None:
        self.killed = True

    def close(self) -> None:
        self.worker.__exit__()

    def _check(self) -> None:
        if self.killed:
            raise WorkerLostError("killed")
