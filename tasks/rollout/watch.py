"""Ends the step of an agent that holds up the event loop: all episodes share one thread, so none of them could.

A thread looks whether the loop turns. What does not let it turn until its episode's deadline has passed is ended by
an exception in the loop's thread:

- Python code, `while True: pass`, on the spot, in any thread.
- a call into C that heeds signals, `time.sleep(3600)`, a read of a socket, a regular expression: on the spot where the
  rollout runs in the main thread, as it does without `run.overlap`. Elsewhere no signal arrives.
- what still goes on `GRACE_S + LAST_S` after the deadline cannot be ended but with the process. It ends with status 1,
  and the log names the line. The same command goes on from the shards that were stored.

Time in which the watcher itself did not run is not counted: the process was stopped (Ctrl-Z, `docker pause`), or the
machine is busy.

One thing remains: in another thread than the main one, C code that keeps Python's lock stops this watch, too.
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

LOOK_S = 0.5
"""Time between two looks. A task that runs at two looks in a row, while the loop does not turn, holds up the loop."""
TELL_S = 10.0
"""A loop that does not turn for so long is worth a warning."""
GRACE_S = 10.0
LAST_S = 60.0
"""Further time before the process is ended: that is the last resort, and a busy machine may only be slow."""
_SIGNAL = signal.SIGVTALRM
_OWN = os.path.dirname(__file__)
_LIBRARIES = (os.path.dirname(os.__file__), "site-packages")

Task = asyncio.Task[object]


class StalledError(BaseException):
    """An agent held up the event loop until its deadline. No `Exception`, for agents catch those and try again."""

    def __str__(self) -> str:
        where = place_of(traceback.extract_tb(self.__traceback__))
        return f"it held up all other episodes until its deadline, {where}: {ADVICE}"


ADVICE = "await what takes long, or run it in a thread (asyncio.to_thread)"


class Watch:
    """Watches the running loop; a context manager around everything that is played in it.

    Args:
        deadline_s: for which no step of anything may last.
    """

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._main = threading.current_thread() is threading.main_thread()
        self._episodes: dict[Task, tuple[asyncio.Timeout, float]] = {}  # its deadline, and the latest it can become
        self._turned = self._made_up = time.monotonic()
        self._guilty: set[Task] = set()  # held it up since
        self._suspect: Task | None = None
        self._since = self._turned  # when the suspect was first seen
        self._told = False
        self._end = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="rollout-watch", daemon=True)

    def __enter__(self) -> "Watch":
        if self._main:
            self._handler = signal.signal(_SIGNAL, self._on_signal)
            # Of processor time: it arrives, too, while a regular expression keeps Python's lock from the thread.
            signal.setitimer(signal.ITIMER_VIRTUAL, 1, 1)
        self._watcher.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._end.set()
        self._watcher.join()  # it may be about to send the signal, whose default is to kill
        if self._main:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(_SIGNAL, self._handler)

    @contextmanager
    def over(self, task: Task, deadline: asyncio.Timeout) -> Iterator[None]:
        """Meanwhile `task` may not run past `deadline`, which moves on while others hold up the loop."""
        self._episodes[task] = (deadline, _when(deadline) + self._deadline_s + GRACE_S)
        try:
            yield
        finally:
            del self._episodes[task]

    def _watch(self) -> None:
        stuck_s, turned, looked = 0.0, self._turned, time.monotonic()
        while not self._end.wait(LOOK_S):
            self._look()
            now = time.monotonic()
            since_s, looked = min(now - looked, 2 * LOOK_S), now  # more than that is a time in which nothing ran
            stuck_s, turned = (stuck_s + since_s if turned == self._turned else 0.0), self._turned
            if stuck_s > TELL_S and not self._told:
                self._told = True
                logger.warning("%s has held up all episodes for %.0f s, %s", self._name(), stuck_s, self._place())
            if stuck_s > self._deadline_s + GRACE_S + LAST_S:
                self._end_the_process()

    def _look(self) -> None:
        """Ends the task that holds up the loop and should not have run for so long; from any thread."""
        now, task = time.monotonic(), asyncio.current_task(self._loop)
        if task is not self._suspect:
            self._suspect, self._since = task, now
        self._loop.call_soon_threadsafe(self._turn)  # after that, so that a turn since then forgets the suspect
        if task is None or now - self._since < LOOK_S / 2:
            return
        self._guilty.add(task)
        known = self._episodes.get(task)
        late = self._loop.time() > _when(known[0]) if known else now - self._turned > self._deadline_s + GRACE_S
        if late:
            self._stop()

    def _stop(self) -> None:
        here = threading.get_ident() == self._thread
        if self._main and not here:
            signal.pthread_kill(self._thread, _SIGNAL)
            return
        self._since = time.monotonic() + LOOK_S  # time to end by the exception before the next one
        if not here:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), ctypes.py_object(StalledError))
            return
        self._make_up()  # before the loop looks at the others' deadlines
        raise StalledError

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._look()

    def _turn(self) -> None:
        """The loop turns."""
        self._make_up()
        self._guilty.clear()
        self._turned, self._suspect, self._told = self._made_up, None, False

    def _make_up(self) -> None:
        """Time for which somebody held up the loop is not counted against the others."""
        now = time.monotonic()
        if self._guilty:
            for task, (deadline, latest) in self._episodes.items():
                if task not in self._guilty and not deadline.expired():
                    deadline.reschedule(min(_when(deadline) + now - self._made_up, latest))
        self._made_up = now

    def _name(self) -> str:
        return self._suspect.get_name() if self._suspect else "something"

    def _place(self) -> str:
        return place_of(traceback.extract_stack(sys._current_frames().get(self._thread)))

    def _end_the_process(self) -> None:
        logger.critical(
            "%s holds up all episodes, %s, and nothing can end that but the end of this process: %s. The same command "
            "goes on from what is stored",
            self._name(),
            self._place(),
            ADVICE,
        )
        logging.shutdown()
        os._exit(1)


def _when(deadline: asyncio.Timeout) -> float:
    when = deadline.when()
    assert when is not None
    return when


def place_of(stack: traceback.StackSummary) -> str:
    """Where in the agent's own code, no library's, the end of `stack` lies, and through what it came there."""
    frames = [frame for frame in stack if frame.filename != __file__]
    rollout = max((place for place, frame in enumerate(frames) if frame.filename.startswith(_OWN)), default=-1)
    frames = frames[rollout + 1 :] or frames[-1:]
    own = [frame for frame in frames if not any(part in frame.filename for part in _LIBRARIES)] or frames
    ends = dict.fromkeys(f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in (own[-1], own[0]))
    return "in " + ", called from ".join(ends)
