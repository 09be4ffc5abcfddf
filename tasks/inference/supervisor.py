"""A process that runs a command in a new process group and ends the whole group when its parent ends.

A killed vLLM server leaves child processes behind. This small process (standard library only) reads a pipe from the
pipeline: end of file means that the pipeline has ended in any way, including SIGKILL; one that goes on writes `STOP`.
At the end it also kills descendants of the command that have left the group and lost their parent. If this process
itself is killed, the kernel terminates the command, and `Supervised.stop` kills the rest of the group.

    python supervisor.py LOG FOLDER COMMAND [ARG …]

FOLDER is for the command's sockets and temporary files; its file `group` contains the id of the process group. At the
end this process empties FOLDER, and removes it if the pipeline has ended.
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
STOP = b"stop"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36


def main(log_path: str, folder: Path, command: list[str]) -> int:
    """Run `command` until it or standard input ends; return its exit status."""
    pipeline, ended = os.getppid(), False
    # Descendants that lose their parent become children of this process, which can then end them.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    child = _start(log_path, command)
    try:
        (folder / f"{GROUP}.new").write_text(str(child.pid))
        (folder / f"{GROUP}.new").rename(folder / GROUP)
        ended = _wait(child)
    finally:
        _end_group(child)
        empty(folder)
        if ended or os.getppid() != pipeline:  # a process closes its pipes before it loses its children
            shutil.rmtree(folder, ignore_errors=True)  # a pipeline that goes on removes it itself
    return child.returncode


def empty(folder: Path) -> None:
    """Remove everything that a command has left in its folder."""
    for path in folder.iterdir() if folder.exists() else ():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def signal_group(group: int, number: int) -> bool:
    """Send a signal to a process group; return False if the group has ended."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


def _start(log_path: str, command: list[str]) -> "subprocess.Popen[bytes]":
    parent, prctl = os.getpid(), ctypes.CDLL(None).prctl

    def end_with_parent() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # the parent was killed before prctl
            os._exit(1)

    with open(log_path, "ab") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            close_fds=False,  # the command may inherit a socket to listen on
            preexec_fn=end_with_parent,
        )


def _wait(child: "subprocess.Popen[bytes]") -> bool:
    """Wait for the end of the child or of the pipeline, or for `STOP`; return whether the pipeline has ended."""
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin, selectors.EVENT_READ)
        selector.register(os.pidfd_open(child.pid), selectors.EVENT_READ)
        events = selector.select()
    return any(key.fileobj is sys.stdin for key, _ in events) and not os.read(sys.stdin.fileno(), len(STOP))


def _end_group(child: "subprocess.Popen[bytes]") -> None:
    signal_group(child.pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    signal_group(child.pid, signal.SIGKILL)  # also processes of the group that outlive the child
    child.wait()
    with contextlib.suppress(ChildProcessError):  # raised when no child is left
        while True:
            for orphan in _children():  # such as a rank whose torchrun was killed while the rank was starting
                os.kill(orphan, signal.SIGKILL)
            os.wait()


def _children() -> list[int]:
    """Return the processes that are children of this one, which has one thread."""
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]))
