"""The policy's code tries to use up the machine. Each test fails if the limit that it names is taken away."""

import asyncio

import psutil
import pytest

from tasks.tools.bubblewrap import Limits, python
from tasks.tools.interface import ToolError
from tasks.tools.sandbox import Sandboxes
from tests.support.sandbox_helpers import descendants, open_tool, run_code, wait_gone

MEMORY_MB = 128
"""A small limit, so that what a failing test wastes stays small, too."""


async def test_a_call_that_ignores_signals_is_stopped_with_all_of_its_children(sandboxes: Sandboxes) -> None:
    """Neither blocked signals nor children in sessions of their own outlive the call; what was printed is read."""
    code = """
import os, signal, time
for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        os.closerange(0, 100)
        time.sleep(1000)
print("ready")
time.sleep(1000)
"""
    async with open_tool(sandboxes, stateful=True, timeout_s=2, processes=4) as tool:
        call = asyncio.create_task(tool.call({"code": code}))
        while not (inside := [process for process in descendants() if process.name().startswith("python")])[3:]:
            assert not call.done()
            await asyncio.sleep(0.01)
        with pytest.raises(ToolError, match="ready\nstopped after 2 s"):
            await call
    wait_gone(inside)


FORKS = """
import os, time
made = 0
for _ in range(300):
    try:
        if os.fork() == 0:
            time.sleep(1000)
    except BlockingIOError:
        continue
    made += 1
print(made)
"""
THREADS = """
import threading, time
try:
    for made in range(50):
        threading.Thread(target=time.sleep, args=[1000], daemon=True).start()
except RuntimeError:
    print(made)
"""


@pytest.mark.parametrize("code", [FORKS, THREADS], ids=["processes", "threads"])
async def test_a_fork_bomb_stays_small(code: str, sandboxes: Sandboxes) -> None:
    """It has as many processes and threads as the limit says, itself included, however often it tries."""
    assert await run_code(sandboxes, code, processes=3) == "2\n"


async def test_endless_output_is_stopped(sandboxes: Sandboxes) -> None:
    """10 GB of output cost this process a few megabytes."""
    before = psutil.Process().memory_info().rss
    result = await run_code(sandboxes, "line = 'x' * 10**6\nfor _ in range(10**4): print(line)")
    assert result.startswith("error: xxx")
    assert result.endswith("stopped after 1,048,576 bytes of output")
    assert len(result) < 5000
    assert psutil.Process().memory_info().rss - before < 50 * 2**20


async def test_memory_is_limited(sandboxes: Sandboxes) -> None:
    """A process gets no more than its limit; the policy reads a MemoryError."""
    code = f"len(bytearray({MEMORY_MB // 2} << 20))\nlen(bytearray({MEMORY_MB} << 20))"
    assert (await run_code(sandboxes, code, memory_mb=MEMORY_MB)).endswith("MemoryError")


async def test_timers_are_limited(sandboxes: Sandboxes) -> None:
    """The timers of one sandbox are no other one's: all processes of a user share theirs out."""
    code = """
import ctypes
libc, timer = ctypes.CDLL(None), ctypes.c_int()
event = (ctypes.c_int * 16)(0, 0, 0, 1)  # SIGEV_NONE
print(next(n for n in range(10**6) if libc.syscall(222, 1, event, ctypes.byref(timer))))  # timer_create
"""
    assert await asyncio.gather(*(run_code(sandboxes, code) for _ in range(2))) == ["64\n"] * 2


async def test_files_are_limited(sandboxes: Sandboxes) -> None:
    """Files lie in memory; all of them together have a limit, and nothing is left of them on a disk."""
    code = """
written = 0
try:
    for number in range(10):
        with open(f"/tmp/{number}", "wb", buffering=0) as file:
            for _ in range(20):
                written += file.write(bytes(2**20))
except OSError as error:
    print(error.strerror, written // 2**20)
"""
    assert await run_code(sandboxes, code) == "No space left on device 64\n"


async def test_processor_time_is_limited(sandboxes: Sandboxes) -> None:
    """The kernel kills a program at its limit of processor time, also where nobody waits for its output."""
    result = await sandboxes.run(python("while True: pass"), b"", Limits(seconds=100, cpu_s=1))
    assert (result.status, result.ended) == (128 + 9, "exited")


async def test_limits_cannot_be_raised(sandboxes: Sandboxes) -> None:
    """All of them are hard limits, and bubblewrap's process has no privilege that the code could use."""
    names = ["AS", "NPROC", "FSIZE", "CPU", "NOFILE", "CORE", "SIGPENDING"]
    code = f"""
import resource
for name in {names}:
    number = getattr(resource, "RLIMIT_" + name)
    soft, hard = resource.getrlimit(number)
    try:
        resource.setrlimit(number, (hard + 1, hard + 1))
    except ValueError:
        print(name, soft == hard)
"""
    assert await run_code(sandboxes, code) == "".join(f"{name} True\n" for name in names)
