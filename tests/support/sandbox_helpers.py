"""Calls of the python tool in tests, and the processes that its sandboxes consist of."""

import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil

from tasks.tools.interface import ToolContext, ToolError
from tasks.tools.python import PythonTool
from tasks.tools.sandbox import Sandboxes


@asynccontextmanager
async def open_tool(sandboxes: Sandboxes, **arguments: Any) -> AsyncIterator[PythonTool]:
    tool = PythonTool(ToolContext(sandboxes), **arguments)
    try:
        yield tool
    finally:
        await tool.close()


async def run_code(sandboxes: Sandboxes, code: str, **arguments: Any) -> str:
    """Return what the policy reads after a call with `code`; arguments are the tool's."""
    async with open_tool(sandboxes, **arguments) as tool:
        try:
            return await tool.call({"code": code})
        except ToolError as error:
            return f"error: {error}"


def descendants() -> list[psutil.Process]:
    """Return the processes of all sandboxes of this process: bubblewrap's, and those inside."""
    started = [child for child in psutil.Process().children() if child.name() == "bwrap"]
    return [process for child in started for process in (child, *child.children(recursive=True))]


async def inside(sandboxes: Sandboxes, file: str) -> str:
    """Return what a file of /proc says of the interpreter in a sandbox; there is no /proc inside."""
    async with open_tool(sandboxes, stateful=True) as tool:
        await tool.call({"code": "1"})
        (interpreter,) = (process for process in descendants() if process.name().startswith("python"))
        return Path(f"/proc/{interpreter.pid}", file).read_text()  # noqa: ASYNC240  # the kernel answers at once


def wait_gone(processes: Iterable[psutil.Process], within_s: float = 30) -> None:
    """Wait until the processes have ended, zombies included: an orphan is reaped by another process."""
    deadline = time.monotonic() + within_s
    while alive := [process for process in processes if _is_alive(process)]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.01)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
