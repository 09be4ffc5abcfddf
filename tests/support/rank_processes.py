"""Ranks in processes of a test: they run a function of a test module, each with its own rank."""

import multiprocessing
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from storage.processes.child import end_with_parent

_JOIN_S = 300


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_ranks(size: int, function: Callable[..., None], *arguments: Any, log: Path) -> None:
    """Run `function(*arguments)` in `size` processes of one group; fail with their output if one of them fails."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tasks.train.trainer", "tasks.train.ranks.group"])
    port = free_port()
    processes = [
        context.Process(target=_run, args=(rank, size, port, function, arguments, log, {**os.environ}))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(_JOIN_S)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0] * size, log.read_text()[-8000:]


def _run(
    rank: int,
    size: int,
    port: int,
    function: Callable[..., None],
    arguments: Any,
    log: Path,
    environment: dict[str, str],  # the forkserver has that of the test in which it was started
) -> None:
    end_with_parent()
    output = log.open("ab", buffering=0)
    os.dup2(output.fileno(), sys.stdout.fileno())
    os.dup2(output.fileno(), sys.stderr.fileno())
    os.environ |= environment | {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    from tasks.train.ranks.group import meet, open_store, process_group

    with process_group("cpu", meet(open_store(1, 120), rank, size), 60):
        function(*arguments)
