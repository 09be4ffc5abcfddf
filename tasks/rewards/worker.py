"""What the verifier's worker processes run around the judge; imports nothing heavy, so the parent may."""

import ctypes
import importlib
import resource
import signal
from collections.abc import Sequence
from pathlib import Path

JUDGE = "tasks.rewards.judge"

Outcome = tuple[str, str, int, str]
"""Verdict name, extracted, which solution (from 0), reason."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


_limit = resource.RLIM_INFINITY


def prepare(memory_mb: int) -> None:
    """Once in a new worker: it ends with its parent, leaves Ctrl-C to it, and may use `memory_mb` more to judge."""
    global _limit
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    judge_all([("\\boxed{\\frac{1}{2}}", ("0.5",))])  # the first one builds the grammar, outside of any time limit
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _limit = used + memory_mb * 2**20


def judge_all(pairs: Sequence[tuple[str, tuple[str, ...]]]) -> list[Outcome]:
    """Outcomes of (answer, solutions) pairs, in order."""
    judge = importlib.import_module(JUDGE).judge
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_limit, hard))
    try:
        return [judge(answer, solutions) for answer, solutions in pairs]
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))  # messages between processes are not the answers' fault
