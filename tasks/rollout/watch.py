"""A watch against agents that block the event loop: all episodes share one thread, so asyncio cannot cancel them.

A separate thread checks whether the event loop responds. If a step blocks the loop until the deadline of its episode,
an exception in the loop's thread ends it:

- Python code (`while True: pass`) ends immediately, in any thread.
- A C call that reacts to signals (`time.sleep(3600)`, a read from a socket, a regular expression) ends immediately if
  the rollout runs in the main thread, as it does without `run.overlap`. Other threads get no signals.
- A step that still runs `GRACE_S + LAST_S` after the deadline can only be ended with the process. It ends with status
  1, and the log names the line. The same command continues from the stored shards.

The time in which the watching thread itself did not run is not counted: the process was stopped (Ctrl-Z,
`docker pause`), or the machine is busy. One case remains: outside the main thread, C code that keeps Python's lock
(the GIL) blocks this watch too.
"""

import asyncio
import ctypes
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

logger = logging.getLogger(__name__)

CHECK_S = 0.5
"""Time between two checks. A task that runs at two checks in a row, without a response of the loop, blocks it."""
WARN_S = 10.0
"""Time without a response of the loop after which a warning is logged."""
GRACE_S = 10.0
LAST_S = 60.0
"""Further time before the process is ended: this is the last resort, and a busy machine may only be slow."""
_SIGNAL = signal.SIGVTALRM
_OWN = os.path.dirname(__file__)
_LIBRARIES = (os.path.dirname(os.__file__), "site-packages")

Task = asyncio.Task[object]


class StalledError(BaseException):
    """An agent blocked the event loop until its deadline. No `Exception`: agents catch those and retry."""

    def __str__(self) -> str:
        where = place_of(traceback.extract_tb(self.__traceback__))
        return f"it blocked all other episodes until its deadline, {where}: {ADVICE}"


ADVICE = "await slow operations, or run them in a thread (asyncio.to_thread)"


class Watch:
    """A watch over the running event loop; a context manager that encloses all episodes.

    Args:
        deadline_s: no single step, of an agent or other code, may last longer.
    """

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._main = threading.current_thread() is threading.main_thread()
        self._episodes: dict[Task, tuple[asyncio.Timeout, float]] = {}  # the deadline, and its latest possible time
        self._responded = self._extended = time.monotonic()  # last response of the loop, last extension of deadlines
        self._blocking: set[Task] = set()  # tasks that have blocked the loop since its last response
        self._suspect: Task | None = None
        self._since = self._responded  # when the suspect was first seen
        self._warned = False
        self._end = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="rollout-watch", daemon=True)

    def __enter__(self) -> "Watch":
        if self._main:
            self._handler = signal.signal(_SIGNAL, self._on_signal)
            # A timer of processor time: its signal arrives even while a regular expression keeps Python's lock.
            signal.setitimer(signal.ITIMER_VIRTUAL, 1, 1)
        self._watcher.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._end.set()
        self._watcher.join()  # it may be about to send the signal, which kills the process without a handler
        if self._main:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(_SIGNAL, self._handler)

    @contextmanager
    def over(self, task: Task, deadline: asyncio.Timeout) -> Iterator[None]:
        """Watch `task` in the block: it may not run past `deadline`, which is extended while others block the loop."""
        self._episodes[task] = (deadline, _time_of(deadline) + self._deadline_s + GRACE_S)
        try:
            yield
        finally:
            del self._episodes[task]

    def _watch(self) -> None:
        blocked_s, responded, checked = 0.0, self._responded, time.monotonic()
        while not self._end.wait(CHECK_S):
            self._check()
            now = time.monotonic()
            since_s, checked = min(now - checked, 2 * CHECK_S), now  # in any longer time, this thread did not run
            blocked_s, responded = (blocked_s + since_s if responded == self._responded else 0.0), self._responded
            if blocked_s > WARN_S and not self._warned:
                self._warned = True
                logger.warning("%s has blocked all episodes for %.0f s, %s", self._name(), blocked_s, self._place())
            if blocked_s > self._deadline_s + GRACE_S + LAST_S:
                self._end_the_process()

    def _check(self) -> None:
        """End the task that blocks the loop, if it is past its deadline; may be called from any thread."""
        now, task = time.monotonic(), asyncio.current_task(self._loop)
        if task is not self._suspect:
            self._suspect, self._since = task, now
        self._loop.call_soon_threadsafe(self._on_response)  # after the assignment: a response clears the suspect
        if task is None or now - self._since < CHECK_S / 2:
            return
        self._blocking.add(task)
        episode = self._episodes.get(task)
        if episode:
            late = self._loop.time() > _time_of(episode[0])
        else:
            late = now - self._responded > self._deadline_s + GRACE_S
        if late:
            self._stop()

    def _stop(self) -> None:
        here = threading.get_ident() == self._thread
        if self._main and not here:
            signal.pthread_kill(self._thread, _SIGNAL)
            return
        self._since = time.monotonic() + CHECK_S  # leaves time to end by this exception before the next one
        if not here:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), ctypes.py_object(StalledError))
            return
        self._extend_deadlines()  # before the loop checks the deadlines of the other episodes
        raise StalledError

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._check()

    def _on_response(self) -> None:
        """Note that the loop responds."""
        self._extend_deadlines()
        self._blocking.clear()
        self._responded, self._suspect, self._warned = self._extended, None, False

    def _extend_deadlines(self) -> None:
        """Extend the deadlines of all other episodes by the time for which a task blocked the loop."""
        now = time.monotonic()
        if self._blocking:
            for task, (deadline, latest) in self._episodes.items():
                if task not in self._blocking and not deadline.expired():
                    deadline.reschedule(min(_time_of(deadline) + now - self._extended, latest))
        self._extended = now

    def _name(self) -> str:
        return self._suspect.get_name() if self._suspect else "something"

    def _place(self) -> str:
        return place_of(traceback.extract_stack(sys._current_frames().get(self._thread)))

    def _end_the_process(self) -> None:
        logger.critical(
            "%s blocks all episodes, %s, and only the end of this process can end that: %s. The same command "
            "continues from the stored shards",
            self._name(),
            self._place(),
            ADVICE,
        )
        logging.shutdown()
        os._exit(1)


def _time_of(deadline: asyncio.Timeout) -> float:
    when = deadline.when()
    assert when is not None
    return when


def place_of(stack: traceback.StackSummary) -> str:
    """Return the place in the agent's own code, not a library's, where `stack` ends, and its outermost caller."""
    frames = [frame for frame in stack if frame.filename != __file__]
    rollout = max((place for place, frame in enumerate(frames) if frame.filename.startswith(_OWN)), default=-1)
    frames = frames[rollout + 1 :] or frames[-1:]
    own = [frame for frame in frames if not any(part in frame.filename for part in _LIBRARIES)] or frames
    ends = dict.fromkeys(f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in (own[-1], own[0]))
    return "in " + ", called from ".join(ends)
