"""The code of the verifier's workers, with their limits; imports nothing heavy, because the parent imports it too."""

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tasks.limits import address_space, hard_address_space, limited, prepare_for_limits

if TYPE_CHECKING:
    from storage.records import VerdictName

GRADE_MODULE = "tasks.score.grade"

Graded = tuple["VerdictName", str, int, str]
"""Verdict name, extracted text, index of the solution, reason."""

_MB = 2**20
_timeout_s = 0.0
_idle = _memory = 0  # bytes of an idle worker, and most bytes of a worker


def prepare(timeout_s: float, memory_mb: int) -> None:
    """Prepare a new worker, once: it ends with its parent, and gets its limits.

    A call of `grade_all` may use `timeout_s` seconds of processor time and `memory_mb` MB more than an idle worker.
    """
    global _timeout_s, _idle, _memory
    prepare_for_limits()
    _grade_all([("\\boxed{\\frac{1}{2}}", ("0.5",))])  # the first call builds the grammar, without limits
    _idle = address_space()
    _timeout_s, _memory = timeout_s, min(_idle + memory_mb * _MB, hard_address_space() or 2**63)


def room() -> tuple[int, int]:
    """Return the MB of an idle worker, and the MB that an answer may use in addition."""
    return _idle // _MB, (_memory - _idle) // _MB


def grade_all(pairs: Sequence[tuple[str, tuple[str, ...]]]) -> list[Graded]:
    """Grade (answer, solutions) pairs, in order. The kernel ends the process when their time is used up.

    Raises:
        MemoryError: they exceed the memory limit; the message is the limit.
    """
    try:
        with limited(_timeout_s, _memory):  # the limits do not include the messages between processes
            return _grade_all(pairs)
    except MemoryError:
        raise MemoryError(f"{room()[1]} MB") from None


def _grade_all(pairs: Sequence[tuple[str, tuple[str, ...]]]) -> list[Graded]:
    grade = importlib.import_module(GRADE_MODULE).grade
    return [grade(answer, solutions) for answer, solutions in pairs]
