"""Which process this is, in words that another can check: so that the death of a lease's holder is seen at once."""

import os
import socket
from pathlib import Path
from typing import Any


def own_identity() -> dict[str, Any]:
    """That of this process."""
    return identity(os.getpid())


def identity(pid: int) -> dict[str, Any]:
    """A living process, unmistakable also after a reboot, in containers, and when its number is used again."""
    return {"host": socket.gethostname(), "machine": _machine(), "pid": pid, "started": _started(pid)}


def is_alive(identity: dict[str, Any]) -> bool | None:
    """Whether that process lives; None where it cannot be known from here (another machine or container)."""
    if identity["machine"] != _machine():
        return None
    started = _started(identity["pid"])
    if started is None and _is_hidden(identity["pid"]):
        return None
    return bool(started == identity["started"])


def _is_hidden(pid: int) -> bool:
    """Whether a process of somebody else lives that /proc does not show."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except ProcessLookupError:
        return False
    return False


def _machine() -> str:
    """This boot of this machine, and the name space in which process numbers mean something."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


def _started(pid: int) -> int | None:
    """Clock ticks from boot to the start of a process; None where it is gone, or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])
