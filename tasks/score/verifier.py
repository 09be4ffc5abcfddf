r"""The verifier: it grades in worker processes that can be killed. It grades each distinct pair once.

    with Verifier(workers=2) as verifier:
        verifier.grade([("so it is \\boxed{19}", ["19"]), ("1/2", ["0.5"])])  # two Verdicts, both correct
        await verifier.grade_async("\\boxed{19}", ["19"])                      # the same, in a rollout
        verifier.call("my_package.my_module:score", [(answer, args)])          # a user's function, not kept

math-verify can run for ever (`9^{9^{9^{9}}}`), and its own timeouts work only in a main thread. So it runs in pebble's
worker processes, which get chunks of answers, each chunk with one time limit. If a chunk exceeds the limit or its
worker dies, its answers are graded again one by one. Only the answer that causes it becomes a `timeout` or an `error`.

The limit is processor time, which the kernel measures: a machine that stalls or has other work changes no verdict.
If a worker dies for another reason, or makes no progress for minutes, that proves nothing: its answer is graded again.
If an idle worker dies, pebble breaks the whole pool, and can lose a chunk that it receives at that moment. So a thread
checks the pool, replaces it if it is broken, and sends all requests without a verdict to the new one.
The cache keeps only verdicts that math-verify returned. After a timeout, a dead worker or too little memory, the next
request for this pair is graded again.
"""

import asyncio
import atexit
import hashlib
import logging
import math
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pebble import ProcessExpired, ProcessFuture, ProcessPool

from configs.models import Role
from storage import interrupts
from storage.processes.child import for_pools
from storage.processes.limits import OUT_OF_TIME
from storage.records import VerdictName
from storage.telemetry.metrics import VERIFIER
from tasks.registry import CodeChangedError, files_of
from tasks.score import worker
from tasks.score.verdict import LIMIT_MET, Annotations, Answer, RunProgram, Verdict

logger = logging.getLogger(__name__)

_LARGEST_CHUNK = 32
_TRIES = 3


class VerifierBrokenError(RuntimeError):
    """The verifier was closed, or its workers cannot be replaced: no answer is to blame."""


@dataclass(slots=True, eq=False)
class _Request:
    key: bytes
    function: str  # that the workers call
    item: tuple[Any, ...]  # its arguments
    solutions: tuple[str, ...]  # of the problem
    future: "Future[Verdict]" = field(default_factory=Future)
    asked: float = field(default_factory=time.monotonic)
    lost: int = 0  # how often a worker, or a whole pool, ended or hung with it

    def __post_init__(self) -> None:
        self.future.set_running_or_notify_cancel()  # callers share it: one's cancellation must not cancel it for all


MEMORY_MB = 2048
"""An answer that needs more megabytes of memory counts as `error`."""


