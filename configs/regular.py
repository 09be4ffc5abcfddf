"""Opens files that a user names, but only regular ones, because reading a pipe or a device may never end."""

import os
import stat
from pathlib import Path
from typing import BinaryIO

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


class NotRegularError(OSError):
    """A named file is a pipe or a device, not a regular file."""


def open_regular(path: str | Path) -> BinaryIO:
    """Open the regular file at `path`, or at the target of its links, for reading.

    The check examines the opened file, not its name, so the file cannot be replaced in between.

    Raises:
        NotRegularError: it is a pipe or a device.
        OSError: it does not exist, is a folder or a socket, or may not be read.
    """
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe without a writer would block
    try:
        kind = stat.S_IFMT(os.fstat(number).st_mode)
        if kind != stat.S_IFREG:
            refusal = IsADirectoryError if kind == stat.S_IFDIR else NotRegularError
            raise refusal(f"it is {_KINDS.get(kind, 'of an unknown kind')}, not a regular file")
        return os.fdopen(number, "rb")
    except BaseException:
        os.close(number)
        raise
