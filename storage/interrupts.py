"""Ends every command line cleanly: after Ctrl-C with status 130, after SIGTERM with status 143.

Python raises KeyboardInterrupt wherever the main thread happens to be. In a destructor, in a weakref's callback or in
a C library's callback it is dropped, and the program continues. So a thread receives every signal, too
(`signal.set_wakeup_fd`), and sends it again until the main thread is leaving. A main thread that cleans up in `except`,
`finally` or `__exit__` handles an exception that is not an `Exception`, and the thread sees that. So no interrupt is
lost, and no clean-up is disturbed, except that Prefect handles SIGTERM within a flow, and a second SIGTERM disturbs it.
Errors that libraries log after an interrupt are logged without a traceback.

SIGINT keeps Python's own handler, because `asyncio.run` cancels its main task only if it finds that handler.

An interrupt while the main thread waits for Python's import lock leaves the lock locked, because Python 3.11 raises
KeyboardInterrupt between acquiring the lock and the `try`. Imports in other threads would then wait forever, and with
them the clean-up. So the thread makes the main thread release the lock during the clean-up (`_release_import_lock`).
"""

import _imp
import atexit
import contextlib
import errno
import faulthandler
import functools
import logging
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

from storage.visible import printable

LATEST_S = 12.0
"""Seconds that clean-up may take. Ending it early is safe, because a command may also be killed at any point."""
CHECK_S = 0.5
"""Seconds between two checks of the main thread. One may fall between two clean-ups, so two must see it working."""
_OUTPUT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_NO_SIGNAL = 0
_FAILED = 1
_ENDINGS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
_ASK_MAIN = signal.SIGURG
"""The signal that makes the main thread run `_release_import_lock`, even while it waits. Nothing else here uses it."""
logger = logging.getLogger(__name__)
_watching: "_Watch | None" = None


def run(command: Callable[[], int | None], advice: str = "") -> NoReturn:
    """Run a command line in the main thread and end the process with its status, 0 for None.

    After an interrupt the status is 130 or 143, however `command` ends, and `advice` is printed. After `command` has
    ended, Python and libraries have `LATEST_S` seconds for their work at exit.
    """
    _open_missing()
    try:
        status = _status(command, advice)
        # Python remembers a KeyboardInterrupt that passed an `exec`, and would end by SIGINT. This resets it.
        exec("")
    except KeyboardInterrupt:  # a second Ctrl-C during the handling of the first
        os._exit(128 + signal.SIGINT)
    threading.Thread(target=_end_hanging, args=[status], name="exit", daemon=True).start()
    sys.exit(status)


def _open_missing() -> None:
    """Open the standard streams that this process lacks; otherwise the next files and sockets get their numbers."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)


def _status(command: Callable[[], int | None], advice: str) -> str | int | None:
    """Run the command and return the argument for `sys.exit`. After that Ctrl-C ends the process at once."""
    global _watching
    watch = _watching = _Watch()
    status: str | int | None = None
    try:
        status = command()
        watch.leave()
    except BaseException as error:
        watch.leave()
        if isinstance(error, SystemExit):
            status = error.code
        elif isinstance(error, KeyboardInterrupt):
            watch.received = watch.received or signal.SIGINT
        elif watch.received:
            _print(printable(f"error while ending: {error!r}"))
        elif is_lost_output(error):
            status = _FAILED
        else:
            raise
    if watch.received:
        status = watch.status(watch.received)
        if advice:
            _print(advice)
        _flush()
    elif _output_is_lost():
        status = status or _FAILED
    return status


def fail(reason: str) -> None:
    """End the command of this process, which cannot continue, from any thread: like SIGTERM, but with status 1."""
    if _watching:
        _watching.fail(reason)
    else:
        logger.error("%s", reason)


def end_at_once() -> None:
    """Make Ctrl-C and SIGTERM end the process at once from now on, because it has nothing to clean up.

    A signal that is ignored stays ignored, as in a background job of a shell script.
    """
    _ignore_at_last()
    for number in _ENDINGS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: os._exit(128 + number))


def while_importing(package: str) -> None:
    """End at once while Python still looks for the module of `python -m <package>…`; importing it may take seconds."""
    if sys.argv[:1] == ["-m"] and "-m" in sys.orig_argv:
        module = sys.orig_argv[sys.orig_argv.index("-m") + 1 :][:1]
        if module and module[0].partition(".")[0] == package:
            end_at_once()


@functools.cache
def _ignore_at_last() -> None:
    """Ignore both signals at the very end, when Python removes its handlers: a signal would then change the status.

    This is registered first, so it runs last at exit. Until then Ctrl-C still ends a process that hangs at exit.
    """
    atexit.register(lambda: [signal.signal(number, signal.SIG_IGN) for number in _ENDINGS])


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM until the block is complete."""
    if threading.current_thread() is not threading.main_thread():  # handlers run in the main thread only
        yield
        return
    handlers = {number: handler for number in _ENDINGS if callable(handler := signal.getsignal(number))}
    received: list[tuple[signal.Signals, FrameType | None]] = []
    for number in handlers:
        signal.signal(number, lambda number, frame: received.append((signal.Signals(number), frame)))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number, frame in received[:1]:  # a new signal would count as a second Ctrl-C
            handlers[number](number, frame)


