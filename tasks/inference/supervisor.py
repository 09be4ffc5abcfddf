"""Runs a command in a process group of its own and ends the whole group when the parent goes away.

A vLLM server has child processes that outlive it when it is killed. This small process (standard
library only) holds the reading end of a pipe from the pipeline: end of file means that the
pipeline has ended in whatever way, SIGKILL included.

    python supervisor.py LOG COMMAND [ARG …]
"""

import contextlib
import ctypes
import os
import selectors
import signal
import subprocess
import sys
import time

GRACE_S = 5.0
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def main(log_path: str, command: list[str]) -> int:
    """Run `command` until it ends or standard input does; returns its exit status."""
    # Grandchildren that lose their parent become ours, so that we can see them end.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with open(log_path, "ab") as log:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    try:
        _wait(child)
    finally:
        _end_group(child)
    return child.returncode


def _wait(child: "subprocess.Popen[bytes]") -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin, selectors.EVENT_READ)
        selector.register(os.pidfd_open(child.pid), selectors.EVENT_READ)
        selector.select()  # the pipe is never written to: an event is its end or the child's


def _end_group(child: "subprocess.Popen[bytes]") -> None:
    _signal_group(child.pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    _signal_group(child.pid, signal.SIGKILL)  # also those of the group that outlived the child
    child.wait()
    with contextlib.suppress(ChildProcessError):  # raised when none is left
        while True:
            os.wait()


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
