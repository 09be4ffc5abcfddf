"""A supervised command takes its descendants with it, also those that have left its process group."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tasks.inference import supervisor
from tasks.inference.supervised import Supervised

COMMAND = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["the command is killed", "the command and its stopped child", "closed"])
def test_descendants_that_have_left_the_group_end(end: str, tmp_path: Path) -> None:
    """torchrun gives each rank a session of its own. A rank that has just started does not end with torchrun yet."""
    supervised = Supervised(tmp_path / "log")
    supervised.start([sys.executable, "-c", COMMAND], os.environ)
    process, deadline = psutil.Process(supervised.pid), time.monotonic() + 60
    while len(family := process.children(recursive=True)) < 2:
        assert time.monotonic() < deadline, supervised.log_tail()
        time.sleep(0.02)
    command, child = family
    try:
        if "stopped" in end:
            child.send_signal(signal.SIGSTOP)
        if end != "closed":
            command.kill()
            psutil.wait_procs([process], timeout=60)
            assert not supervised.alive
        supervised.close()
        assert psutil.wait_procs([process, command, child], timeout=20)[1] == []
    finally:
        for left in (child, process):  # if the test fails
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()


@pytest.mark.parametrize(("said", "stays"), [(b"", False), (supervisor.STOP, True)])
def test_the_folder_goes_with_the_pipeline(said: bytes, stays: bool, tmp_path: Path) -> None:
    """A process that ends closes its pipes before its children have another parent; one that goes on says so."""
    folder = tmp_path / "folder"
    folder.mkdir()
    command = [sys.executable, supervisor.__file__, str(tmp_path / "log"), str(folder), "sleep", "600"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        process.communicate(said, timeout=60)
    assert folder.exists() == stays
