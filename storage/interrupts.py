"""How every command line ends when it is told to: by Ctrl-C with status 130, by SIGTERM with status 143.

Python raises KeyboardInterrupt wherever the main thread happens to be. In a destructor, in a weakref's callback or in
a C library's callback it is dropped, and the program goes on. So a thread hears of every signal, too
(`signal.set_wakeup_fd`), and sends it again until the main thread is on its way out. The thread can see that: while the
main thread cleans up in `except`, `finally` or `__exit__`, it handles an exception that is no `Exception`. So no
interrupt is lost, and no clean-up is disturbed. One case remains: within a flow Prefect handles SIGTERM, and a second
one does disturb it. What libraries log of it has no traceback.

SIGINT keeps Python's own handler, because `asyncio.run` cancels its main task only where it finds that one.
"""

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
"""How long clean-up may take. Whatever it leaves undone then is safe: a command may also be killed anywhere."""
LOOK_S = 0.5
"""Time between two looks at the main thread. One look may fall between two clean-ups: two must see it at work."""
_OF_OUTPUT = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_NO_SIGNAL = 0
_FAILED = 1
_WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
logger = logging.getLogger(__name__)
_watching: "_Watch | None" = None


def run(command: Callable[[], int | None], advice: str = "") -> NoReturn:
    """Run a command line in the main thread and end the process with its status, 0 for None.

    Where the process was told to end, the status is 130 or 143 whatever `command` makes of it, and `advice` is printed.
    When `command` has ended, what Python and libraries still do at exit may take `LATEST_S`.
    """
    _open_missing()
    try:
        status = _status(command, advice)
        # Makes Python forget a KeyboardInterrupt that has passed an `exec`: it would end by SIGINT all the same.
        exec("")
    except KeyboardInterrupt:  # a second Ctrl-C, while the first was being answered
        os._exit(128 + signal.SIGINT)
    threading.Thread(target=_end_hanging, args=[status], name="exit", daemon=True).start()
    sys.exit(status)


def _open_missing() -> None:
    """Open the standard streams with which we were not started: else the next files and sockets take their numbers."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)


def _status(command: Callable[[], int | None], advice: str) -> str | int | None:
    """What `sys.exit` is to be given; from then on Ctrl-C ends on the spot."""
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
            watch.heard = watch.heard or signal.SIGINT
        elif watch.heard:
            _tell(printable(f"error while ending: {error!r}"))
        elif is_lost_output(error):
            status = _FAILED
        else:
            raise
    if watch.heard:
        status = watch.status(watch.heard)
        if advice:
            _tell(advice)
        _flush()
    elif _output_is_lost():
        status = status or _FAILED
    return status


def fail(reason: str) -> None:
    """End this process's command, which cannot go on, from any thread: like SIGTERM, but with status 1."""
    if _watching:
        _watching.fail(reason)
    else:
        logger.error("%s", reason)


def end_at_once() -> None:
    """From here on Ctrl-C and SIGTERM end the process on the spot: it has nothing to clean up.

    What is ignored stays ignored, as in a background job of a shell script.
    """
    _ignore_at_last()
    for number in _WORDS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: os._exit(128 + number))


def while_importing(package: str) -> None:
    """End at once as long as Python looks for the module of `python -m <package>…`: importing it may take seconds."""
    if sys.argv[:1] == ["-m"] and "-m" in sys.orig_argv:
        module = sys.orig_argv[sys.orig_argv.index("-m") + 1 :][:1]
        if module and module[0].partition(".")[0] == package:
            end_at_once()


