"""Sandboxes for programs: their results, their errors, and users without privileges."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from tasks.tools import sandbox
from tasks.tools.bubblewrap import Limits, python
from tasks.tools.sandbox import Result, SandboxError, Sandboxes
from tests.support.paths import ROOT

COPY = "import sys\nsys.stdout.write(sys.stdin.read())\nprint('done', file=sys.stderr)\nsys.exit(3)"


async def test_a_program_gets_input_and_returns_output_and_status(sandboxes: Sandboxes) -> None:
    """Input of any length passes, and nothing is mixed up."""
    text = b"line\n" * 100_000
    assert await sandboxes.run(python(COPY), text, Limits()) == Result(3, text, b"done\n", "exited")


@pytest.mark.parametrize(
    ("program", "result"),
    [
        ("import time\nprint('a', flush=True)\ntime.sleep(1000)", Result(None, b"a\n", b"", "time")),
        ("while True: print('x' * 9)", Result(None, b"xxxxxxxxx\n" * 10, b"", "output")),
        ("import sys\nwhile True: print('x' * 9, file=sys.stderr)", Result(None, b"", b"xxxxxxxxx\n" * 10, "output")),
        ("import os; os.kill(os.getpid(), 15)", Result(143, b"", b"", "exited")),
    ],
)
async def test_a_result_says_why_a_program_ended(program: str, result: Result, sandboxes: Sandboxes) -> None:
    """A limit is no exit status, and what was written until then is kept."""
    assert await sandboxes.run(python(program), b"", Limits(seconds=1, output_bytes=100)) == result


async def test_input_that_nobody_reads_is_no_error(sandboxes: Sandboxes) -> None:
    assert (await sandboxes.run(python("print(1)"), bytes(10**6), Limits())).stdout == b"1\n"


async def test_a_sandbox_that_cannot_be_made_is_not_the_programs_fault(
    sandboxes: Sandboxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is an error of this machine, which no program can cause by what it writes or how it ends."""
    fake = "import sys; print('bwrap: no', file=sys.stderr); sys.exit(1)"
    assert (await sandboxes.run(python(fake), b"", Limits())).status == 1
    monkeypatch.setattr("tasks.tools.bubblewrap.visible", lambda: ("/no-such-file",))
    with pytest.raises(SandboxError, match="/no-such-file"):
        await sandboxes.run(python("print(1)"), b"", Limits())


def test_a_missing_program_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without bubblewrap nothing runs, and the message says what to install."""
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "bwrap" else f"/usr/bin/{name}")
    sandbox.check_host.cache_clear()
    with pytest.raises(ValueError, match="sandboxes need bwrap: apt-get install bubblewrap"):
        Sandboxes().check()


def test_a_machine_without_user_namespaces_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """There is no fall-back that would be less safe."""
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    sandbox.check_host.cache_clear()
    said = r"cannot make a sandbox here: bwrap: No permissions .*; allow user namespaces"
    with pytest.raises(ValueError, match=said):
        Sandboxes().check()


def test_a_kernel_that_does_not_limit_processes_is_refused(
    sandboxes: Sandboxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before Linux 5.14 a user namespace had no limit of its own."""
    monkeypatch.setattr(sandbox, "Limits", lambda: Limits(processes=2))  # as if the limit did not work
    sandbox.check_host.cache_clear()
    with pytest.raises(ValueError, match="cannot limit the number of processes on Linux .*: it must be 5.14 or newer"):
        sandboxes.check()


AS_NOBODY = """
import asyncio
from tasks.tools.bubblewrap import Limits, python
from tasks.tools.sandbox import Sandboxes

sandboxes = Sandboxes()
sandboxes.check()
program = "import os\\nprint(os.getuid(), sorted(os.listdir('/tmp')))"
print(asyncio.run(sandboxes.run(python(program), b"", Limits())).stdout.decode(), end="")
"""


SYSTEM_PYTHON = "/usr/bin/python3"
IS_RECENT = "import sys; print(sys.version_info >= (3, 11))"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user; otherwise all tests run as one")
@pytest.mark.skipif(subprocess.getoutput(f"{SYSTEM_PYTHON} -c '{IS_RECENT}'") != "True", reason="/usr's Python is old")
def test_an_ordinary_user_makes_the_same_sandboxes(sandboxes: Sandboxes) -> None:
    """It needs no privilege. A Python that this user may read runs a copy of the modules."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        for name in ("storage/processes", "tasks/tools"):
            shutil.copytree(ROOT / name, Path(folder) / name, ignore=shutil.ignore_patterns("__*"))
        Path(folder).chmod(0o755)
        command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", SYSTEM_PYTHON, "-c", AS_NOBODY]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout == "65534 []\n"
