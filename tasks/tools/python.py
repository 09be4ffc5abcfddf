"""The tool `python`: it executes the policy's code in a sandbox, by an interpreter that may keep its variables."""

import asyncio
import secrets
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from tasks.tools.bubblewrap import Limits, python
from tasks.tools.driver import READY
from tasks.tools.function import FunctionTool
from tasks.tools.interface import LONGEST_CALL_S, LONGEST_OUTPUT, ToolContext, ToolError, shorten
from tasks.tools.sandbox import Sandbox, SandboxError, Sandboxes

_DRIVER = Path(__file__).with_name("driver.py")
_DESCRIPTION = (
    "Run Python code, and return what it prints and the value of its last expression. "
    "There is no network, and files are kept in memory only. "
)
_KEEPS = "Variables, functions and imports of earlier calls stay defined."
_FORGETS = "Every call starts anew: it does not see the variables of earlier calls."
_CALLS = 20
"""Calls of an interpreter that stays may use so many times the processor time of one."""

Outcome = Literal["returned", "raised", "exited", "time", "output"]
"""How a call ended. After the last three the interpreter is gone."""


@dataclass(frozen=True, slots=True)
class Execution:
    r"""What a call printed, the traceback included.

    Example: Execution(output="4\n", outcome="returned", status=None)
    """

    output: str  # in bytes about `Limits.output_bytes` at most
    outcome: Outcome
    status: int | None = None  # exit status of an interpreter that exited; 128 + n for signal n


class Interpreter:
    """An interpreter; its owner calls `execute` one call at a time, and `close` at the end."""

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
            sandbox = self._sandbox or await self._start()
            execution = await self._converse(sandbox, text)
            finished = execution.outcome in ("returned", "raised")
            return execution
        finally:
            if not finished:  # an interrupted call also leaves an interpreter in an unknown state
                await self.close()

    async def close(self) -> None:
        self._sandbox = None
        await self._open.aclose()

    async def _start(self) -> Sandbox:
        argv = python(_DRIVER.read_text(), self._packages)
        opened = self._sandboxes.open(argv, self._limits, packages=self._packages, merged=True)
        self._sandbox = sandbox = await self._open.enter_async_context(opened)
        try:
            await sandbox.stdout.readexactly(len(READY))
        except asyncio.IncompleteReadError as error:
            status = await sandbox.wait(error.partial)
            raise SandboxError(f"Python ended with status {status} before the first call: {error.partial!r}") from None
        return sandbox

    async def _converse(self, sandbox: Sandbox, text: bytes) -> Execution:
        token = secrets.token_hex(8).encode()
        sandbox.stdin.write(b"%s %d\n" % (token, len(text)) + text)
        try:
            async with asyncio.timeout(self._limits.seconds):
                return await _answer(sandbox, token)
        except TimeoutError:
            return Execution(_text(await sandbox.end()), "time")


async def _answer(sandbox: Sandbox, token: bytes) -> Execution:
    """Read what a call writes, up to the token that ends it."""
    try:
        printed = await sandbox.stdout.readuntil(token)
        raised = await sandbox.stdout.readexactly(2) == b" 1"
        return Execution(_text(printed.removesuffix(token)), "raised" if raised else "returned")
    except asyncio.LimitOverrunError:
        return Execution(_text(await sandbox.end()), "output")
    except asyncio.IncompleteReadError as error:
        return Execution(_text(error.partial), "exited", await sandbox.wait(error.partial))


def _text(output: bytes) -> str:
    return output.decode(errors="replace")


class PythonTool:
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

    name = "python"

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
        self._function = FunctionTool(self.run)
        self.parameters = self._function.parameters
        self.description = _DESCRIPTION + (_KEEPS if stateful else _FORGETS)

    async def call(self, arguments: dict[str, Any]) -> str:
        return await self._function.call(arguments)

    async def close(self) -> None:
        await self._kept.close()

    async def run(self, code: str) -> str:
        """Return the output of `code`.

        Raises:
            ToolError: it raised an exception or met a limit; the message begins with the output.
        """
        execution = await (self._continue(code) if self._stateful else self._once(code))
        output = shorten(execution.output, self._output_chars)
        if execution.outcome == "returned":
            return output
        raise ToolError("\n".join(filter(None, [output.rstrip("\n"), self._trouble(execution)])))

    async def _continue(self, code: str) -> Execution:
        async with self._turn, self._sandboxes.place():  # between calls it needs no place
            return await self._kept.execute(code)

    async def _once(self, code: str) -> Execution:
        async with self._sandboxes.place():
            interpreter = self._open()
            try:
                return await interpreter.execute(code)
            finally:
                await interpreter.close()

    def _trouble(self, execution: Execution) -> str:
        """Say how a call ended that did not return; empty if a traceback says it."""
        says = {
            "raised": "",
            "exited": f"the interpreter ended with exit status {execution.status}",
            "time": f"stopped after {self._limits.seconds:g} s",
            "output": f"stopped after {self._limits.output_bytes:,} bytes of output",
        }[execution.outcome]
        lost = "; the variables are lost: the next call begins a new interpreter" if says and self._stateful else ""
        return says + lost
