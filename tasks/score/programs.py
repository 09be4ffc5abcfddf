"""Programs of the policy that the score stage runs, each in a sandbox of its own."""

import asyncio

from tasks.score.interface import ProgramError, RunProgram
from tasks.tools.bubblewrap import Limits, python
from tasks.tools.sandbox import Result, Sandboxes

_LONGEST_PROGRAM = 100_000
"""Most bytes of a program, which is an argument of a command line."""
_PROCESSES = 16
"""Most processes and threads of a program: many solve their problem in a thread, to have a larger stack."""
_MAIN = """
import builtins, sys
builtins.exit = builtins.quit = sys.exit  # normally `site` adds them
program, sys.modules["__main__"] = sys.argv.pop(), type(sys)("__main__")
exec(compile(program, "program", "exec"), sys.modules["__main__"].__dict__)
"""
_LONGEST_ERROR = 200
"""Characters of what a failed program said last."""


def sandboxed(timeout_s: float, memory_mb: int) -> RunProgram:
    """Return what runs a program in Python in a sandbox.

    As for other answers, processor time decides; wall-clock time is limited only against programs that wait for ever.

    Args:
        timeout_s: processor time of a program.
        memory_mb: its memory.
    """
    limits = Limits(60 + 10 * timeout_s, cpu_s=timeout_s, memory_mb=memory_mb, processes=_PROCESSES)
    sandboxes = Sandboxes()

    def run(program: str, given: str) -> str:
        argv = [*python(_MAIN), _argument(program)]
        result = asyncio.run(sandboxes.run(argv, given.encode("utf-8", "replace"), limits))
        if result.ended == "exited" and result.status == 0:
            return result.stdout.decode(errors="replace")
        raise ProgramError(_trouble(result, limits))

    return run


def _argument(program: str) -> str:
    """Return a program as the argument of a command line.

    Raises:
        ProgramError: it cannot be one.
    """
    if "\0" in program:
        raise ProgramError("the program contains a NUL character")
    size = len(program.encode("utf-8", "replace"))
    if size > _LONGEST_PROGRAM:
        raise ProgramError(f"the program has {size:,} bytes, more than {_LONGEST_PROGRAM:,}")
    return program.encode("utf-8", "replace").decode()


def _trouble(result: Result, limits: Limits) -> str:
    """Say how a program ended that printed no result."""
    if result.ended == "time":
        return f"no end within {limits.seconds:g} s"
    if result.ended == "output":
        return f"more than {limits.output_bytes:,} bytes of output"
    lines = result.stderr.decode(errors="replace").split("\n")
    said = next((line for line in reversed(lines) if line.strip()), "")
    return f"exit status {result.status}" + (f": {said[:_LONGEST_ERROR]}" if said else "")
