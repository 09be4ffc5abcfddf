"""Ends every command line in time: after Ctrl-C with status 130, after SIGTERM with status 143.

The first signal raises KeyboardInterrupt or SystemExit in the main thread, which cleans up. A second thread gets the
signal at once, even while the main thread is busy in C, and ends the process `LATEST_S` seconds later. A second Ctrl-C
ends it at once. Either is safe: a command may be killed at any point, and a reaper ends what it has started
(`storage.processes`).

Python drops an exception that is raised in a destructor or in a callback of C code. The command then goes on until it
is ended. A second SIGTERM changes nothing, because Prefect sends one after it has handled the first.
"""

import contextlib
import faulthandler
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

from storage.visible import printable

LATEST_S = 10.0
"""Seconds that the clean-up may take."""
_CAUGHT_UP = 0
_ENDINGS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}


def run(command: Callable[[], int | None], advice: str = "") -> NoReturn:
    """Run a command line in the main thread and end the process with its status, 0 for None.

    After a signal the status is 130 or 143, however `command` ends, and `advice` is printed.
    """
    signals = _SignalThread()
    try:
        _run(signals, command, advice)
    except KeyboardInterrupt:  # a second Ctrl-C, right after the first one's clean-up
        os._exit(128 + signal.SIGINT)


def _run(signals: "_SignalThread", command: Callable[[], int | None], advice: str) -> NoReturn:
    status: str | int | None = None
    try:
        status = command()
    except SystemExit as error:
        status = error.code
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    except BaseException as error:
        signals.catch_up()
        if not signals.received:
            raise
        _print(printable(f"error while ending: {error!r}"))
    signals.catch_up()
    for number in _ENDINGS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: os._exit(128 + number))  # there is nothing to clean up any more
    if signals.received:
        status = 128 + signals.received
        _print(advice)
    # Python remembers a KeyboardInterrupt that passed an `exec`, and would end by SIGINT. This resets it.
    exec("")
    sys.exit(status if _flush() else status or 1)


@contextlib.contextmanager
def reader_may_go() -> Iterator[None]:
    """End the command silently if who reads what is printed in the block has gone, as in `… | head`."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)


@contextlib.contextmanager
def starting_processes() -> Iterator[None]:
    """Let the processes and threads that start in the block get no Ctrl-C: this process ends them."""
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # a start in the block would unblock SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def raised_by_handler(error: BaseException) -> bool:
    """Return whether a signal's handler raised `error`. It may come up in any code, which must not handle it."""
    handlers = {getattr(signal.getsignal(number), "__code__", None) for number in _ENDINGS}
    frames = traceback.walk_tb(error.__traceback__)
    return isinstance(error, KeyboardInterrupt) or any(frame.f_code in handlers for frame, _ in frames)


class _SignalThread:
    """The thread that gets the signals.

    SIGINT keeps Python's own handler, because `asyncio.run` cancels its main task only if it finds that handler.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._caught_up, self._terminated = threading.Event(), False
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, self._terminate)):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as in a background job of a shell script
                signal.signal(number, handler)
        threading.Thread(target=self._wait, name="interrupts", daemon=True).start()

    def catch_up(self) -> None:
        """Wait until the thread has got all signals so far."""
        self._caught_up.clear()
        os.write(self._write_end, bytes([_CAUGHT_UP]))
        self._caught_up.wait()

    def _wait(self) -> None:
        while (first := self._next(None)) not in _ENDINGS:
            pass
        self.received = signal.Signals(first)
        _print(f"{_ENDINGS[self.received]}: cleaning up, {LATEST_S:g} s at most; Ctrl-C again ends at once")
        deadline = time.monotonic() + LATEST_S
        while (left_s := deadline - time.monotonic()) > 0:
            if self._next(left_s) == signal.SIGINT:
                os._exit(128 + self.received)
        _print(f"clean-up takes longer than {LATEST_S:g} s: ended without it, while the threads were here:")
        faulthandler.dump_traceback(file=2)
        os._exit(128 + self.received)

    def _terminate(self, number: int, _: FrameType | None) -> None:
        if not self._terminated:  # a second one would disturb the clean-up
            self._terminated = True
            sys.exit(128 + number)

    def _next(self, timeout_s: float | None) -> int | None:
        """Return the number of the next signal; None if none arrives in this time."""
        ready, _, _ = select.select([self._read_end], [], [], timeout_s)
        number = os.read(self._read_end, 1)[0] if ready else None
        if number == _CAUGHT_UP:
            self._caught_up.set()
        return number


def _print(line: str) -> None:
    """Print to standard error without the locks and buffers that the main thread may hold; ignore a closed stream."""
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode() if line else b"")


def _flush() -> bool:
    """Flush the output; discard it if that fails, because its disk is full or its reader is gone: then return False."""
    whole = True
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError as error:
            whole = False
            if not isinstance(error, BrokenPipeError):
                _print(f"error: standard output cannot be written to: {error.strerror}")
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return whole
