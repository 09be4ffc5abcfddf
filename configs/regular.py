"""Files that a user names are opened only where they are regular: a pipe, or a device, could be read for ever."""

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
    """It is something else than a file that ends."""


def open_regular(path: str | Path) -> BinaryIO:
    """The regular file at `path`, or where its links lead, for reading; what was opened is looked at, not the name.

    Raises:
        NotRegularError: it is a pipe or a device.
        OSError: it is not there, is a folder or a socket, or may not be read.
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
