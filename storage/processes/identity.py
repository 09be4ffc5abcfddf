"""Identities of processes that other processes can check, so that the death of a lease's holder is seen at once."""

import os
import socket
from pathlib import Path
from typing import Any


def own_identity() -> dict[str, Any]:
    """Return the identity of this process. It is unique even after reboots, in containers, and for reused pids."""
    pid = os.getpid()
    return {"host": socket.gethostname(), "machine": _machine(), "pid": pid, "started": _started(pid)}


def is_alive(identity: dict[str, Any]) -> bool | None:
    """Return whether that process is alive; None if this process cannot know (another machine or container)."""
    if identity["machine"] != _machine():
        return None
    started = _started(identity["pid"])
    if started is None:
        try:
            os.kill(identity["pid"], 0)
        except PermissionError:  # a living process of another user, which /proc does not show
            return None
        except ProcessLookupError:
            return False
    return bool(started == identity["started"])


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
