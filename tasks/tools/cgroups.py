"""Control groups: where this process may make some, the kernel limits all of the memory that a sandbox causes.

Resource limits count the address space of one process. A group also counts what the kernel keeps for its processes:
page tables, queues, locks, the nodes of files.
"""

import contextlib
import os
import secrets
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_ended = set[Path]()
"""Groups whose block has ended."""
_ENTER = 'echo 0 > "$0/cgroup.procs" && exec "$@"'


@contextlib.contextmanager
def group(memory_bytes: int) -> Iterator[list[str]]:
    """Make a group until the block ends; yield the beginning of a command line that enters it, empty without groups.

    Raises:
        OSError: it cannot be made, although another one could.
    """
    folder = parent()
    if not folder:
        yield []
        return
    made = _make(folder, memory_bytes)
    try:
        yield ["sh", "-c", _ENTER, str(made)]
    finally:
        _ended.add(made)
        for each in list(_ended):
            with contextlib.suppress(OSError):  # a process is still ending: a later call removes it
                each.rmdir()
                _ended.discard(each)


@cache
def parent() -> Path | None:
    """Return the folder in which groups can be made. Those that a killed process leaves are empty, and stay.

    Version 2 has limited groups only in those without processes, so ours lie beside the one of this process.
    """
    stated = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    first = next((path for _, names, path in stated if "memory" in names.split(",")), None)
    own = Path("/sys/fs/cgroup", "memory" if first else "", (first or stated[-1][2]).lstrip("/"))
    folder = own if first or stated[-1][2] == "/" else own.parent
    with contextlib.suppress(OSError):
        if not first:
            (folder / "cgroup.subtree_control").write_text("+memory")
        _make(folder, 2**30).rmdir()
        return folder
    return None


def _make(folder: Path, memory_bytes: int) -> Path:
    made = folder / f"math-mt-ppo-{os.getpid()}-{secrets.token_hex(8)}"
    made.mkdir()
    for name, most in (("memory.limit_in_bytes", memory_bytes), ("memory.max", memory_bytes), ("memory.swap.max", 0)):
        if (made / name).exists():
            (made / name).write_text(str(most))
    return made
