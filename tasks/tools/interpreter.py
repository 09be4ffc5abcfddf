"""Python interpreters in sandboxes. Each executes the policy's code call after call, and keeps its variables."""

import asyncio
import secrets
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tasks.tools.bubblewrap import Limits, python
from tasks.tools.driver import READY
from tasks.tools.sandbox import Sandbox, SandboxError, Sandboxes

_DRIVER = Path(__file__).with_name("driver.py")

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
