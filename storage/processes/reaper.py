"""The process that waits for the end of another one, and then removes what is left: marked processes, and folders.

It runs as a program of its own, with the standard library only, so that it starts in milliseconds. Processes that clean
up themselves use its functions, too.

    python reaper.py OWNER MARK FOLDER…     OWNER has started it; FOLDER is where the owner makes its folders
"""

import contextlib
import fcntl
import os
import select
import signal
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
    """Delete everything in a folder, however deep: folders in its folders are moved up into it before they are opened.

    So neither recursion nor long paths nor many open files are needed, whatever a program has left there.
    """
    while inner := _delete_files(folder):
        for name in inner:
            below = os.open(name, _FOLDER, dir_fd=folder)
            try:
                for deeper in _delete_files(below):
                    os.rename(deeper, os.urandom(16).hex(), src_dir_fd=below, dst_dir_fd=folder)
            finally:
                os.close(below)
            os.rmdir(name, dir_fd=folder)


def _delete_files(folder: int) -> list[str]:
    """Delete all in a folder but its folders; return their names, after they were made writable."""
    folders = []
    with os.scandir(folder) as entries:
        for entry in list(entries):
            if entry.is_dir(follow_symlinks=False):
                os.chmod(entry.name, 0o700, dir_fd=folder)
                folders.append(entry.name)
            else:
                os.unlink(entry.name, dir_fd=folder)
    return folders


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