@contextlib.contextmanager
def starting_processes() -> Iterator[None]:
    """Delay interrupts until the block is complete; processes and threads that start in it get no Ctrl-C at all."""
    from multiprocessing import resource_tracker

    with held():
        resource_tracker.ensure_running()  # a start in the block would unblock SIGINT
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_hanging(status: str | int | None) -> None:
    """End the process with its status after `LATEST_S` seconds, because some clean-up at exit hangs."""
    time.sleep(LATEST_S)
    _print(f"the end of Python takes longer than {LATEST_S:g} s: ended without it, while the threads were here:")
    faulthandler.dump_traceback(file=2)
    os._exit(status if isinstance(status, int) else int(status is not None))


def raised_by_handler(error: BaseException) -> bool:
    """Return whether a signal's handler raised `error`. It may come up in any code, which must not handle it."""
    handlers = {getattr(signal.getsignal(number), "__code__", None) for number in _ENDINGS}
    frames = traceback.walk_tb(error.__traceback__)
    return isinstance(error, KeyboardInterrupt) or any(frame.f_code in handlers for frame, _ in frames)


class _Watch:
    """The thread that receives signals, and the state of an interrupt."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._failed = False
        self._left = False
        self._caught_up = threading.Event()
        self._main = threading.get_ident()
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        self._report, sys.unraisablehook = sys.unraisablehook, self._unraisable
        self._make_record = logging.getLogRecordFactory()
        logging.setLogRecordFactory(self._record)
        threading.Thread(target=self._watch, name="interrupts", daemon=True).start()
        for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, _terminate)):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, handler)
        signal.signal(_ASK_MAIN, _release_import_lock)

    def fail(self, reason: str) -> None:
        """Print the reason and end as after SIGTERM, but with status 1."""
        _print(f"error: {reason}")
        self._failed = True
        os.write(self._write_end, bytes([signal.SIGTERM]))

    def status(self, received: int) -> int:
        """Return the exit status of the process after the signal `received`."""
        return _FAILED if self._failed else 128 + received

    def leave(self) -> None:
        """Note that the command has ended. The watch continues, because another thread may keep the process alive."""
        self._left = True
        end_at_once()
        os.write(self._write_end, bytes([_NO_SIGNAL]))
        self._caught_up.wait()  # `received` is up to date now

    def _watch(self) -> None:
        while (received := self._receive(None)) not in _ENDINGS:
            if received == _NO_SIGNAL:
                self._caught_up.set()
        self.received = number = signal.Signals(received)
        _print(f"{_ENDINGS[number]}: cleaning up, {LATEST_S:g} s at most; Ctrl-C again ends at once")
        self._caught_up.set()
        self._insist(number, time.monotonic() + LATEST_S)
        _print(f"clean-up takes longer than {LATEST_S:g} s: ended without it, while the threads were here:")
        faulthandler.dump_traceback(file=2)
        os._exit(self.status(number))

    def _insist(self, number: signal.Signals, deadline: float) -> None:
        """Send the signal again whenever the main thread is seen working, until the deadline."""
        working, coming = 0, False
        while time.monotonic() < deadline:
            received = self._receive(CHECK_S)
            if received == _ASK_MAIN:  # our own
                continue
            if coming and received == number:  # our own, maybe late: the main thread may have slept in the kernel
                coming = False
            elif received == signal.SIGINT:
                os._exit(128 + number)
            working = 0 if self._left or _is_leaving(self._main) else working + 1
            if not working and _imp.lock_held():
                signal.pthread_kill(self._main, _ASK_MAIN)
            if working >= 2 and not coming:
                working, coming = 0, True
                signal.pthread_kill(self._main, number)

    def _receive(self, timeout_s: float | None) -> int | None:
        """Return the number of the next signal; None if none arrives within `timeout_s` seconds."""
        ready, _, _ = select.select([self._read_end], [], [], timeout_s)
        return os.read(self._read_end, 1)[0] if ready else None

    def _unraisable(self, dropped: "sys.UnraisableHookArgs") -> None:
        """Report a dropped exception, but not a dropped interrupt, which is sent again."""
        if issubclass(dropped.exc_type, Exception):
            self._report(dropped)

    def _record(self, *arguments: Any, **keywords: Any) -> logging.LogRecord:
        """Make a log record for a terminal. An error caused by an interrupt gets one line, without its traceback.

        It may be logged just before the watch receives the interrupt. What asyncio cancels by itself does not count.
        """
        record = self._make_record(*arguments, **keywords)
        error = record.exc_info[1] if record.exc_info else None
        if error and (self.received or _is_of_interrupt(error)):
            record.msg, record.args, record.exc_info = f"{record.getMessage()}: {error!r}", (), None
        return _clean(record)


def _clean(record: logging.LogRecord) -> logging.LogRecord:
    """Return the record without characters that hide, reorder or erase text: its names and errors may hold any text."""
    record.name = printable(record.name)
    with contextlib.suppress(TypeError, ValueError):  # wrong arguments, which logging itself reports
        message = record.getMessage()
        if (shown := printable(message)) != message:
            record.msg, record.args = shown, ()
    if record.exc_info and record.exc_info[0]:
        trace = "".join(traceback.format_exception(*record.exc_info)).rstrip("\n")
        if (shown := printable(trace)) != trace:
            record.exc_text = shown
    return record


def _release_import_lock(_: int, frame: FrameType | None) -> None:
    """Release Python's import lock if the main thread, which runs this handler, holds it without importing anything."""
    if any(each.f_code.co_filename == "<frozen importlib._bootstrap>" for each, _ in traceback.walk_stack(frame)):
        return
    with contextlib.suppress(RuntimeError):  # the main thread does not hold it, or no longer
        while True:
            _imp.release_lock()


