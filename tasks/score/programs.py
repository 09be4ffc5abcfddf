"""Programs of the policy that the score stage runs, each in a sandbox of its own."""

import asyncio

from tasks.score.interface import RunProgram
from tasks.tools.bubblewrap import Limits, python
from tasks.tools.sandbox import Sandboxes

_LONGEST_PROGRAM = 100_000
"""Most bytes of a program, which is an argument of a command line."""


def sandboxed(timeout_s: float, memory_mb: int) -> RunProgram:
    """Return what runs a program in Python in a sandbox.

    As for other answers, processor time decides; wall-clock time is limited only against programs that wait for ever.

    Args:
        timeout_s: processor time of a program.
        memory_mb: its memory.
    """
    limits = Limits(seconds=60 + 10 * timeout_s, cpu_s=timeout_s, memory_mb=memory_mb)
    sandboxes = Sandboxes()

    def run(program: str, given: str) -> str | None:
        if len(program.encode("utf-8", "replace")) > _LONGEST_PROGRAM:
            return None
        result = asyncio.run(sandboxes.run(python(program), given.encode(), limits))
        finished = result.ended == "exited" and result.status == 0
        return result.stdout.decode(errors="replace") if finished else None

    return run
