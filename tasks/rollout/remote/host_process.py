"""A worker in a process of its own on this host: both ends of the pipe between it and the flow.

The flow sends calls of `HostWorker`'s methods, several at a time; the process sends their results, and what it logs.
"""

import asyncio
import contextvars
import itertools
import logging
import multiprocessing
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from storage import interrupts
from storage.objects.store import Store
from storage.processes.child import end_with_parent
from storage.versions.fetch import fetch_in_turn
from tasks.child_process import forward_logs, log_again
from tasks.inference.engine import Engine
from tasks.rollout.plan import RolloutPlan
from tasks.rollout.remote.handout import WorkerFailedError, WorkerLostError
from tasks.rollout.remote.host_worker import HostWorker
from tasks.rollout.remote.messages import Failure, Orders, Report
from tasks.rollout.remote.scoring_job import CALLS
from tasks.rollout.remote.shares import Share
from tasks.score.scoring import ScoredShard, ShardOrder

OpenEngine = Callable[[Share, Path], AbstractContextManager[Engine]]
"""Opens the engine of a process with a share; the path is that of the folder for logs."""


def open_engine(share: Share, logs: Path) -> Engine:
    """Open the engine with the share's servers."""
    return Engine(share.config.inference, share.config.rollout, logs, share.devices)


class HostProcess:
    """A `HostWorker` in a new process, as `tasks.rollout.remote.shared_rollout.RemoteWorker`.

    The kernel kills the process when the thread that started it ends. It gets no Ctrl-C.

    Args:
        share: what it has.
        name: its name, also that of its folder for logs.
        open_engine: a function of a module, which the process imports.
    """

    plays = True

    def __init__(self, share: Share, name: str, open_engine: OpenEngine) -> None:
        self.name, self._share = name, share
        self._numbers, self._calls = itertools.count(), dict[int, Future[Any]]()
        self._lock = threading.Lock()
        self._lost: WorkerLostError | None = None
        context = multiprocessing.get_context("spawn")  # a fork of this process, with its threads, would be unsafe
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, share, name, open_engine), name=name)
        with interrupts.starting_processes():
            self._process.start()
        theirs.close()  # so that `recv` ends when the process does
        self._sending = ThreadPoolExecutor(1, f"{name}-sends")
        around = contextvars.copy_context().run  # with the context in which Prefect knows where logs go
        self._receiving = threading.Thread(target=around, args=[self._receive], name=f"{name}-receives", daemon=True)
        self._receiving.start()

    async def give(self, orders: Orders) -> None:
        own = {number: self._own_part(plan) for number, plan in orders.begin.items()}
        await self._call("give", replace(orders, begin=own))

    async def report(self, patience_s: float) -> Report:
        report: Report = await self._call("report", patience_s)
        return report

    async def score(self, order: ShardOrder) -> ScoredShard | Failure:
        scored: ScoredShard | Failure = await self._call("score", order)
        return scored

    def end(self) -> None:
        """Ask the process to end by itself."""
        with suppress(RuntimeError):  # it has ended
            self._sending.submit(self._connection.send, None)

    def kill(self) -> None:
        self._process.kill()

    def join(self, seconds: float) -> None:
        """Wait for its end; kill it after some seconds."""
        self._process.join(seconds)
        self._process.kill()
        self._receiving.join()

    def _own_part(self, plan: RolloutPlan) -> RolloutPlan:
        """Return the plan with this process's part of `rollout.concurrency`."""
        own = {"concurrency": self._share.config.rollout.concurrency}
        rollout = plan.config.rollout.model_copy(update=own)
        return replace(plan, config=plan.config.model_copy(update={"rollout": rollout}))

    async def _call(self, method: str, *arguments: Any) -> Any:
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # a caller that no longer waits must not cancel it
        with self._lock:
            if self._lost:
                raise self._lost
            number = next(self._numbers)
            self._calls[number] = future
            self._sending.submit(self._send, number, method, arguments)  # in a thread, because a full pipe blocks
        return await asyncio.wrap_future(future)

    def _send(self, *call: Any) -> None:
        with suppress(OSError):  # the process has ended: `_receive` notices it, too
            self._connection.send(call)

    def _receive(self) -> None:
        """Pass on what the process sends, until it has ended; the body of a thread."""
        with suppress(EOFError, OSError):
            while True:
                number, result, failure = self._connection.recv()
                if number is None:
                    log_again(result, f"{self.name}: ")
                elif failure:
                    self._calls.pop(number).set_exception(WorkerFailedError(failure))
                else:
                    self._calls.pop(number).set_result(result)
        self._process.kill()  # perhaps only its pipe is closed
        self._process.join()
        with self._lock:
            self._lost = WorkerLostError(f"its process has ended with exit code {self._process.exitcode}")
            self._sending.shutdown()
        for future in self._calls.values():
            future.set_exception(self._lost)
        self._connection.close()


def _serve(connection: Connection, share: Share, name: str, open_engine: OpenEngine) -> None:
    """Answer calls until the flow asks for the end; the main function of the process."""
    end_with_parent()
    config, sending = share.config, threading.Lock()
    logs = Path(config.storage.cache) / "logs" / config.run.name / name

    def send(number: int | None, result: Any, failure: Failure | None = None) -> None:
        data = ForkingPickler.dumps((number, result, failure))  # it may log, and so call this function
        with sending:
            connection.send_bytes(data)

    def answer(number: int, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            send(number, getattr(worker, method)(*arguments))
        except Exception as error:  # noqa: BLE001 # the flow raises it
            send(number, None, Failure.of(error))

    forward_logs(lambda log: send(None, log))
    worker = HostWorker(config, lambda: Store.of(config.storage), lambda: open_engine(share, logs), fetch_in_turn)
    with ThreadPoolExecutor(CALLS, "answers") as answering:
        while call := connection.recv():
            answering.submit(answer, *call)
        worker.close()
    logging.shutdown()
