"""What the verifier's worker processes run around the judge; imports nothing heavy, so the parent may."""

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tasks.limits import address_space, hard_address_space, limited, prepare_for_limits

if TYPE_CHECKING:
    from storage.records import VerdictName

GRADE_MODULE = "tasks.score.grade"

Graded = tuple["VerdictName", str, int, str]
"""Verdict name, extracted, which solution (from 0), reason."""

_MB = 2**20
_timeout_s = 0.0
_idle = _memory = 0  # bytes: of an idle judge, and what it may have at most


def prepare(timeout_s: float, memory_mb: int) -> None:
    """Once in a new worker: it ends with its parent, and has limits from here on.

    A call of `grade_all` may use `timeout_s` seconds of processor time and `memory_mb` MB more than an idle judge.
    """
    global _timeout_s, _idle, _memory
    prepare_for_limits()
    _judge_all([("\\boxed{\\frac{1}{2}}", ("0.5",))])  # the first one builds the grammar, outside of any limit
    _idle = address_space()
    _timeout_s, _memory = timeout_s, min(_idle + memory_mb * _MB, hard_address_space() or 2**63)


def room() -> tuple[int, int]:
    """MB of an idle judge, and MB that an answer may use on top of them."""
    return _idle // _MB, (_memory - _idle) // _MB


def grade_all(pairs: Sequence[tuple[str, tuple[str, ...]]]) -> list[Graded]:
    """Outcomes of (answer, solutions) pairs, in order. The kernel ends the process when their time is used up.

    Raises:
        MemoryError: they need more memory than they may; says how much that is.
    """
    try:
        with limited(_timeout_s, _memory):  # messages between processes are not the answers' fault
            return _judge_all(pairs)
    except MemoryError:
        raise MemoryError(f"{room()[1]} MB") from None


def _judge_all(pairs: Sequence[tuple[str, tuple[str, ...]]]) -> list[Graded]:
    grade = importlib.import_module(GRADE_MODULE).grade
    return [grade(answer, solutions) for answer, solutions in pairs]
