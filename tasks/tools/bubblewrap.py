"""The start of a sandbox: the command line of bubblewrap, with the limits that the kernel holds.

A sandbox has namespaces of its own for everything, and neither network, variables nor privileges. It sees an
interpreter with its standard library, the system's shared libraries, two devices, and an empty /tmp in memory. There is
no /proc: in /proc/1/mem the program could overwrite bubblewrap's own process, which has no limits.

A filter of system calls refuses what namespaces do not separate, and what resource limits do not count: System V shared
memory, memory files and pages pinned in pipes exceed every memory limit, vsock reaches the virtual machine's host from
any network namespace, and keyrings are inherited. Numbers are those of x86-64 (asm/unistd_64.h).
"""

import errno
import importlib.util
import json
import math
import os
import secrets
import shutil
import struct
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

from storage.processes.child import mark

_NOBODY = "65534"
_USERS = range(0x70000000, 0x80000000)
"""Ids that no distribution, container or service gives to anybody (systemd.io/UIDS-GIDS)."""
_DEVICES = ("/dev/null", "/dev/urandom")
PACKAGES = ("numpy", "scipy", "sympy", "mpmath")
"""Packages for mathematics; a sandbox that is asked for packages sees those that are installed here."""
_ROOT = Path(__file__).parents[2]
_STANDARD_LIBRARY = Path(os.__file__).resolve().parent
_INTERPRETER = os.path.realpath(sys.executable)
"""The interpreter that a virtual environment's one stands for."""
MACHINE = "x86_64"
_LINKS = [word for name in ("bin", "lib", "lib64") for word in ("--symlink", f"usr/{name}", f"/{name}")]
"""The links in the root that lead to programs and shared libraries, as distributions have had them since 2020."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a sandbox; its memory is at most `processes * memory_mb + folder_mb`, and what the kernel keeps.

    Example: Limits(seconds=10.0, cpu_s=10.0, memory_mb=512, processes=1, folder_mb=64, output_bytes=1048576)
    """

    seconds: float = 10.0  # wall-clock time
    cpu_s: float = 10.0  # processor time of each process, rounded up to whole seconds
    memory_mb: int = 512  # address space of each process
    processes: int = 1  # processes and threads together, the first one included
    folder_mb: int = 64  # all files in /tmp together
    output_bytes: int = 2**20  # of standard output, and of standard error


@dataclass(frozen=True, slots=True)
class Launch:
    """The start of a sandbox: `command` with `options` for subprocess or asyncio."""

    command: list[str]
    options: dict[str, Any]
    report: IO[bytes]  # in which bubblewrap says how the program ended

    def exit_status(self) -> int | None:
        """Return the program's exit status after its end; 128 + n for signal n. None: it was not started, or killed."""
        reports = map(json.loads, os.pread(self.report.fileno(), 2**16, 0).splitlines())
        return next((each["exit-code"] for each in reports if "exit-code" in each), None)


@contextmanager
def launch(argv: Sequence[str], limits: Limits, packages: bool = False) -> Iterator[Launch]:
    """Yield the start of a sandbox, which is usable until the block ends.

    Args:
        argv: the program, as the sandbox sees it.
        limits: those of time and output are left to whoever reads its output.
        packages: show the packages for mathematics.
    """
    with _memory_file("report") as report, _memory_file("filter") as refused:
        refused.write(_filter_program())
        refused.seek(0)
        passed = report.fileno(), refused.fileno()
        command = _command(argv, limits, package_folders() if packages else (), *passed)
        environment = {"PATH": os.environ.get("PATH", os.defpath), **mark()}
        yield Launch(command, {"pass_fds": passed, "env": environment, "start_new_session": True}, report)


def _memory_file(name: str) -> IO[bytes]:
    return os.fdopen(os.memfd_create(name), "w+b", buffering=0)


def python(program: str, packages: bool = False) -> list[str]:
    """Return the `argv` of a program in Python, without `site`; its arguments are the folders with the packages."""
    folders = dict.fromkeys(os.path.dirname(folder) for folder in package_folders()) if packages else {}
    return [_INTERPRETER, "-I", "-S", "-X", "utf8", "-c", program, *folders]


