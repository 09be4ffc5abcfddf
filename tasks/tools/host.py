"""Checks that this machine can make sandboxes, and that their limits hold on its kernel."""

import platform
import shutil
import subprocess
from functools import cache
from pathlib import Path

from tasks.tools import seccomp
from tasks.tools.bubblewrap import Launch, Limits, python

_PROGRAMS = {"bwrap": "bubblewrap", "prlimit": "util-linux", "setpriv": "util-linux"}
"""The programs that start a sandbox, and their Debian packages."""
_SETTINGS = [
    ("kernel.unprivileged_userns_clone", "0", "sysctl kernel.unprivileged_userns_clone=1"),
    ("user.max_user_namespaces", "0", "sysctl user.max_user_namespaces=10000"),
    (
        "kernel.apparmor_restrict_unprivileged_userns",
        "1",
        "give bwrap an AppArmor profile with the rule `userns,`, or sysctl "
        "kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu 24.04)",
    ),
]
"""Settings of the kernel that forbid user namespaces, their values that do, and the remedies."""
_OTHERWISE = (
    "in a container allow user namespaces and mounts (Docker: --security-opt seccomp=unconfined "
    "--security-opt apparmor=unconfined --security-opt systempaths=unconfined)"
)
_PATIENCE_S = 60.0
_TRIAL = """
import os, socket
try:
    os.fork()
except OSError:
    print("limited")
"""
"""A program for a sandbox with one process."""


@cache
def check_host() -> None:
    """Make a sandbox, the first time that a process asks.

    Raises:
        ValueError: it cannot be made, or its number of processes is not limited; names the remedy.
    """
    if platform.machine() != seccomp.MACHINE:
        raise ValueError(f"sandboxes filter system calls by the numbers of {seccomp.MACHINE}, not {platform.machine()}")
    for program, package in _PROGRAMS.items():
        if not shutil.which(program):
            raise ValueError(f"sandboxes need the program {program}: apt-get install {package}")
    with Launch(python(_TRIAL), Limits()) as start:
        done = subprocess.run(start.command, capture_output=True, text=True, timeout=_PATIENCE_S, **start.options)
    if done.returncode:
        raise ValueError(f"bubblewrap cannot make a sandbox here: {done.stderr.strip()[-500:]}; {_remedy()}")
    if done.stdout != "limited\n":
        raise ValueError(
            f"sandboxes cannot limit the number of processes on Linux {platform.release()}: it must be 5.14 or newer"
        )


def _remedy() -> str:
    """Return what probably lets bubblewrap make user namespaces."""
    for setting, forbids, remedy in _SETTINGS:
        path = Path("/proc/sys", *setting.split("."))
        if path.exists() and path.read_text().strip() == forbids:
            return remedy
    return _OTHERWISE
