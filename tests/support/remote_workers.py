"""Workers that the flow takes for processes on other hosts; they run in threads of the test's process."""

import asyncio
import errno
import time
import traceback
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate

from storage.objects.store import Store
from storage.records import Problem
from storage.version_names import PolicyVersion
from storage.versions.checkpoints import Checkpoint
from tasks.rollout.remote.interface import P, T, WorkerFailedError, WorkerLostError
from tasks.rollout.remote.worker import Worker
from tasks.rollout.workers import LocalWorker
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

    plays = True

    def __init__(
        self,
        name: str,
        engine: WaitingEngine,
        verifier: Verifier,
        store: Store,
        problems: list[Problem],
        open_policy: Callable[[PolicyVersion], Checkpoint],
    ) -> None:
        def open_slowly(version: PolicyVersion) -> Checkpoint:
            time.sleep(self.delay_s)
            return open_policy(version)

        self.name, self.got, self.scored = name, 0, 0
        self.local = LocalWorker(engine, verifier, open_slowly)  # type: ignore[arg-type] # it has the interface
        by_id = {problem.problem_id: problem for problem in problems}
        self.worker = Worker(self.local, store, lambda _: by_id)
        self.killed = False
        self.silent = False
        self.delay_s = 0.0
        """How long it takes to open a policy."""
        self.answer_s = 0.0
        """How late it says what it lacks."""
        self.scoring: Exception | None = None
        """The error of its scores: its disk is full, say."""

    async def call(
        self, method: Callable[Concatenate[Worker, P], Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        self._check()
        self.got += method is Worker.play
        self.scored += method is Worker.score
        try:
            if method is Worker.score and self.scoring:
                raise self.scoring
            result = await method(self.worker, *args, **kwargs)
            if method is Worker.lacking:
                await asyncio.sleep(self.answer_s)
        except Exception as error:
            raise WorkerFailedError(error, traceback.format_exc()) from error
        self._check()
        if self.silent:
            await asyncio.Event().wait()
        return result

    def end(self) -> None:
        """Do nothing: `close` joins the threads."""

    def kill(self) -> None:
        self.killed = True

    def close(self) -> None:
        self.worker.__exit__()

    def _check(self) -> None:
        if self.killed:
            raise WorkerLostError("killed")


FULL = OSError(errno.ENOSPC, "No space left on device")
