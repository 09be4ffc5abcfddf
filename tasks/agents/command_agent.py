"""Agents that are programs: any command that asks the endpoint named in its environment."""

import asyncio
import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Annotated

from pydantic import Field

from storage.processes.child import kill_until_gone, mark
from storage.processes.folder import TemporaryFolder
from tasks.agents.endpoint.agent import Address, AgentTask, Count, Discount, EndpointAgent
from tasks.agents.endpoint.completions import Completions
from tasks.agents.interface import AgentContext

LONGEST_OUTPUT = 1_000_000
"""Most bytes that a command may print."""
_PATIENCE_S = 1.0
"""Longest wait for the rest of what a command printed."""
_PASSED = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV")


class CommandError(RuntimeError):
    """A command failed; the message has its status and the end of what it said."""


class CommandAgent(EndpointAgent):
    """An agent that is a program.

    It finds `OPENAI_BASE_URL`, `OPENAI_API_KEY` and `OPENAI_MODEL` in its environment, and the problem as one line of
    JSON on its standard input: `{"prompt": …, "messages": […], "problem_id": …, "source": …, "metadata": {…},
    "seed": …}`. What it prints is its final answer; if it prints nothing, its newest completion is. It may instead post
    `{"action": "…"}` to `$OPENAI_BASE_URL/environment/step` and read what the environment says. A status other than 0
    fails the episode.

    It runs in an empty folder of its own. When it ends, or its episode does, its process group is killed, and every
    process with its key in the environment. They are also killed when the rollout's process ends, however it does.

    Args:
        context: the pipeline gives it to every agent.
        argv: program and arguments.
        pass_environment: names of variables that the command needs; besides these it gets only PATH, HOME, LANG and the
            like, and no secrets.
        turn_discount, renderer, listen, max_requests: see `EndpointAgent`.
    """

    def __init__(
        self,
        context: AgentContext,
        *,
        argv: Annotated[list[str], Field(min_length=1)],
        pass_environment: list[str] | None = None,
        turn_discount: Discount = 1.0,
        renderer: str = "auto",
        listen: Address = "127.0.0.1:0",
        max_requests: Count = 256,
    ) -> None:
        super().__init__(context, turn_discount, renderer, listen, max_requests)
        self._argv, self._names = argv, (*_PASSED, *(pass_environment or ()))

    async def solve(self, task: AgentTask, completions: Completions) -> object:
        """See `EndpointAgent.solve`."""
        folder = TemporaryFolder()
        try:
            return await self._run_in(folder.path, task)
        finally:
            folder.remove()

    async def _run_in(self, folder: Path, task: AgentTask) -> str | None:
        try:
            process = await self._start(task, folder)
        except OSError as error:
            raise CommandError(f"{self._argv[0]!r} cannot be started: {error}") from error
        output, errors = _Output(process.stdout), _Output(process.stderr)
        try:
            await _run(process, _line(task), [output, errors])
        finally:
            _kill(process)
            # Also what the command has started in groups of its own: it has the key in its environment.
            await asyncio.shield(asyncio.to_thread(kill_until_gone, f"OPENAI_API_KEY={task.api_key}"))
            await _let_go(process, [output, errors])
        if process.returncode:
            said = errors.text.strip()[-500:] or "it said nothing"
            raise CommandError(f"the command ended with status {process.returncode}: {said}")
        return None if task.steps else output.text.strip() or None

    def ended_by_context(self, error: Exception, completions: Completions) -> bool:
        """See `EndpointAgent.ended_by_context`."""
        return bool(completions.out_of_context)

    async def _start(self, task: AgentTask, folder: Path) -> asyncio.subprocess.Process:
        given = {name: _value(name) for name in self._names if name in os.environ}
        own = {"OPENAI_BASE_URL": task.base_url, "OPENAI_API_KEY": task.api_key, "OPENAI_MODEL": task.model}
        return await asyncio.create_subprocess_exec(
            *self._argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=given | own | mark(),
            cwd=folder,
            start_new_session=True,
        )


def _value(name: str) -> str:
    """Return the value of a variable for a command, which runs in another folder."""
    value = os.environ[name]
    return os.pathsep.join(map(os.path.abspath, value.split(os.pathsep))) if name == "PYTHONPATH" else value


class _Output:
    """The output of a command, which a task reads until its end."""

    def __init__(self, stream: asyncio.StreamReader | None) -> None:
        assert stream
        self._stream, self._read = stream, bytearray()
        self.reading = asyncio.create_task(self._keep_reading())

    @property
    def text(self) -> str:
        return self._read.decode(errors="replace")

    async def _keep_reading(self) -> None:
        while part := await self._stream.read(65536):
            self._read += part
            if len(self._read) > LONGEST_OUTPUT:
                raise CommandError(f"the command printed more than {LONGEST_OUTPUT:,} bytes")


async def _run(process: asyncio.subprocess.Process, line: bytes, outputs: list[_Output]) -> None:
    """Give a command its problem, and wait for its end.

    Raises:
        CommandError: it prints too much.
    """
    assert process.stdin
    process.stdin.write(line)
    process.stdin.close()
    ended = asyncio.create_task(_end_of(process.pid))
    waiting: set[asyncio.Task[None]] = {ended, *(output.reading for output in outputs)}
    try:
        while not ended.done():
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
    finally:
        ended.cancel()


async def _end_of(pid: int) -> None:
    """Wait for the end of a process. asyncio's own `wait` also waits for all that hold its pipes open."""
    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


async def _let_go(process: asyncio.subprocess.Process, outputs: list[_Output]) -> None:
    """Read what a killed command has printed, unless a process that could not be found holds the pipes open."""
    ended = asyncio.create_task(process.wait())
    _, late = await asyncio.wait([ended, *(output.reading for output in outputs)], timeout=_PATIENCE_S)
    for task in late:
        task.cancel()
    process._transport.close()  # type: ignore[attr-defined]  # there is no other way to close the pipes


def _line(task: AgentTask) -> bytes:
    problem = task.problem
    stated = {
        "prompt": task.prompt,
        "messages": task.messages,
        "problem_id": problem.problem_id,
        "source": problem.source,
        "metadata": json.loads(problem.metadata),
        "seed": task.seed,
    }
    return json.dumps(stated).encode() + b"\n"


def _kill(process: asyncio.subprocess.Process) -> None:
    """Kill the command's process group."""
    with contextlib.suppress(ProcessLookupError):  # all of it has ended
        os.killpg(process.pid, signal.SIGKILL)
