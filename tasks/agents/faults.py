"""Why an episode ended without a verdict, and whose fault that is: the policy's, which is trained on it, or not."""

import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

import storage
from storage.records import Fault
from storage.visible import described, visible
from tasks.inference.api import ContextLengthError

LONGEST_REASON = 2000

_PROJECT = Path(storage.__file__).parents[1]
_OTHERS = (
    "<",  # made by `exec`, or built in
    *(sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")),
    *(f"{_PROJECT / name}/" for name in ("configs", "storage", "tasks")),
)
"""How the files of libraries and of this project begin."""

_FRAMEWORKS = frozenset({
    ("agents", "MaxTurnsExceeded"), ("agents", "ModelBehaviorError"),
    ("instructor", "InstructorRetryException"), ("langgraph", "GraphRecursionError"),
    ("pydantic_ai", "UnexpectedModelBehavior"), ("pydantic_ai", "UsageLimitExceeded"),
    ("smolagents", "AgentMaxStepsError"), ("smolagents", "AgentParsingError"),
})  # fmt: skip
"""Errors of frameworks, by package and class, for answers that cannot be read and for too many steps."""


class PolicyError(RuntimeError):
    """The policy's own behaviour ended the episode without a verdict. Agents may raise it, and environments."""


def fault_of(error: BaseException, *, sampled: bool, sampling: bool = False) -> Fault:
    """Return whose fault the end of an episode by an error is: the policy's, which is trained on it, or the set-up's.

    | the episode ended with | fault |
    |---|---|
    | no room in the context for what follows a completion | policy |
    | more requests than `max_requests`, or than a framework's own limit allows | policy |
    | an error of the agent after a completion none of whose calls can be read | policy |
    | `PolicyError` of agent or environment, or a framework's error that says the same | policy |
    | several errors at once (`ExceptionGroup`), one of which is the policy's | policy |
    | the deadline, while the engine was sampling, which took most of the episode's time (`sampling`) | policy |
    | the deadline, while agent, tools or environment worked, or after they took most of the time | set-up |
    | any other error of agent or environment, a refused return value, a cancellation | set-up |
    | an engine that answers nothing: a request fails, or waits for longer than it takes to cut it | set-up |
    | any of these before the first token was `sampled`, such as a problem that has no room | set-up |

    A full queue of the engine, or a server that is just being restarted, looks like sampling: a deadline that is too
    short for the machine counts against the policy, as a token limit does.
    """
    policys = sampling or any(map(_is_policys, chain(error)))
    return "policy" if sampled and policys else "set-up"


def reason_of(error: BaseException) -> str:
    """Return type and message of an exception, and where in the user's own code it was raised, as records store them.

    Example: "KeyError: 'wall' (maze.py:14 in reset)"
    """
    place = next(filter(None, map(_place, chain(error))), "")
    return f"{described(error, LONGEST_REASON)} ({place})" if place else described(error, LONGEST_REASON)


def _place(error: BaseException) -> str:
    """Return the last frame of an exception in the user's own code; "" if it passed none."""
    frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [
        f"{Path(code.co_filename).name}:{line} in {code.co_name}" for code, line in frames if _is_own(code.co_filename)
    ]
    return visible(own[-1]) if own else ""


def _is_own(file: str) -> bool:
    return not file.startswith(_OTHERS)


def _is_policys(error: BaseException) -> bool:
    names = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(error).__mro__}
    return isinstance(error, PolicyError | ContextLengthError) or bool(names & _FRAMEWORKS)


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and those that it came from or holds, also what `raise … from None` hides."""
    seen, waiting = set[int](), [error]
    while waiting:
        error = waiting.pop()
        if error is None or id(error) in seen:  # one that is raised from itself comes from itself for ever
            continue
        seen.add(id(error))
        yield error
        waiting += error.exceptions if isinstance(error, BaseExceptionGroup) else ()
        waiting.append(error.__cause__ or error.__context__)
