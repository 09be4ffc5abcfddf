"""The tool `python`: it executes the policy's code in a sandbox."""

import asyncio
from functools import partial
from typing import Annotated, Any

from pydantic import Field

from tasks.tools.bubblewrap import Limits
from tasks.tools.function import FunctionTool
from tasks.tools.interface import LONGEST_CALL_S, LONGEST_OUTPUT, ToolContext, ToolError
from tasks.tools.interpreter import Execution, Interpreter
from tasks.tools.texts import shorten

_DESCRIPTION = (
    "Run Python code, and return what it prints and the value of its last expression. "
    "There is no network, and files are kept in memory only. "
)
_KEEPS = "Variables, functions and imports of earlier calls stay defined."
_FORGETS = "Every call starts anew: it does not see the variables of earlier calls."
_CALLS = 20
"""Calls of an interpreter that stays may use so many times the processor time of one."""


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
