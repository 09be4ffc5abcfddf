"""How a sandbox is started: the command line of bubblewrap, with the limits that the kernel holds.

A sandbox has namespaces of its own for everything, and neither network, variables nor privileges. Beside what
`tasks.tools.view` lists it sees only two devices, and an empty /tmp in memory. There is no /proc: in /proc/1/mem the
program could overwrite bubblewrap's own process, which has no limits.
"""

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from tasks.tools import orphans, seccomp
from tasks.tools.view import hidden, interpreter, links, package_folders, prlimit, visible

_NOBODY = "65534"
_DEVICES = ("/dev/null", "/dev/urandom")
_OPEN_FILES = 64


@dataclass(frozen=True, slots=True)
class Limits:
    """What a sandbox may use; its memory is at most `processes * memory_mb + folder_mb`, and some for open files.

    Example: Limits(seconds=10.0, cpu_s=10.0, memory_mb=512, processes=1, folder_mb=64, output_bytes=1048576)
    """

    seconds: float = 10.0  # wall-clock time
    cpu_s: float = 10.0  # processor time of each process, rounded up to whole seconds
    memory_mb: int = 512  # address space of each process
    processes: int = 1  # processes and threads together, the first one included
    folder_mb: int = 64  # all files in /tmp together
    output_bytes: int = 2**20  # of standard output, and of standard error


class Launch:
    """The start of a sandbox: `command` with `options` for subprocess or asyncio; a context manager.

    Args:
        argv: the program, as the sandbox sees it.
        limits: those of time and output are left to whoever reads its output.
        packages: show the packages for mathematics.
    """

    def __init__(self, argv: Sequence[str], limits: Limits, packages: bool = False) -> None:
        self._report, status = os.pipe()
        self._passed = [status]
        try:
            refused = _filter()
        except OSError:
            self.__exit__()
            raise
        self._passed.append(refused)
        self.command = _command(argv, limits, package_folders() if packages else (), status, refused)
        environment = {"PATH": os.environ.get("PATH", os.defpath), **orphans.mark()}
        self.options: dict[str, Any] = {"pass_fds": (status, refused), "env": environment, "start_new_session": True}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.started()
        os.close(self._report)

    def started(self) -> None:
        """Close the descriptors that only the started process needs."""
        while self._passed:
            os.close(self._passed.pop())

    def exit_status(self) -> int | None:
        """Return the program's exit status after its end; 128 + n for signal n. None: it was not started, or killed."""
        reports = [json.loads(line) for line in os.read(self._report, 2**16).splitlines()]
        return next((report["exit-code"] for report in reports if "exit-code" in report), None)


def _filter() -> int:
    """Return a descriptor from which bubblewrap reads the filter of system calls."""
    refused, writing = os.pipe()
    os.write(writing, seccomp.program())
    os.close(writing)
    return refused


def python(program: str, packages: bool = False) -> list[str]:
    """Return the `argv` of a program in Python, without `site`; its arguments are the folders with the packages."""
    folders = dict.fromkeys(os.path.dirname(folder) for folder in package_folders()) if packages else {}
    return [interpreter(), "-I", "-S", "-X", "utf8", "-c", program, *folders]


def _command(argv: Sequence[str], limits: Limits, packages: Sequence[str], status: int, refused: int) -> list[str]:
    """Return the command line; `status` and `refused` are descriptors of the report and the filter of system calls."""
    shown = visible()
    covered = hidden(shown)
    variables = {"HOME": "/tmp", "OPENBLAS_NUM_THREADS": str(limits.processes)}
    return [
        *(_become_nobody([*shown, *packages]) if os.geteuid() == 0 else ()),
        *("bwrap", "--unshare-all", "--unshare-user", "--disable-userns", "--uid", _NOBODY, "--gid", _NOBODY),
        *("--cap-drop", "ALL", "--die-with-parent", "--new-session", "--hostname", "sandbox"),
        *("--json-status-fd", str(status), "--seccomp", str(refused), "--clearenv"),
        *(word for name, value in variables.items() for word in ("--setenv", name, value)),
        *_links(),
        *_each("--ro-bind", shown),
        *(word for path in covered for word in ("--tmpfs", path)),
        *_each("--ro-bind", packages),
        *(word for path in covered for word in ("--remount-ro", path)),
        *_each("--dev-bind", _DEVICES),
        *("--size", str(limits.folder_mb << 20), "--tmpfs", "/tmp", "--chdir", "/tmp"),
        *("--remount-ro", "/", "--", *_limited(limits), *argv),
    ]


def _become_nobody(shown: Iterable[str]) -> list[str]:
    """Return the beginning of a command line by which root starts the sandbox as another user.

    The kernel does not limit the number of root's processes. The other user may not enter root's folders, so he gets a
    file system in which the same files lie in other folders. A process namespace holds his processes: without
    privileges root's bubblewrap could not signal them at its end.
    """
    programs = {"/usr", *(path for path in ("/bin", "/lib", "/lib64") if os.path.isdir(path) and path not in links())}
    shown = [*sorted(programs), *(path for path in shown if not path.startswith("/usr/"))]
    return [
        *("bwrap", "--unshare-pid", "--die-with-parent"),
        *("--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"),
        *_links(),
        *(word for path in [*shown, *_DEVICES] for word in ("--dir", os.path.dirname(path))),  # open to all users
        *_each("--ro-bind", shown),
        *_each("--dev-bind", _DEVICES),
        *("--bind", "/proc", "/proc", "--dir", "/tmp", "--"),
        *("setpriv", f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups"),
    ]


def _limited(limits: Limits) -> list[str]:
    """Return the beginning of a command line that sets resource limits; bubblewrap's own process counts, too."""
    return [
        *(prlimit(), f"--as={limits.memory_mb << 20}", f"--nproc={limits.processes + 1}"),
        *(f"--cpu={math.ceil(limits.cpu_s)}", f"--fsize={limits.folder_mb << 20}", f"--nofile={_OPEN_FILES}"),
        *("--core=0", "--msgqueue=0", "--"),
    ]


def _links() -> list[str]:
    return [word for path, target in links().items() for word in ("--symlink", target, path)]


def _each(option: str, paths: Iterable[str]) -> list[str]:
    return [word for path in paths for word in (option, path, path)]
