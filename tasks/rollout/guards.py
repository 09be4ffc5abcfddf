"""Guards against agents that do not end: those that block the event loop, and threads that go on after an episode.

All episodes share one thread, so asyncio cannot cancel what blocks it. Their guard is another thread.

A separate thread checks whether the event loop responds. After `WARN_S` it names the line that blocks the loop. At the
deadline of an episode, or after `LEAST_S` if that is later, it ends the process with status 1: whatever the step does,
this ends it. The same command continues from the stored shards.

It counts checks, not seconds, because a process that was stopped (Ctrl-Z, `docker pause`) makes none meanwhile. C code
that keeps Python's lock (the GIL) blocks this guard, too.
"""

import asyncio
import contextvars
import logging
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

CHECK_S = 0.5
WARN_S = 10.0
"""Time without a response of the loop after which a warning is logged."""
LEAST_S = 60.0
"""Shortest time after which the process is ended: with short deadlines a busy machine may only be slow."""
PATIENCE_S = 60.0
"""Time at the end of a rollout for calls that still run in threads."""
_ADVICE = "await slow operations, or run them in a thread (asyncio.to_thread)"
T = TypeVar("T")


@contextmanager
def guarded(deadline_s: float) -> Iterator[None]:
    """Watch over the running event loop until the block ends, which encloses all episodes.

    Args:
        deadline_s: no single step, of an agent or other code, may last longer.
    """
    loop, looping, over = asyncio.get_running_loop(), threading.get_ident(), threading.Event()
    silent = 0  # the checks since the last response of the loop

    def respond() -> None:
        nonlocal silent
        silent = 0

    def guard() -> None:
        nonlocal silent
        while not over.wait(CHECK_S):
            blocked_s, step = silent * CHECK_S, asyncio.current_task(loop)
            name = step.get_name() if step else "something"
            if silent == int(WARN_S / CHECK_S) + 1:  # once
                message = "%s has blocked all episodes for %.0f s: %s. It is here:\n%s"
                logger.warning(message, name, blocked_s, _ADVICE, _stack_of(looping))
            if blocked_s > max(deadline_s, LEAST_S):
                logger.critical(
                    "%s has blocked all episodes until its deadline, and only the end of this process can end that: "
                    "%s. The same command continues from the stored shards. It is here:\n%s",
                    *(name, _ADVICE, _stack_of(looping)),
                )
                logging.shutdown()
                os._exit(1)
            silent += 1
            loop.call_soon_threadsafe(respond)

    around = contextvars.copy_context().run  # with the context in which Prefect knows where logs go
    thread = threading.Thread(target=around, args=[guard], name="rollout-guard", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _stack_of(thread: int | None) -> str:
    """Return the lines at which a thread is, the innermost one at the end."""
    return "".join(traceback.format_stack(sys._current_frames().get(thread or 0))).rstrip()


class AgentThreads(ThreadPoolExecutor):
    """The default executor of a rollout's event loop: a new thread for each call.

    asyncio's own has few threads: slow calls of some episodes would hold up all others. And it waits for every thread
    at the end, also for one that never ends. These threads end with the process at the latest.

    Attributes:
        patience_s: time at the end for calls that still run; then the rollout ends without them.
    """

    def __init__(self) -> None:
        super().__init__(1)  # asyncio accepts no other class; it starts no thread by itself
        self.patience_s = PATIENCE_S
        self._threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._ended = False

    def submit(self, call: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Call in a thread of its own."""
        if self._ended:
            raise RuntimeError("the rollout has ended")
        future = Future[T]()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call(*args, **kwargs))
                except BaseException as error:  # noqa: BLE001  # whoever awaits the call gets it
                    future.set_exception(error)

        thread = threading.Thread(target=run, name="agent", daemon=True)
        thread.start()
        self._threads.add(thread)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Wait a limited time for calls that still run, and name the line of each that goes on."""
        self._ended = True
        deadline = time.monotonic() + (self.patience_s if wait else 0.0)
        for thread in list(self._threads):
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                remedy = "what runs in asyncio.to_thread must end by itself, soon after the deadline of its episode"
                text = "the rollout ends without a thread of an agent that still runs: %s. It is here:\n%s"
                logger.warning(text, remedy, _stack_of(thread.ident))
