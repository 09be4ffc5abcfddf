"""The process that waits for the end of another one, and then removes what is left: marked processes, and folders.

It runs as a program of its own, with the standard library only, so that it starts in milliseconds. Processes that clean
up themselves use its functions, too.

    python reaper.py OWNER MARK FOLDER…     OWNER has started it; FOLDER is where the owner makes its folders
"""

import contextlib
import fcntl
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

PREFIX = "math-mt-ppo_"
"""Our folders have names that begin with it."""
_PAUSE_S = 0.1
_QUIET = 20
"""Searches in a row that find nothing, before the end: a process that was just forked has its mark a little later."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK


def kill_marked(mark: str) -> bool:
    """Kill the processes with a variable, `NAME=value`, in their environment; return whether there were any."""
    found = False
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if mark.encode() in path.read_bytes().split(b"\0"):
                os.kill(int(path.parent.name), signal.SIGKILL)
                found = True
    return found


def remove_abandoned(parent: str) -> None:
    """Remove the folders in `parent` whose processes were killed.

    Another user may have put anything there: nothing is opened but folders of our own, and no link is followed.
    """
    for path in Path(parent).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # no folder, in use, or removed meanwhile
            folder = os.open(path, _FOLDER)
            try:
                if os.fstat(folder).st_uid == os.geteuid():
                    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    remove(path, folder)
            finally:
                os.close(folder)


def remove(path: Path, folder: int) -> None:
    """Remove the folder at `path`, open as `folder`, with everything in it; print a warning if something stays."""
    try:
        empty(folder)
        path.rmdir()
    except FileNotFoundError:  # somebody else has removed it
        pass
    except OSError as error:
        print(f"warning: {path} cannot be removed, and stays: {error}", file=sys.stderr)


def empty(folder: int) -> None:
    """Delete everything in an open folder, also what a program has left closed, or in folders too deep for Python."""
    place = f"/proc/{os.getpid()}/fd/{folder}/"  # no link that somebody puts at the folder's name leads elsewhere
    for entry in list(os.scandir(place)):
        if not entry.is_dir(follow_symlinks=False):
            os.unlink(entry.path)
            continue
        with contextlib.suppress(RecursionError):
            shutil.rmtree(entry.path, ignore_errors=True)
    if os.listdir(place):
        for command in (["chmod", "-R", "u+rwX", place], ["find", place, "-mindepth", "1", "-delete"]):
            subprocess.run(command, stderr=subprocess.DEVNULL, check=False)


def main(owner: int, mark: str, parents: list[str]) -> None:
    """Wait for the end of the process `owner`, which has started this one; kill all with its mark."""
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        end = os.pidfd_open(owner)
        if os.getppid() == owner:
            select.select([end], [], [])
    quiet = 0
    while quiet < _QUIET:
        quiet = 0 if kill_marked(mark) else quiet + 1
        time.sleep(_PAUSE_S)
    for parent in parents:
        remove_abandoned(parent)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
