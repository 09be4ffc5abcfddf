"""Whose fault it is that an episode ended without a verdict."""

import errno

import pytest

from storage.processes.limits import chain
from tasks.agents.endpoint.completions import OverrunError
from tasks.agents.faults import PolicyError, fault_of
from tasks.inference.api import AbortedError, ContextLengthError


def came_from(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


class OwnError(PolicyError):
    """An agent's own."""


class MaxTurnsExceeded(Exception):  # noqa: N818 - the framework's name
    """As the OpenAI Agents SDK raises it."""


MaxTurnsExceeded.__module__ = "agents.exceptions"
ENDED = [
    (ContextLengthError("prompt of 300 tokens"), "policy"),
    (OverrunError("more than 256 requests"), "policy"),
    (OwnError("no move"), "policy"),
    (came_from(RuntimeError("the agent failed"), OwnError("no move")), "policy"),
    (came_from(RuntimeError("the agent failed"), MaxTurnsExceeded()), "policy"),
    (ExceptionGroup("two workers", [OSError("gone"), OwnError("no move")]), "policy"),
    (came_from(RuntimeError("failed"), ExceptionGroup("tasks", [ContextLengthError("full")])), "policy"),
    (ExceptionGroup("two workers", [OSError("gone"), LookupError("lost")]), "set-up"),
    (came_from(OwnError("no answer"), OSError(errno.EMFILE, "Too many open files")), "set-up"),
    (LookupError("lost the thread"), "set-up"),
    (AbortedError("aborted"), "set-up"),
]


@pytest.mark.parametrize(("error", "fault"), ENDED, ids=[repr(error) for error, _ in ENDED])
def test_what_ended_an_episode_decides(error: Exception, fault: str) -> None:
    """Without a sampled token there is nothing that the policy could have done."""
    assert fault_of(error, sampled=True) == fault
    assert fault_of(error, sampled=False) == "set-up"


def test_the_deadline_is_the_policys_while_it_samples() -> None:
    assert fault_of(TimeoutError(), sampled=True, sampling=True) == "policy"
    assert fault_of(TimeoutError(), sampled=True, sampling=False) == "set-up"
    odd = ValueError("odd")  # raised from itself: the chain of causes has an end
    odd.__cause__ = odd
    assert list(chain(odd)) == [odd]
