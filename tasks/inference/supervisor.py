"""Runs a command in a process group of its own and ends the whole group when the parent goes away.

A vLLM server has child processes that outlive it when it is killed. This small process (standard
library only) holds the reading end of a pipe from the pipeline: end of file means that the
pipeline has ended in whatever way, SIGKILL included. If this process itself is killed, the kernel
terminates the command, and `Supervised.stop` kills whatever is left of its group.

    python supervisor.py LOG FOLDER COMMAND [ARG …]

FOLDER is for the command's sockets and temporary files. Meanwhile its file `group` holds the id of the process group.
At the end it is emptied, and removed if the pipeline is gone.
"""

import contextlib
import ctypes
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

GRACE_S = 5.0
GROUP = "group"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36


def main(log_path: str, folder: Path, command: list[str]) -> int:
    """Run `command` until it ends or standard input does; returns its exit status."""
    pipeline = os.getppid()
    # Grandchildren that lose their parent become ours, so that we can see them end.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    child = _start(log_path, command)
    try:
        (folder / f"{GROUP}.new").write_text(str(child.pid))
        (folder / f"{GROUP}.new").rename(folder / GROUP)
        _wait(child)
    finally:
        _end_group(child)
        empty(folder)
        if os.getppid() != pipeline:
            shutil.rmtree(folder, ignore_errors=True)  # a pipeline that ends in good order removes it, too
    return child.returncode


def empty(folder: Path) -> None:
    """Remove what a command has left in its folder."""
    for path in folder.iterdir() if folder.exists() else ():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def signal_group(group: int, number: int) -> bool:
    """Send a signal to a process group; False if it has ended."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


def _start(log_path: str, command: list[str]) -> "subprocess.Popen[bytes]":
    parent, prctl = os.getpid(), ctypes.CDLL(None).prctl

    def end_with_parent() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # killed a moment ago
            os._exit(1)

    with open(log_path, "ab") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            close_fds=False,  # it may have been given a socket to listen on
            preexec_fn=end_with_parent,
        )


def _wait(child: "subprocess.Popen[bytes]") -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin, selectors.EVENT_READ)
        selector.register(os.pidfd_open(child.pid), selectors.EVENT_READ)
        selector.select()  # the pipe is never written to: an event is its end or the child's


def _end_group(child: "subprocess.Popen[bytes]") -> None:
    signal_group(child.pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    signal_group(child.pid, signal.SIGKILL)  # also those of the group that outlived the child
    child.wait()
    with contextlib.suppress(ChildProcessError):  # raised when none is left
        while True:
            os.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]))
