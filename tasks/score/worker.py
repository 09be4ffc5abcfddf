"""The code of the verifier's workers, with their limits; imports nothing heavy, because the parent imports it too."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

from storage.processes.limits import address_space, hard_address_space, limited, prepare_for_limits
from tasks.score.verdict import Verdict

GRADES: Mapping[str, str] = {"answer": "tasks.score.contract:grade", "library": "tasks.score.grade:grade"}
"""The functions that grade an answer, by `score.reading`. All others are users'."""

_MB = 2**20
_timeout_s = 0.0
_idle = _memory = 0  # bytes of an idle worker, and bytes that a call may use in addition


def prepare(timeout_s: float, memory_mb: int, grade: str) -> None:
    """Prepare a new worker, once: it ends with its parent, and gets its limits.

    A call of `judge_all` may use `timeout_s` seconds of processor time and `memory_mb` MB more than an idle worker.
    `grade` is the function that it will mostly call.
    """
    global _timeout_s, _idle, _memory
    prepare_for_limits()
    _imported(grade)("\\boxed{\\frac{x}{2}}", ("0.5x",))  # the first call builds the grammar, without limits
    _idle = address_space()
    _timeout_s, _memory = timeout_s, memory_mb * _MB


def room() -> tuple[int, int]:
    """Return the MB of an idle worker, and the MB that an answer may use in addition."""
    return _idle // _MB, (_most(_idle) - _idle) // _MB


def judge_all(name: str, items: Sequence[tuple[Any, ...]]) -> list[Verdict]:
    """Call the function `name` (`module:function`) with the arguments in each item; return its verdicts, in order.

    The kernel ends the process when their time is used up.

    Raises:
        MemoryError: they exceed the memory limit; the message is the limit.
    """
    function, most = _judge(name)
    try:
        with limited(_timeout_s, most):  # the limits do not include the messages between processes
            return [function(*item) for item in items]
    except MemoryError:
        raise MemoryError(f"{room()[1]} MB") from None


@cache
def _judge(name: str) -> tuple[Callable[..., Verdict], int]:
    """Return the function, and the most bytes of this process while it runs; its own imports count as idle."""
    function = _imported(name)
    if name not in GRADES.values():
        function = partial(_imported("tasks.score.own:call"), function)
    return function, _most(_idle if name in GRADES.values() else address_space())


def _imported(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    imported: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return imported


def _most(idle: int) -> int:
    return min(idle + _memory, hard_address_space() or 2**63)