class Verifier(AbstractContextManager["Verifier"]):
    """The verifier, with `workers` worker processes. Threads and event loops may share it.

    An answer gets `timeout_s` seconds of processor time, and `memory_mb` MB above the memory of an idle worker.
    The cache holds the verdicts of the last `cache_size` distinct pairs, about 0.6 kB each. `function` grades an
    answer.
    """

    def __init__(
        self,
        workers: int = 2,
        timeout_s: float = 5,
        memory_mb: int = MEMORY_MB,
        cache_size: int = 1_000_000,
        function: str = "tasks.score.contract:grade",
    ) -> None:
        self._workers, self._timeout_s, self._memory_mb, self._function = workers, timeout_s, memory_mb, function
        self._patience_s = 60 + 10 * timeout_s  # wall-clock limit, only against a worker that waits for ever
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._pool = self._make_pool()
        self._cache_size = cache_size
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()
        self._in_flight: dict[bytes, _Request] = {}
        self.sent = 0
        """Number of pairs sent to workers so far; the cache, or a pair already in flight, answered all others."""
        around = copy_context().run  # with the context in which Prefect knows where logs go
        self._watch = threading.Thread(target=around, args=[self._watch_pool], name="verifier", daemon=True)
        self._watch.start()
        # At exit, pebble ends the workers of a verifier that nobody closed. They must not be replaced.
        atexit.register(self._closed.set)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes; callers that still wait for a verdict get a VerifierBrokenError."""
        with self._lock:
            self._closed.set()
        atexit.unregister(self._closed.set)
        self._watch.join()
        _end(self._pool)
        with self._lock:
            waiting, self._in_flight = list(self._in_flight.values()), {}
        for request in waiting:  # the pool does not complete all of them
            request.future.set_exception(VerifierBrokenError("the verifier was closed"))

    def _make_pool(self) -> ProcessPool:
        # Workers are spawned: a fork of this process, with its threads and models, would be unsafe.
        begin = [os.getpid(), self._timeout_s, self._memory_mb, self._function]
        pool = ProcessPool(self._workers, initializer=worker.prepare, initargs=begin, context=for_pools())
        try:
            with interrupts.starting_processes():
                if not pool.active:  # this starts the workers, and threads that replace them
                    raise OSError("the verifier's processes end while they start")
        except BaseException:  # also an interrupt
            _end(pool)
            raise
        return pool

    def _watch_pool(self) -> None:
        """Replace the pool whenever it is broken, until the verifier is closed."""
        while not self._closed.wait(0.2):
            if not self._pool.active:
                self._replace_pool()

    def _replace_pool(self) -> None:
        broken, why = self._pool, f"its workers died {_TRIES} times; does `ulimit -v` leave them memory to start?"
        _end(broken)
        try:
            pool = self._make_pool()
        except Exception as error:  # noqa: BLE001 - passed to the callers that wait for the verdicts
            pool, why = broken, f"its workers cannot be started again: {error!r}"
            logger.error("Verifier: %s", why)
        with self._lock:  # requests that come later are sent to the new pool
            self._pool, waiting = pool, [*self._in_flight.values()]
        for request in waiting:
            request.lost += 1
            if request.lost < _TRIES and pool is not broken:
                self._send([request])
            else:
                self._give_up([request], why)

    def grade(self, pairs: Sequence[tuple[str, Sequence[str]]]) -> list[Verdict]:
        """Return the verdicts on (answer, solutions) pairs, in order; an answer may match any of its solutions."""
        return [future.result() for future in self._submit(pairs)]

    def call(self, function: str, calls: Sequence[tuple[Answer, Mapping[str, Any]]]) -> list[Verdict]:
        """Return the verdicts of a user's `package.module:function` on answers with arguments, in order.

        The limits of an answer apply to each call. Nothing is kept in the cache.
        """
        solutions = [tuple(answer.row["solutions"]) for answer, _ in calls]
        requests = [_Request(os.urandom(16), function, item, of) for item, of in zip(calls, solutions, strict=True)]
        return [future.result() for future in self._send_all(requests)]

    async def grade_async(self, answer: str, solutions: Sequence[str]) -> Verdict:
        """Return the verdict on one pair, without blocking the event loop."""
        future = self._submit([(answer, solutions)])[0]
        return future.result() if future.done() else await asyncio.wrap_future(future)

    def _submit(self, pairs: Sequence[tuple[str, Sequence[str]]]) -> "list[Future[Verdict]]":
        """Return a future for each pair."""
        requests = []
        for answer, solutions in pairs:
            if isinstance(solutions, str) or not solutions:
                remedy = "for games and the like set environment.type and score.type to others than math-verify"
                raise ValueError(f"solutions={solutions!r}: give a list of 1 or more gold answers; {remedy}")
            pair = (answer, tuple(solutions))  # `repr` escapes lone surrogates
            key = hashlib.blake2b(repr((self._function, pair)).encode(), digest_size=16).digest()
            requests.append(_Request(key, self._function, pair, pair[1]))
        return self._send_all(requests)

    def _send_all(self, requests: "Sequence[_Request]") -> "list[Future[Verdict]]":
        """Return a future for each request. Send new ones in chunks, sorted so that equal solutions are parsed once."""
        futures, new = [], []
        with self._lock:
            if self._closed.is_set():
                raise VerifierBrokenError("the verifier was closed")
            for request in requests:
                known = self._known(request.key)
                if known is None:
                    self._in_flight[request.key] = request
                    new.append(request)
                futures.append(known or request.future)
            self.sent += len(new)
        new.sort(key=lambda request: request.solutions)
        size = max(1, min(_LARGEST_CHUNK, math.ceil(len(new) / (2 * self._workers))))
        for start in range(0, len(new), size):
            self._send(new[start : start + size])
        return futures

    def _known(self, key: bytes) -> "Future[Verdict] | None":
        if key not in self._verdicts:
            return self._in_flight[key].future if key in self._in_flight else None
        self._verdicts.move_to_end(key)
        future: Future[Verdict] = Future()
        future.set_result(self._verdicts[key])
        return future

    def _send(self, requests: Sequence[_Request]) -> None:
        """Send requests for one function to a worker."""
        function = requests[0].function
        call = [function, [request.item for request in requests], files_of(function)]
        try:
            result = self._pool.schedule(worker.judge_all, args=call, timeout=self._patience_s)
        except RuntimeError:  # the pool is broken, or closed: `_replace_pool` or `close` handles the requests
            return
        result.add_done_callback(partial(self._receive, requests))

    def _receive(self, requests: Sequence[_Request], result: "ProcessFuture[Any]") -> None:
        failure = result.exception()
        if isinstance(failure, BrokenProcessPool):  # `_replace_pool` handles the requests
            return
        if failure is None:
            for request, verdict in zip(requests, result.result(), strict=True):
                self._settle(request, verdict, keep=request.function == self._function)
        elif not isinstance(failure, TimeoutError | ProcessExpired | MemoryError):
            self._give_up(requests, str(failure) if isinstance(failure, CodeChangedError) else repr(failure))
        elif len(requests) > 1:
            for request in requests:
                self._send([request])
        else:
            requests[0].lost += 1
            if verdict := self._caused(failure, requests[0]):
                self._settle(requests[0], verdict, keep=False)
            else:
                self._send(requests)

    def _give_up(self, requests: Sequence[_Request], why: str) -> None:
        for request in requests:
            with self._lock:
                waiting = self._in_flight.pop(request.key, None)
            if waiting:
                waiting.future.set_exception(VerifierBrokenError(f"the verifier broke: {why}"))

    def _caused(self, failure: BaseException, request: _Request) -> Verdict | None:
        """Return the verdict on an answer that failed; None if a worker died or hung, which proves nothing yet."""
        name: VerdictName = "timeout"
        if isinstance(failure, ProcessExpired) and failure.exitcode == OUT_OF_TIME:
            reason = f"{LIMIT_MET} {self._timeout_s:g} s of processor time"
        elif isinstance(failure, MemoryError):
            name, reason = "error", f"{LIMIT_MET} {failure}"
        elif request.lost < _TRIES:
            return None
        elif isinstance(failure, TimeoutError):
            reason = f"no end within {self._patience_s:g} s, {_TRIES} times"
        else:
            name, reason = "error", f"the worker died {_TRIES} times: {failure}"
        return Verdict(name, "", next(iter(request.solutions), ""), reason)

    def _settle(self, request: _Request, verdict: Verdict, *, keep: bool) -> None:
        with self._lock:
            waiting = self._in_flight.pop(request.key, None)
            if waiting and keep:
                self._verdicts[request.key] = verdict
                if len(self._verdicts) > self._cache_size:
                    self._verdicts.popitem(last=False)
        if waiting:  # otherwise it has a verdict, or the verifier was closed
            VERIFIER.labels(verdict.name).observe(time.monotonic() - request.asked)
            waiting.future.set_result(verdict)


def _end(pool: ProcessPool) -> None:
    pool.stop()  # type: ignore[no-untyped-call]
    pool.join()


@dataclass(frozen=True, slots=True)
class ScorerContext:
    """The first argument of every scorer's constructor; the others are those of `score.args` under its name."""

    verifier: Verifier
    run_program: RunProgram
    annotations: Mapping[Role, Annotations] = field(default_factory=dict)
    """The answers of models beside the policy, by role."""
