"""Ranks in processes of a test: they run a function of a test module, each with its own rank."""

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from storage.processes.child import end_with_parent

_JOIN_S = 300


def run_ranks(size: int, function: Callable[..., None], *arguments: Any, log: Path) -> None:
    """Run `function(*arguments)` in `size` processes of one group; fail with their output if one of them fails."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tasks.train.trainer"])
    with tempfile.TemporaryDirectory() as folder:
        given = (f"{folder}/meeting", function, arguments, log, {**os.environ})
        processes = [context.Process(target=_run, args=(rank, size, *given)) for rank in range(size)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(_JOIN_S)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0] * size, log.read_text()[-8000:]


def _run(rank: int, size: int, meeting: str, function: Callable[..., None], given: Any, log: Path, env: Any) -> None:
    end_with_parent()
    output = log.open("ab", buffering=0)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(output.fileno(), stream.fileno())
    os.environ |= env  # the forkserver has that of the test in which it was started
    from torch._C._distributed_c10d import FileStore

    from tasks.train.mesh import join_group

    join_group(rank, size, "cpu", FileStore(meeting, size), "127.0.0.1", 60)
    function(*given)