def _terminate(number: int, _: FrameType | None) -> None:
    if not _is_leaving(threading.get_ident()):
        sys.exit(128 + number)


def _is_leaving(thread: int) -> bool:
    """Return whether a thread handles an exception that is not an `Exception`, or an error raised while it did."""
    current = sys._current_exceptions().get(thread)
    return _origin(current[1] if isinstance(current, tuple) else current) is not None  # a tuple before Python 3.12


def _origin(error: BaseException | None) -> BaseException | None:
    """Return the exception that is not an `Exception` and during which `error` was raised, or itself; else None."""
    while isinstance(error, Exception):
        error = error.__context__
    return error


def _is_of_interrupt(error: BaseException) -> bool:
    from asyncio import CancelledError  # imported late, because it takes longer than all else here

    return not isinstance(_origin(error), CancelledError | GeneratorExit | None)


def _print(line: str) -> None:
    """Print to standard error without the locks and buffers that the main thread may hold; ignore a closed stream."""
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode())


def is_lost_output(error: BaseException) -> bool:
    """Return whether `error` was raised because standard output cannot be written to; if so, print that.

    The usual reason is a full disk.
    """
    possible = isinstance(error, OSError) and error.filename is None and error.errno in _OUTPUT_ERRORS
    return possible and _output_is_lost(raised=True)


def _output_is_lost(*, raised: bool = False) -> bool:
    """Return whether standard output cannot be written to; if so, print that, and discard later output.

    A failed write of unbuffered text is not repeated. So after an error was `raised`, write one more line break: if
    that fails as well, the error came from standard output.
    """
    if sys.stdout is None:
        return False
    try:
        sys.stdout.flush()
        if raised:
            os.write(sys.stdout.fileno(), b"\n")
    except OSError as error:
        _print(f"error: standard output cannot be written to: {error.strerror}")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def _flush() -> None:
    """Flush the output; discard it if its reader is gone. Otherwise Python's own flush at exit changes the status."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
