"""The main flow in a new process that kills or interrupts itself at a chosen point, or that a test ends by a signal.

Processes come from a fork server that has already imported Prefect and torch, so that fifty of them are affordable.
"""

import itertools
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal

import psutil

from storage import interrupts
from storage.errors import StorageError
from storage.versions import manifests

MARK = "KILLED_FLOW_TEST"
"""The environment variable that marks the descendants of a killed flow."""
OVERLAP = ["run.overlap=true", "rollout.max_head_offpolicyness=2"]
RANKS = ["train.parallel.shard=2"]
ANSWERS = "tasks.cluster.trainer:RayTrainer._answers"
"""The flow waits for ranks: that they begin, join, and carry out one order after the other."""


@dataclass(frozen=True, slots=True)
class Point:
    """A call at which the flow sends itself a signal: before or after the `nth` call of a function.

    Example: Point("train", "tasks.train.trainer:take_step", 2, "before")
    """

    stage: str
    function: str  # module:name or module:Class.name
    nth: int = 1
    when: Literal["before", "after"] = "before"
    number: signal.Signals = signal.SIGKILL

    def __str__(self) -> str:
        return f"{self.when} {self.function.rpartition(':')[2]} {self.nth}"


def start(overrides: list[str], point: Point | None, log: Path, environment: dict[str, str]) -> ForkServerProcess:
    """Run the flow with the configuration `smoke` as its command line does, in a new session.

    Its exit code is -9 if it was killed, 130 if it was interrupted, and 0 if it reached its end.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["flows.math_mt_ppo", "torch", "transformers", "tasks.train.trainer", "tasks.score"])
    process = context.Process(target=_run, args=(overrides, point, log, environment))
    process.start()
    return process


def no_process_left(mark: str, within_s: float = 200) -> None:
    """Wait until no process has this value of MARK in its environment."""
    deadline = time.monotonic() + within_s
    while left := [each for each in psutil.process_iter(["environ"]) if (each.info["environ"] or {}).get(MARK) == mark]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def _run(overrides: list[str], point: Point | None, log: Path, environment: dict[str, str]) -> None:
    os.setsid()
    output = log.open("ab", buffering=0)
    os.dup2(output.fileno(), sys.stdout.fileno())
    os.dup2(output.fileno(), sys.stderr.fileno())
    os.environ |= environment
    from flows.math_mt_ppo import math_mt_ppo

    _refuse_work_that_is_done()
    if point:
        send_at(point)
    interrupts.run(lambda: print(math_mt_ppo("smoke", overrides)))


def _refuse_work_that_is_done() -> None:
    """Make each stage fail the flow if its version is already committed."""

    def begin(
        call: Callable[..., None], draft: Any, store: Any, version: str, *arguments: Any, **keywords: Any
    ) -> None:
        if manifests.committed(store, version):
            raise StorageError(f"{version} is being made again")
        call(draft, store, version, *arguments, **keywords)

    _wrap("storage.versions.drafts:Draft.__init__", begin)


def send_at(point: Point) -> None:
    """Make this process send itself the signal when it reaches `point`."""
    calls = itertools.count(1)

    def count(call: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        is_there = next(calls) == point.nth
        if is_there and point.when == "before":
            os.kill(os.getpid(), point.number)
        result = call(*arguments, **keywords)
        if is_there and point.when == "after":
            os.kill(os.getpid(), point.number)
        return result

    _wrap(point.function, count)


def _wrap(function: str, wrapper: Callable[..., Any]) -> None:
    """Replace a function by `wrapper(function, *arguments)`."""
    owner_name, name = re.split(r"[.:](?=\w+$)", function)
    owner, original = resolve_name(owner_name), resolve_name(function)
    setattr(owner, name, lambda *arguments, **keywords: wrapper(original, *arguments, **keywords))