@functools.cache
def _ignore_at_last() -> None:
    """Ignore both signals when all is done: Python gives up its handlers before it ends, and would end by the signal.

    Registered first, that is done last: until then Ctrl-C ends a process that hangs while it ends.
    """
    atexit.register(lambda: [signal.signal(number, signal.SIG_IGN) for number in _WORDS])


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM until the block has been done whole."""
    if threading.current_thread() is not threading.main_thread():  # no handler runs in others
        yield
        return
    handlers = {number: handler for number in _WORDS if callable(handler := signal.getsignal(number))}
    heard: list[tuple[signal.Signals, FrameType | None]] = []
    for number in handlers:
        signal.signal(number, lambda number, frame: heard.append((signal.Signals(number), frame)))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number, frame in heard[:1]:  # sent again it would count as the second Ctrl-C
            handlers[number](number, frame)


def _end_hanging(status: str | int | None) -> None:
    """After a while end the process with its status: something that cleans up at exit waits for what does not come."""
    time.sleep(LATEST_S)
    _tell(f"the end of Python takes longer than {LATEST_S:g} s: ended without it, while the threads were here:")
    faulthandler.dump_traceback(file=2)
    os._exit(status if isinstance(status, int) else int(status is not None))


def raised_by_handler(error: BaseException) -> bool:
    """Whether a signal's handler raised `error`: it may come up in anybody's code, and is not theirs to handle."""
    handlers = {getattr(signal.getsignal(number), "__code__", None) for number in _WORDS}
    frames = traceback.walk_tb(error.__traceback__)
    return isinstance(error, KeyboardInterrupt) or any(frame.f_code in handlers for frame, _ in frames)


class _Watch:
    """The thread that hears of signals."""

    def __init__(self) -> None:
        self.heard: int | None = None
        self._failed = False
        self._left = False
        self._caught_up = threading.Event()
        self._main = threading.get_ident()
        self._hears, self._told = os.pipe()
        os.set_blocking(self._told, False)
        signal.set_wakeup_fd(self._told, warn_on_full_buffer=False)
        self._report, sys.unraisablehook = sys.unraisablehook, self._unraisable
        self._make_record = logging.getLogRecordFactory()
        logging.setLogRecordFactory(self._record)
        threading.Thread(target=self._watch, name="interrupts", daemon=True).start()
        for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, _terminate)):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, handler)

    def fail(self, reason: str) -> None:
        """As if told to end by SIGTERM."""
        _tell(f"error: {reason}")
        self._failed = True
        os.write(self._told, bytes([signal.SIGTERM]))

    def status(self, heard: int) -> int:
        """The exit status of a process that was told to end by a signal."""
        return _FAILED if self._failed else 128 + heard

    def leave(self) -> None:
        """The command has ended. A thread that nobody tells to end can still keep the process: the watch goes on."""
        self._left = True
        end_at_once()
        os.write(self._told, bytes([_NO_SIGNAL]))
        self._caught_up.wait()  # `heard` is known now

    def _watch(self) -> None:
        while (heard := self._hear(None)) not in _WORDS:
            if heard == _NO_SIGNAL:
                self._caught_up.set()
        self.heard = number = signal.Signals(heard)
        _tell(f"{_WORDS[number]}: cleaning up, {LATEST_S:g} s at most; Ctrl-C again ends at once")
        self._caught_up.set()
        self._insist(number, time.monotonic() + LATEST_S)
        _tell(f"clean-up takes longer than {LATEST_S:g} s: ended without it, while the threads were here:")
        faulthandler.dump_traceback(file=2)
        os._exit(self.status(number))

    def _insist(self, number: signal.Signals, deadline: float) -> None:
        """Send the signal again whenever the main thread is seen at work, until the deadline."""
        working, coming = 0, False
        while time.monotonic() < deadline:
            heard = self._hear(LOOK_S)
            if coming and heard == number:  # our own, however late: the thread may have been asleep in the kernel
                coming = False
            elif heard == signal.SIGINT:
                os._exit(128 + number)
            working = 0 if self._left or _is_leaving(self._main) else working + 1
            if working >= 2 and not coming:
                working, coming = 0, True
                signal.pthread_kill(self._main, number)

    def _hear(self, timeout_s: float | None) -> int | None:
        """The next signal's number; None when there is none for so long."""
        ready, _, _ = select.select([self._hears], [], [], timeout_s)
        return os.read(self._hears, 1)[0] if ready else None

    def _unraisable(self, dropped: "sys.UnraisableHookArgs") -> None:
        """An interrupt that was dropped needs no report: it comes again."""
        if issubclass(dropped.exc_type, Exception):
            self._report(dropped)

    def _record(self, *arguments: Any, **keywords: Any) -> logging.LogRecord:
        """A log record for a terminal. An error that comes of an interrupt is told in a line, without its traceback.

        It may be logged a moment before the interrupt is heard of; what asyncio cancels by itself is none.
        """
        record = self._make_record(*arguments, **keywords)
        error = record.exc_info[1] if record.exc_info else None
        if error and (self.heard or _is_of_interrupt(error)):
            record.msg, record.args, record.exc_info = f"{record.getMessage()}: {error!r}", (), None
        return _clean(record)


def _clean(record: logging.LogRecord) -> logging.LogRecord:
    """The record without what would hide, reorder or erase text: names and errors in it come from anywhere."""
    record.name = printable(record.name)
    with contextlib.suppress(TypeError, ValueError):  # arguments that do not fit: logging tells that itself
        message = record.getMessage()
        if (shown := printable(message)) != message:
            record.msg, record.args = shown, ()
    if record.exc_info and record.exc_info[0]:
        trace = "".join(traceback.format_exception(*record.exc_info)).rstrip("\n")
        if (shown := printable(trace)) != trace:
            record.exc_text = shown
    return record


def _terminate(number: int, _: FrameType | None) -> None:
    if not _is_leaving(threading.get_ident()):
        sys.exit(128 + number)


def _is_leaving(thread: int) -> bool:
    """Whether a thread handles an exception that is no `Exception`, or one that came up while it did."""
    found = sys._current_exceptions().get(thread)
    return _origin(found[1] if isinstance(found, tuple) else found) is not None  # a tuple before Python 3.12


def _origin(error: BaseException | None) -> BaseException | None:
    """The exception that is no `Exception` and during which `error` came up, if there is one; maybe itself."""
    while isinstance(error, Exception):
        error = error.__context__
    return error


def _is_of_interrupt(error: BaseException) -> bool:
    from asyncio import CancelledError  # importing it takes longer than all else here

    return not isinstance(_origin(error), CancelledError | GeneratorExit | None)


def _tell(line: str) -> None:
    """Print it, past the locks and buffers that the main thread may hold. Where nobody reads it any more it is lost."""
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode())


def is_lost_output(error: BaseException) -> bool:
    """Return whether `error` was raised because standard output cannot be written to; if so, print that.

    The usual reason is a full disk.
    """
    possible = isinstance(error, OSError) and error.filename is None and error.errno in _OF_OUTPUT
    return possible and _output_is_lost(raised=True)


def _output_is_lost(*, raised: bool = False) -> bool:
    """Return whether standard output cannot be written to; if so, print that, and discard what is printed from then on.

    Unbuffered text is never written again. So where an error was `raised`, one more line break is written: if that
    fails as well, the error came from standard output.
    """
    if sys.stdout is None:
        return False
    try:
        sys.stdout.flush()
        if raised:
            os.write(sys.stdout.fileno(), b"\n")
    except OSError as error:
        _tell(f"error: standard output cannot be written to: {error.strerror}")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def _flush() -> None:
    """Flush the output. If nobody reads it any more, Python's own attempt at exit would change the status."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
