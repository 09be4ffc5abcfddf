"""Threads for what agents and environments run with `asyncio.to_thread`, LangGraph's synchronous tools, for example."""

import logging
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from tasks.rollout.watch import location_of

logger = logging.getLogger(__name__)

PATIENCE_S = 60.0
_ADVICE = "what runs in asyncio.to_thread must end by itself, soon after the deadline of its episode"

T = TypeVar("T")


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
                logger.warning("the rollout ends without a thread of an agent that still runs, %s: %s", where, _ADVICE)