def _command(argv: Sequence[str], limits: Limits, packages: Sequence[str], status: int, refused: int) -> list[str]:
    """Return the command line; `status` and `refused` are descriptors of the report and the filter of system calls."""
    shown = visible()
    covered = hidden(shown)
    return [
        *(_become_another([*shown, *packages]) if os.geteuid() == 0 else ()),
        *("bwrap", "--unshare-all", "--unshare-user", "--disable-userns", "--uid", _NOBODY, "--gid", _NOBODY),
        *("--cap-drop", "ALL", "--die-with-parent", "--new-session", "--hostname", "sandbox"),
        *("--json-status-fd", str(status), "--seccomp", str(refused), "--clearenv"),
        *("--setenv", "HOME", "/tmp", "--setenv", "OPENBLAS_NUM_THREADS", str(limits.processes)),
        *_LINKS,
        *("--size", str(limits.folder_mb << 20), "--tmpfs", "/tmp"),  # first: what is shown may lie in it
        *_each("--ro-bind", shown),
        *(word for path in covered for word in ("--tmpfs", path)),
        *_each("--ro-bind", packages),
        *(word for path in covered for word in ("--remount-ro", path)),
        *_each("--dev-bind", _DEVICES),
        *("--chdir", "/tmp", "--remount-ro", "/", "--"),
        # Resource limits; bubblewrap's own process counts, too, and so do timers as pending signals.
        *(_prlimit(), f"--as={limits.memory_mb << 20}", f"--nproc={limits.processes + 1}"),
        *(f"--cpu={math.ceil(limits.cpu_s)}", f"--fsize={limits.folder_mb << 20}", "--nofile=64"),
        *("--core=0", "--msgqueue=0", "--sigpending=64", "--", *argv),
    ]


def _become_another(shown: Iterable[str]) -> list[str]:
    """Return the beginning of a command line by which root starts the sandbox as a user of its own.

    The kernel does not limit the number of root's processes, and shares out much by user: pages of pipes, signals. The
    other user may not enter root's folders, so he gets a file system in which the same files lie in other folders. A
    process namespace holds his processes: without privileges root's bubblewrap could not signal them at its end.
    """
    shown = ["/usr", *(path for path in shown if not path.startswith("/usr/"))]
    user = secrets.choice(_USERS) if has_users() else _NOBODY
    return [
        *("bwrap", "--unshare-pid", "--die-with-parent"),
        *("--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"),
        *_LINKS,
        *(word for path in [*shown, *_DEVICES] for word in ("--dir", os.path.dirname(path))),  # open to all users
        *_each("--ro-bind", shown),
        *_each("--dev-bind", _DEVICES),
        *("--bind", "/proc", "/proc", "--dir", "/tmp", "--"),
        *("setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"),
    ]


@cache
def has_users() -> bool:
    """Return whether this process may use all ids: a container may map a few thousand only."""
    maps = (Path("/proc/self", name).read_text().split()[:3] for name in ("uid_map", "gid_map"))
    return all(each == ["0", "0", "4294967295"] for each in maps)


def _each(option: str, paths: Iterable[str]) -> list[str]:
    return [word for path in paths for word in (option, path, path)]


def _prlimit() -> str:
    return os.path.realpath(shutil.which("prlimit") or "prlimit")


@cache
def visible() -> tuple[str, ...]:
    """Return the files and folders that every sandbox sees, read-only."""
    system = ("/usr/lib64", f"/usr/lib/{sysconfig.get_config_var('MULTIARCH')}", "/etc/ld.so.cache")
    # The folder above it has shared libraries of an interpreter that is not the system's.
    library = _STANDARD_LIBRARY if _STANDARD_LIBRARY.parent == Path("/usr/lib") else _STANDARD_LIBRARY.parent
    paths = [Path(path).resolve() for path in (*system, library, _INTERPRETER, _prlimit())]
    return tuple(dict.fromkeys(str(path) for path in paths if path.exists()))


@cache
def package_folders() -> tuple[str, ...]:
    """Return the folders of the installed packages for mathematics, with those of their shared libraries."""
    origins = [spec.origin for name in PACKAGES if (spec := importlib.util.find_spec(name)) and spec.origin]
    folders = [Path(origin).resolve().parent for origin in origins]
    candidates = [*folders, *(folder.with_name(f"{folder.name}.libs") for folder in folders)]
    return tuple(str(folder) for folder in candidates if folder.is_dir())


