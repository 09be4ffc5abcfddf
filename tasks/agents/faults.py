"""Why an episode ended without a verdict, and whose fault that is: the policy's, which is trained on it, or not."""

from storage.processes.limits import chain, is_hosts
from storage.records import Fault
from storage.visible import described, with_own_line
from tasks.inference.api import ContextLengthError

LONGEST_REASON = 2000

_FRAMEWORKS = frozenset({
    ("agents", "MaxTurnsExceeded"), ("agents", "ModelBehaviorError"),
    ("dspy", "AdapterParseError"), ("google", "LlmCallsLimitExceededError"),
    ("instructor", "InstructorRetryException"), ("instructor", "IncompleteOutputException"),
    ("langgraph", "GraphRecursionError"), ("openai", "LengthFinishReasonError"),
    ("pydantic_ai", "UnexpectedModelBehavior"), ("pydantic_ai", "UsageLimitExceeded"),
    ("smolagents", "AgentMaxStepsError"), ("smolagents", "AgentParsingError"),
    ("strands", "MaxTokensReachedException"), ("strands", "StructuredOutputException"),
})  # fmt: skip
"""Errors of frameworks, by package and class, for answers that cannot be read or were cut, and for too many steps."""


class PolicyError(RuntimeError):
    """The policy's own behaviour ended the episode without a verdict. Agents may raise it, and environments."""


def fault_of(error: BaseException, *, sampled: bool, sampling: bool = False) -> Fault:
    """Return whose fault the end of an episode by an error is: the policy's, which is trained on it, or the set-up's.

    | the episode ended with | fault |
    |---|---|
    | no room in the context for what follows a completion | policy |
    | more requests than `max_requests`, or than a framework's own limit allows | policy |
    | an error of the agent after a completion with a call that cannot be read | policy |
    | `PolicyError` of agent or environment, or a framework's error that says the same | policy |
    | several errors at once (`ExceptionGroup`), one of which is the policy's | policy |
    | the deadline, while the engine was sampling, which took most of the episode's time (`sampling`) | policy |
    | the deadline, while agent, tools or environment worked, or after they took most of the time | set-up |
    | no more open files, memory or room on a disk (`is_hosts`), whatever followed from it | set-up |
    | any other error of agent or environment, a refused return value, a cancellation | set-up |
    | an engine that answers nothing: a request fails, or waits for longer than it takes to cut it | set-up |
    | any of these before the first token was `sampled`, such as a problem that has no room | set-up |

    A full queue of the engine, or a server that is just being restarted, looks like sampling: a deadline that is too
    short for the machine counts against the policy, as a token limit does.
    """
    found = [(kind, kind.__module__.partition(".")[0]) for each in chain(error) for kind in type(each).__mro__]
    known = any(kind in (PolicyError, ContextLengthError) or (top, kind.__name__) in _FRAMEWORKS for kind, top in found)
    policys = sampling or (known and not is_hosts(error))
    return "policy" if sampled and policys else "set-up"


def reason_of(error: BaseException) -> str:
    """Return type and message of an exception, and the user's own line that raised it, as records store them."""
    return with_own_line(described(error, LONGEST_REASON), error)
