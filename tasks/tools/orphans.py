"""Processes that this one has started, and that must not stay behind when it is killed.

The kernel can end a process with its parent (PR_SET_PDEATHSIG), but not one that has just been forked, and none of its
children. So whatever is started with `mark` carries a mark in its environment, and one small process (this file as a
program, with the standard library only) waits for this one's end and then kills all that carry the mark.

    python orphans.py OWNER MARK
"""

import contextlib
import functools
import os
import secrets
import select
import signal
import sys
import time
from pathlib import Path

_VARIABLE = "MATH_MT_PPO_OWNER"
_PAUSE_S = 0.1
_QUIET = 20
"""Searches in a row that find nothing, before the end: a process that was just forked has its mark a little later."""


def mark() -> dict[str, str]:
    """Return the variable to start a process with that is to end with this one."""
    return {_VARIABLE: _watched(os.getpid())}


@functools.cache
def _watched(owner: int) -> str:
    """Start the process that waits, once in this process; return the mark."""
    made = secrets.token_hex(16)
    nothing = [(os.POSIX_SPAWN_OPEN, descriptor, os.devnull, os.O_RDWR, 0) for descriptor in (0, 1, 2)]
    command = [sys.executable, "-I", "-S", __file__, str(owner), made]
    os.posix_spawn(sys.executable, command, {}, file_actions=nothing, setsid=True)
    return made


def kill_with(variable: str) -> bool:
    """Kill the processes with a variable, `NAME=value`, in their environment; return whether there were any."""
    found = False
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if variable.encode() in path.read_bytes().split(b"\0"):
                os.kill(int(path.parent.name), signal.SIGKILL)
                found = True
    return found


def main(owner: int, given: str) -> None:
    """Wait for the end of the process `owner`, which has started this one, and kill all with its mark."""
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        end = os.pidfd_open(owner)
        if os.getppid() == owner:
            select.select([end], [], [])
    quiet = 0
    while quiet < _QUIET:
        quiet = 0 if kill_with(f"{_VARIABLE}={given}") else quiet + 1
        time.sleep(_PAUSE_S)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
