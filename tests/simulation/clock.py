"""Virtual time: an event loop for the flow, whose clock jumps to the next event, and the events outside of the flow."""

import asyncio
import heapq
import itertools
import math
import selectors
import threading
import time
from collections.abc import Callable
from typing import Any


class World:
    """Everything outside of the flow's process: what will happen, and when. `now` is the time of what happens now."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._numbers = itertools.count()

    def after(self, seconds: float, action: Callable[..., object], *arguments: Any) -> None:
        """Let something happen later, as seen by what happens now."""
        self.at(self.now + seconds, action, *arguments)

    def at(self, when: float, action: Callable[..., object], *arguments: Any) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), action, arguments))

    def next_before(self, limit: float) -> bool:
        """Let the next event happen, if it is due before a time; return whether it was."""
        if not self._events or self._events[0][0] > limit:
            return False
        self.now, _, action, arguments = heapq.heappop(self._events)
        action(*arguments)
        return True


class VirtualLoop(asyncio.SelectorEventLoop):
    """The event loop of the flow's scheduler in virtual time.

    Its clock stands still until `release`, so that what other threads prepare has no time. A job for an executor is
    done at once, and answers after the time of its requests to the store.

    Args:
        world: what happens outside.
        requests_s: returns the virtual seconds of all requests to the store so far.
        cpu: whether the processor time of callbacks and jobs passes on the clock, too. With it, time goes on while the
            single thread of the flow computes, and no two simulations are the same.
    """

    def __init__(self, world: World, requests_s: Callable[[], float], *, cpu: bool) -> None:
        self._world, self._requests_s, self._cpu = world, requests_s, cpu
        self._now = self._outside_s = self.busy_s = self.jobs_s = 0.0
        self._held = threading.Event()
        self._held.set()
        super().__init__(_Selector(self._pass_time))

    def time(self) -> float:
        return self._now

    def release(self) -> None:
        """Let time pass."""
        self._held.clear()

    def hold(self) -> None:
        """Let time stand still, until `release`."""
        self._held.set()

    def wait_for_hold(self) -> None:
        """Wait until time stands still; for another thread."""
        self._held.wait()

    def spend(self, seconds: float) -> None:
        """Let the flow's processor be busy with something that is not done here."""
        self.busy_s += seconds * self._cpu
        self._now += seconds * self._cpu

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, function: Callable[..., Any], *arguments: Any
    ) -> asyncio.Future[Any]:
        future, requests_s, began = self.create_future(), self._requests_s(), time.thread_time()
        try:
            answer: Callable[[], None] = _answer(future.set_result, future, function(*arguments))
        except Exception as error:  # noqa: BLE001 # the caller gets it
            answer = _answer(future.set_exception, future, error)
        self.jobs_s += time.thread_time() - began
        self.call_later(self._requests_s() - requests_s, answer)
        return future

    def _run_once(self) -> None:
        began, self._outside_s = time.thread_time(), 0.0
        super()._run_once()  # type: ignore[misc]
        self.spend(time.thread_time() - began - self._outside_s)

    def _pass_time(self, timeout: float | None) -> float | None:
        """Let time pass, at most `timeout` seconds, until the flow has something to do; return how long to wait now."""
        if self._held.is_set():
            return None if timeout is None or timeout > 0 else 0
        began = time.thread_time()
        limit = math.inf if timeout is None else self._now + timeout
        ready = self._ready  # type: ignore[attr-defined]
        while (timeout == 0 or not ready) and self._world.next_before(limit):
            self._now = max(self._now, self._world.now)
        self._outside_s += time.thread_time() - began
        if ready or timeout == 0:
            return 0
        self._now = max(self._now, limit if limit < math.inf else self._now)
        return None if timeout is None else 0


def _answer(setter: Callable[[Any], None], future: asyncio.Future[Any], value: Any) -> Callable[[], None]:
    return lambda: None if future.done() else setter(value)


class _Selector(selectors.DefaultSelector):
    def __init__(self, pass_time: Callable[[float | None], float | None]) -> None:
        super().__init__()
        self._pass_time = pass_time

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        return super().select(self._pass_time(timeout))
