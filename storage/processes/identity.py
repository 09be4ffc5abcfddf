"""Identities of processes that other processes can check, so that the death of a lease's holder is seen at once."""

import os
import socket
from pathlib import Path
from typing import Any


def own_identity() -> dict[str, Any]:
    """Return the identity of this process."""
    return identity(os.getpid())


def identity(pid: int) -> dict[str, Any]:
    """Return the identity of a living process. It is unique even after reboots, in containers, and for reused pids."""
    return {"host": socket.gethostname(), "machine": _machine(), "pid": pid, "started": _started(pid)}


def is_alive(identity: dict[str, Any]) -> bool | None:
    """Return whether that process is alive; None if this process cannot know (another machine or container)."""
    if identity["machine"] != _machine():
        return None
    started = _started(identity["pid"])
    if started is None and _is_hidden(identity["pid"]):
        return None
    return bool(started == identity["started"])


def _is_hidden(pid: int) -> bool:
    """Return whether a process of another user is alive that /proc does not show."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except ProcessLookupError:
        return False
    return False


def _machine() -> str:
    """Return ids of this boot of this machine and of the pid namespace."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


def _started(pid: int) -> int | None:
    """Return the clock ticks from boot to the start of a process; None if it has ended or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])
