"""What the verifier's worker processes run around the judge; imports nothing heavy, so the parent may."""

import ctypes
import importlib
import resource
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from storage.records import VerdictName

JUDGE = "tasks.rewards.judge"
OUT_OF_TIME = -signal.SIGPROF
"""Exit code of a worker whose answers used up their processor time."""

Outcome = tuple["VerdictName", str, int, str]
"""Verdict name, extracted, which solution (from 0), reason."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h

_timeout_s = 0.0  # no limit
_memory = resource.RLIM_INFINITY


def prepare(timeout_s: float, memory_mb: int) -> None:
    """Once in a new worker: it ends with its parent, and has limits from here on.

    A call of `judge_all` may use `timeout_s` seconds of processor time and `memory_mb` MB more than an idle judge.
    """
    global _timeout_s, _memory
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process at once; a handler would wait for C code to return
    judge_all([("\\boxed{\\frac{1}{2}}", ("0.5",))])  # the first one builds the grammar, outside of any limit
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _timeout_s, _memory = timeout_s, used + memory_mb * 2**20


def judge_all(pairs: Sequence[tuple[str, tuple[str, ...]]]) -> list[Outcome]:
    """Outcomes of (answer, solutions) pairs, in order. The kernel ends the process when their time is used up."""
    judge = importlib.import_module(JUDGE).judge
    with _limits():
        return [judge(answer, solutions) for answer, solutions in pairs]


@contextmanager
def _limits() -> Iterator[None]:
    """Processor time and memory for the length of the block: messages between processes are not the answers' fault."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_memory, hard))
    signal.setitimer(signal.ITIMER_PROF, _timeout_s)  # counts user and system time of this process
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
