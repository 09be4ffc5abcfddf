"""Agents that are programs: any command that asks the endpoint named in its environment."""

import asyncio
import contextlib
import json
import os
import signal
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import IO, Annotated, Any

from pydantic import Field

from storage.processes.child import kill_until_gone, mark
from storage.processes.folder import TemporaryFolder
from tasks.agents.endpoint.agent import AgentTask, EndpointAgent
from tasks.agents.endpoint.completions import Completions
from tasks.registry import refuse_changed

_PASSED = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV")
LONGEST_OUTPUT = 1_000_000
"""Most bytes that a command may print."""


class CommandError(RuntimeError):
    """A command failed, with a status and the end of what it said in the message, or printed too much."""


@dataclass(eq=False, repr=False, kw_only=True)
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
        turn_discount, renderer, listen, max_requests, response_format: see `EndpointAgent`.
    """

    argv: Annotated[list[str], Field(min_length=1)]
    pass_environment: list[str] | None = None

    async def solve(self, task: AgentTask, completions: Completions) -> object:
        """See `EndpointAgent.solve`."""
        with (
            TemporaryFolder() as folder,
            TemporaryFile() as given,
            TemporaryFile() as output,
            TemporaryFile() as errors,
        ):
            problem, asked = task.problem, {"prompt": task.prompt, "messages": task.messages, "seed": task.seed}
            known = {"source": problem.source, "metadata": json.loads(problem.metadata)}
            given.write(json.dumps({**asked, "problem_id": problem.problem_id, **known}).encode() + b"\n")
            given.seek(0)
            status = await self._run(task, {"stdin": given, "stdout": output, "stderr": errors, "cwd": folder})
            if max(os.fstat(file.fileno()).st_size for file in (output, errors)) > LONGEST_OUTPUT:
                raise CommandError(f"the command printed more than {LONGEST_OUTPUT:,} bytes")
            for text in self.argv:  # whose files the command has read by now
                refuse_changed(text)
            if status:
                cause = _text(errors).strip()[-500:] or "it said nothing"
                raise CommandError(f"the command ended with status {status}: {cause}")
            return None if task.steps else _text(output).strip() or None

    async def _run(self, task: AgentTask, options: dict[str, Any]) -> int:
        """Run the command to its end; return its status, 128 + n for signal n; end whatever it has started.

        Its output goes to files: a process that it leaves behind would hold a pipe open.
        """
        passed = {*_PASSED, *(self.pass_environment or ())}
        env = {name: value for name, value in os.environ.items() if name in passed} | mark()
        if "PYTHONPATH" in env:  # the command runs in another folder
            env["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, env["PYTHONPATH"].split(os.pathsep)))
        env |= {"OPENAI_BASE_URL": task.base_url, "OPENAI_API_KEY": task.api_key, "OPENAI_MODEL": task.model}
        process = await asyncio.create_subprocess_exec(*self.argv, env=env, start_new_session=True, **options)
        try:
            status = await process.wait()
            return status if status >= 0 else 128 - status
        finally:
            with contextlib.suppress(ProcessLookupError):  # all of its process group has ended
                os.killpg(process.pid, signal.SIGKILL)
            # Also what the command has started in groups of its own: it has the key in its environment.
            await asyncio.shield(asyncio.to_thread(kill_until_gone, f"OPENAI_API_KEY={task.api_key}"))
            await process.wait()


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
