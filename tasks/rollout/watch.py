"""Guards against agents that do not end: those that block the event loop, and threads that go on after an episode.

All episodes share one thread, so asyncio cannot cancel what blocks it. Its watch is another thread.

A separate thread checks whether the event loop responds. After `WARN_S` it names the line that blocks the loop. At the
deadline of an episode, or after `LEAST_S` if that is later, it ends the process with status 1: whatever the step does,
this ends it. The same command continues from the stored shards.

It counts checks, not seconds, because a process that was stopped (Ctrl-Z, `docker pause`) makes none meanwhile. C code
that keeps Python's lock (the GIL) blocks this watch, too.
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
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from storage.frames import in_library, is_own

logger = logging.getLogger(__name__)

CHECK_S = 0.5
WARN_S = 10.0
"""Time without a response of the loop after which a warning is logged."""
LEAST_S = 60.0
"""Shortest time after which the process is ended: with short deadlines a busy machine may only be slow."""
_OWN = os.path.dirname(__file__)
_LAST_WORDS = (
    "%s has blocked all episodes until its deadline, and only the end of this process can end that: %s. The same "
    "command continues from the stored shards"
)
_ADVICE = "await slow operations, or run them in a thread (asyncio.to_thread)"
PATIENCE_S = 60.0
_LATE = "what runs in asyncio.to_thread must end by itself, soon after the deadline of its episode"
T = TypeVar("T")


class Watch:
    """A watch over the running event loop; a context manager that encloses all episodes.

    Args:
        deadline_s: no single step, of an agent or other code, may last longer.
    """

    def __init__(self, deadline_s: float) -> None:
        self._last_s = max(deadline_s, LEAST_S)
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._unanswered = 0  # checks since the last response of the loop
        self._end = threading.Event()
        around = contextvars.copy_context().run  # with the context in which Prefect knows where logs go
        self._watcher = threading.Thread(target=around, args=[self._watch], name="rollout-watch", daemon=True)

    def __enter__(self) -> "Watch":
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._watcher.join()

    def _watch(self) -> None:
        while not self._end.wait(CHECK_S):
            blocked_s = self._unanswered * CHECK_S
            if self._unanswered == int(WARN_S / CHECK_S) + 1:  # once
                logger.warning("%s has blocked all episodes for %.0f s: %s", self._culprit(), blocked_s, _ADVICE)
            if blocked_s > self._last_s:
                logger.critical(_LAST_WORDS, self._culprit(), _ADVICE)
                logging.shutdown()
                os._exit(1)
            self._unanswered += 1
            self._loop.call_soon_threadsafe(self._on_response)

    def _on_response(self) -> None:
        self._unanswered = 0

    def _culprit(self) -> str:
        task = asyncio.current_task(self._loop)
        location = location_of(traceback.extract_stack(sys._current_frames().get(self._thread)))
        return f"{task.get_name() if task else 'something'}, {location},"


def location_of(stack: traceback.StackSummary) -> str:
    """Return the line of the agent's own code, not a library's, at which `stack` ends, and its outermost caller."""
    frames = [frame for frame in stack if frame.filename != __file__]
    rollout = max((index for index, frame in enumerate(frames) if frame.filename.startswith(_OWN)), default=-1)
    frames = frames[rollout + 1 :] or frames[-1:]
    ours = [frame for frame in frames if not in_library(frame.filename)]
    own = [frame for frame in ours if is_own(frame.filename)] or ours or frames
    ends = dict.fromkeys(f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in (own[-1], own[0]))
    return "in " + ", called from ".join(ends)


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
                where = location_of(traceback.extract_stack(sys._current_frames().get(thread.ident or 0)))
                text = "the rollout ends without a thread of an agent that still runs, %s: %s"
                logger.warning(text, where, _LATE)
