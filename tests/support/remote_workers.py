"""Workers that the flow takes for processes on other hosts; they run in threads of the test's process."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from storage.objects.store import Store
from storage.records import Problem
from storage.version_names import PolicyVersion
from storage.versions.checkpoints import Checkpoint
from tasks.rollout.handout import WorkerLostError
from tasks.rollout.messages import Orders, Report
from tasks.rollout.worker import Worker
from tasks.rollout.workers import LocalWorkers
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
        self.name = name
        local = LocalWorkers(engine, verifier, open_policy)  # type: ignore[arg-type] # it has the interface
        by_id = {problem.problem_id: problem for problem in problems}
        self.worker = Worker(local, store, Path("/nowhere"), lambda _: by_id)
        self.killed = False
        self.silent = False

    async def give(self, orders: Orders) -> None:
        self._check()
        await asyncio.to_thread(self.worker.give, orders)

    async def report(self) -> Report:
        self._check()
        report = await asyncio.to_thread(self.worker.report)
        self._check()
        if self.silent:
            await asyncio.Event().wait()
        return report

    def end(self) -> None:
        """Do nothing: `close` joins the threads."""

    def kill(self) -> None:
        self.killed = True

    def close(self) -> None:
        self.worker.close()

    def _check(self) -> None:
        if self.killed:
            raise WorkerLostError("killed")
