"""The code of the verifier's workers: limits, graders, and calls of users' functions, which it imports when called."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cache, partial
from pkgutil import resolve_name
from typing import Any

from pydantic import TypeAdapter

from storage.processes.limits import address_space, hard_address_space, limited, prepare_for_limits
from tasks.registry import Code, described_with_place, files_of, refuse_other
from tasks.score.verdict import Answer, Verdict, checked, storable

_MB = 2**20
_timeout_s, _grade = 0.0, ""
_idle = _memory = 0  # bytes of an idle worker, and bytes that a call may use in addition


def prepare(parent: int, timeout_s: float, memory_mb: int, grade: str) -> None:
    """Prepare a new worker, once: it ends with the process `parent`, and gets its limits.

    A call of `judge_all` may use `timeout_s` seconds of processor time and `memory_mb` MB more than an idle worker.
    `grade` is the function that grades answers; all others are users'.
    """
    global _timeout_s, _grade, _idle, _memory
    prepare_for_limits(parent)
    resolve_name(grade)("\\boxed{\\frac{x}{2}}", ("0.5x",))  # the first call builds the grammar, without limits
    _idle = address_space()
    _timeout_s, _grade, _memory = timeout_s, grade, memory_mb * _MB


def judge_all(name: str, items: Sequence[tuple[Any, ...]], code: Code) -> list[Verdict]:
    """Call the function `name` (`module:function`) with the arguments in each item; return its verdicts, in order.

    The kernel ends the process when their time is used up. `code` is the fingerprint of a user's function.

    Raises:
        MemoryError: they exceed the memory limit; the message is the limit.
        CodeChangedError: this process would import other code.
    """
    function, most = _judge(name, frozenset(code.items()))
    try:
        with limited(_timeout_s, most):  # the limits do not include the messages between processes
            return [function(*item) for item in items]
    except MemoryError:
        hard = "" if hard_address_space() is None else ", or than the hard limit of address space (`ulimit -Hv`)"
        raise MemoryError(f"{_memory // _MB} MB{hard}") from None


@cache
def _judge(name: str, code: frozenset[tuple[str, str]]) -> tuple[Callable[..., Verdict], int]:
    """Return the function, and the most bytes of this process while it runs; its own imports count as idle."""
    function = resolve_name(name)
    if name != _grade:
        refuse_other(files_of(name), dict(code))
        function = partial(_call, function)
    return function, _memory + (_idle if name == _grade else address_space())


def _call(function: Callable[..., Any], answer: Answer, args: Mapping[str, Any]) -> Verdict:
    """Call a user's function in a worker; an exception, or a result that is no verdict, becomes an `error`."""
    try:
        return _verdict(function(answer, **args))
    except MemoryError:
        raise
    except BaseException as error:  # noqa: BLE001 - a user's code raises anything, which costs only its turn
        return Verdict("error", reason=storable(described_with_place(error)))


def _verdict(result: Any) -> Verdict:
    if isinstance(result, Verdict):
        valid = TypeAdapter(Verdict).validate_python(asdict(result))
        texts = {name: storable(getattr(valid, name)) for name in ("extracted", "solution", "reason")}
        return checked(Verdict(valid.name, **texts, reward=valid.reward, parts=valid.parts))
    if result in (0, 1):  # also True and False, of numpy, too
        return Verdict("correct" if result else "wrong")
    raise TypeError(f"the function returned {result!r:.80}: return True or False, or a Verdict with the reward")
