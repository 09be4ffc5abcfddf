"""Resource limits of this process, and of a block of code in a process that may be killed; imports nothing heavy."""

import errno
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from storage.processes.child import end_with_parent

OUT_OF_TIME = -signal.SIGPROF
"""Exit code of a process that used up its processor time."""

_MOST_FILES = 2**20  # the kernel's own limit, unless it was raised
_USED_UP = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.ENOSPC, errno.EDQUOT})
"""Errors of a machine, or a process, that has no more open files, memory, buffers or room on a disk."""


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and those that it came from or holds, also what `raise … from None` hides."""
    seen, waiting = set[int](), [error]
    while waiting:
        error = waiting.pop()
        if error is None or id(error) in seen:  # one that is raised from itself comes from itself for ever
            continue
        seen.add(id(error))
        yield error
        waiting += error.exceptions if isinstance(error, BaseExceptionGroup) else ()
        waiting.append(error.__cause__ or error.__context__)


def is_hosts(error: BaseException) -> bool:
    """Return whether an error comes from a limit of this machine or process: nobody's code or answer is wrong."""
    return any(isinstance(each, OSError) and each.errno in _USED_UP for each in chain(error))


def prepare_for_limits(parent: int) -> None:
    """Prepare a new process, once: it will end with its parent, and immediately when its time is used up."""
    end_with_parent(parent)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # a handler would wait for C code to return


def address_space() -> int:
    """Return the bytes that this process has mapped; RLIMIT_AS limits them."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def hard_address_space() -> int | None:
    """Return the most bytes that a process may map (`ulimit -Hv`, which it cannot raise); None without a limit."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    return None if hard == resource.RLIM_INFINITY else hard


def allow_open_files() -> None:
    """Raise the soft limit of open files to the hard one, which a process cannot raise: episodes hold connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


@contextmanager
def limited(seconds: float, most: int) -> Iterator[None]:
    """Limit the block to `seconds` of processor time and `most` mapped bytes.

    After this time, the kernel ends the process. If the hard limit of bytes is lower than `most`, it applies.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    signal.setitimer(signal.ITIMER_PROF, seconds)  # counts user and system time of this process
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
