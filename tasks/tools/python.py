"""The tool `python`: it executes the policy's code in a sandbox, by an interpreter that may keep its variables."""

import asyncio
import secrets
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from pydantic import Field

from tasks.tools.bubblewrap import Limits, python
from tasks.tools.driver import READY
from tasks.tools.interface import LONGEST_CALL_S, LONGEST_OUTPUT, FunctionTool, ToolContext, ToolError, shorten
from tasks.tools.sandbox import Sandbox, SandboxError, Sandboxes

_DRIVER = Path(__file__).with_name("driver.py").read_text()
_DESCRIPTION = (
    "Run Python code, and return what it prints and the value of its last expression. "
    "There is no network, and files are kept in memory only. "
)
_KEEPS = "Variables, functions and imports of earlier calls stay defined."
_FORGETS = "Every call starts anew: it does not see the variables of earlier calls."
_CALLS = 20
"""Calls of an interpreter that stays may use so many times the processor time of one."""


@dataclass(frozen=True, slots=True)
class Execution:
    r"""How a call ended.

    Example: Execution(output=b"4\n", raised=False, stopped="")
    """

    output: bytes  # what it printed, the traceback included; about `Limits.output_bytes` at most
    raised: bool = False
    stopped: str = ""  # what ended the interpreter; empty: it waits for the next call


class Interpreter:
    """An interpreter; its owner calls `execute` one call at a time, and `aclose` at the end."""

    def __init__(self, sandboxes: Sandboxes, limits: Limits, packages: bool) -> None:
        self._sandboxes, self._limits, self._packages = sandboxes, limits, packages
        self._open = AsyncExitStack()
        self._sandbox: Sandbox | None = None

    async def execute(self, code: str) -> Execution:
        """Run code and wait for its end or a limit; the first call starts the interpreter.

        Raises:
            SandboxError: it could not be started.
            UnicodeEncodeError: the code holds half a surrogate pair.
        """
        text, finished = code.encode(), False
        try:
            self._sandbox = self._sandbox or await self._start()
            execution = await self._converse(self._sandbox, text)
            finished = not execution.stopped
            return execution
        finally:
            if not finished:  # an interrupted call also leaves an interpreter in an unknown state
                await self.aclose()

    async def aclose(self) -> None:
        self._sandbox = None
        await self._open.aclose()

    async def _start(self) -> Sandbox:
        argv = python(_DRIVER, self._packages)
        opened = self._sandboxes.open(argv, self._limits, packages=self._packages, merged=True)
        sandbox = await self._open.enter_async_context(opened)
        try:
            await sandbox.stdout.readexactly(len(READY))
        except asyncio.IncompleteReadError as error:
            status = await sandbox.wait(error.partial)
            raise SandboxError(f"Python ended with status {status} before the first call: {error.partial!r}") from None
        return sandbox

    async def _converse(self, sandbox: Sandbox, text: bytes) -> Execution:
        """Give the interpreter a call, and read what this writes up to the token that ends it."""
        token, limits = secrets.token_hex(8).encode(), self._limits
        sandbox.stdin.write(b"%s %d\n" % (token, len(text)) + text)
        try:
            async with asyncio.timeout(limits.seconds):
                printed = await sandbox.stdout.readuntil(token)
                raised = await sandbox.stdout.readexactly(2) == b" 1"
            return Execution(printed.removesuffix(token), raised)
        except asyncio.IncompleteReadError as error:
            status = await sandbox.wait(error.partial)
            return Execution(error.partial, stopped=f"the interpreter ended with exit status {status}")
        except TimeoutError:
            return Execution(await sandbox.end(), stopped=f"stopped after {limits.seconds:g} s")
        except asyncio.LimitOverrunError:
            reason = f"stopped after {limits.output_bytes:,} bytes of output"
            return Execution(await sandbox.end(), stopped=reason)


class PythonTool(FunctionTool):
    """Python in a sandbox; `tasks/tools/README.md` says what it is safe against.

    Args:
        context: the pipeline gives it to every tool.
        timeout_s: wall-clock time of a call in seconds.
        memory_mb: memory of each process.
        processes: most processes and threads at once, the interpreter included.
        stateful: keep the interpreter, with its variables, until the episode's end or a time-out.
        output_chars: a longer output loses its middle.
        packages: let the code import numpy, scipy, sympy and mpmath, as far as they are installed.
    """

    def __init__(
        self,
        context: ToolContext,
        *,
        timeout_s: Annotated[float, Field(gt=0, le=LONGEST_CALL_S)] = 10.0,
        memory_mb: Annotated[int, Field(ge=64)] = 512,
        processes: Annotated[int, Field(ge=1)] = 1,
        stateful: bool = False,
        output_chars: Annotated[int, Field(ge=100, le=LONGEST_OUTPUT)] = 4000,
        packages: bool = False,
    ) -> None:
        context.sandboxes.check()
        self._limits = Limits(timeout_s, timeout_s * (_CALLS if stateful else 1), memory_mb, processes)
        self._output_chars, self._stateful, self._sandboxes = output_chars, stateful, context.sandboxes
        self._open = partial(Interpreter, context.sandboxes, self._limits, packages)
        self._kept = self._open()
        self._turn = asyncio.Lock()  # an interpreter makes one call at a time
        super().__init__(self.run)
        self.name = "python"
        self.description = _DESCRIPTION + (_KEEPS if stateful else _FORGETS)

    async def close(self) -> None:
        await self._kept.aclose()

    async def run(self, code: str) -> str:
        """Return the output of `code`.

        Raises:
            ToolError: it raised an exception or met a limit; the message begins with the output.
        """
        if self._stateful:
            async with self._turn, self._sandboxes.slot():  # between calls it needs no slot
                execution = await self._kept.execute(code)
        else:
            async with self._sandboxes.slot(), aclosing(self._open()) as interpreter:
                execution = await interpreter.execute(code)
        output, stopped = shorten(execution.output.decode(errors="replace"), self._output_chars), execution.stopped
        if stopped and self._stateful:
            stopped += "; the variables are lost: the next call begins a new interpreter"
        if stopped or execution.raised:
            raise ToolError("\n".join(filter(None, [output.rstrip("\n"), stopped])))
        return output