def hidden(shown: Iterable[str], secret: Sequence[Path] | None = None) -> list[str]:
    """Return those of the `secret` folders that lie in `shown` ones, so that an empty folder must cover them.

    By default these are installed packages, the home, the working directory and this project.
    """
    if secret is None:
        packages = [_STANDARD_LIBRARY / "site-packages", _STANDARD_LIBRARY / "dist-packages"]
        secret = [*packages, Path.home(), Path.cwd(), _ROOT]
    folders = dict.fromkeys(path.resolve() for path in secret if path.is_dir())
    return [str(folder) for folder in folders if any(folder.is_relative_to(path) for path in shown)]


_AUDIT_ARCH_X86_64 = 0xC000003E  # linux/audit.h
_X32 = 0x40000000
"""Numbers from here on are the same calls again, in another ABI."""
_LOAD, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _RETURN = 0x20, 0x15, 0x35, 0x06  # linux/bpf_common.h
_KILL, _ERROR, _ALLOW = 0x80000000, 0x00050000 | errno.EPERM, 0x7FFF0000  # linux/seccomp.h
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data

REFUSED = {
    **{"shmget": 29, "msgget": 68, "semget": 64, "memfd_create": 319, "memfd_secret": 447},  # memory without a limit
    **{"vmsplice": 278, "splice": 275, "tee": 276, "landlock_create_ruleset": 444},  # that, too
    # What has a name can be sent to, and in its queue memory and other sockets stay: only pairs of sockets are left.
    **{"socket": 41, "bind": 49, "setsockopt": 54, "sendmsg": 46, "sendmmsg": 307},
    **{"add_key": 248, "request_key": 249, "keyctl": 250},  # the session's keyring is inherited
    **{"ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "pidfd_getfd": 438},
    **{"unshare": 272, "setns": 308, "mount": 165, "fsopen": 430, "open_tree": 428},
    **{"bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "io_uring_setup": 425},  # where kernels had most bugs
    "io_setup": 206,  # the machine has a limit for all of its processes together
    **{"inotify_init": 253, "inotify_init1": 294, "fanotify_init": 300},  # the user has one
}
"""System calls that fail with EPERM."""
_REFUSED_IF = {
    "fcntl": (72, 1, 1031),  # F_SETPIPE_SZ: the user has a limit for the pages of all pipes
    "prctl": (157, 0, 78),  # PR_FUTEX_HASH: memory without a limit
}
"""Number, argument and value for which a system call fails with EPERM."""
_SOCKETPAIR, _AF_UNIX = 53, 1


def _filter_program() -> bytes:
    """Return the filter in the kernel's format, for `bwrap --seccomp`."""
    steps = [
        _step(_LOAD, _ARCHITECTURE),
        *(_step(_JUMP_EQUAL, _AUDIT_ARCH_X86_64, 1, 0), _step(_RETURN, _KILL)),
        _step(_LOAD, _NUMBER),
        *(_step(_JUMP_GREATER_EQUAL, _X32, 0, 1), _step(_RETURN, _KILL)),
    ]
    for number in REFUSED.values():
        steps += [_step(_JUMP_EQUAL, number, 0, 1), _step(_RETURN, _ERROR)]
    for number, argument, value in _REFUSED_IF.values():
        steps += _if(number, argument, _step(_JUMP_EQUAL, value, 0, 1))
    steps += [*_if(_SOCKETPAIR, 0, _step(_JUMP_EQUAL, _AF_UNIX, 1, 0)), _step(_RETURN, _ALLOW)]
    return b"".join(steps)


def _if(number: int, argument: int, refuse: bytes) -> list[bytes]:
    """Return steps that decide about one system call: `refuse` skips a step if the argument is allowed."""
    load = _step(_LOAD, _FIRST_ARGUMENT + 8 * argument)
    decide = [load, refuse, _step(_RETURN, _ERROR), _step(_RETURN, _ALLOW)]
    return [_step(_JUMP_EQUAL, number, 0, len(decide)), *decide]


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """Return a `struct sock_filter`; a jump skips so many steps."""
    return struct.pack("=HBBI", code, if_true, if_false, value)
