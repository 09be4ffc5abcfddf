"""The interface of environments: gymnasium's `reset` and `step`, asynchronous."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from storage.records import Problem
from tasks.score.verifier import Verifier


@dataclass(frozen=True, slots=True)
class EnvironmentContext:
    """The first argument of every environment's constructor; the others are `environment.args`."""

    verifier: Verifier


class StepResult(NamedTuple):
    """The return value of an environment's `step`."""

    observation: str
    reward: float
    terminated: bool
    truncated: bool
    info: Mapping[str, Any]


class Environment(Protocol):
    """An environment; every episode gets a new one.

    It may also have an `async def close(self)`, which is called at the episode's end, whatever ended it.
    """

    async def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Begin with `options["problem"]` (a `storage.records.Problem`); return (observation, info).

        `options["metadata"]` has the problem's metadata as a dictionary; `problem.metadata` is the same as JSON.
        An environment grades, so it gets the whole problem, with the metadata that scorers call private: what it
        observes, and `info`, must not tell them.
        """
        ...

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Grade an answer; return (observation, reward, terminated, truncated, info).

        The reward is any finite number, of each turn or only of the last one. The trajectory records it, and of `info`

        - `verdict`: a word on the turn, one of `storage.records.VerdictName` if possible: only `correct` is a success,
          and `none` says that the turn answered nothing, so that it earns nothing;
        - `success`: whether the turn is right, in place of a verdict or in addition to a word of your own;
        - `parts`: the named parts of the reward, such as `{"correct": 1.0, "format": 0.2}`; without a verdict the part
          named `correct` says whether the turn is right.

        A NaN or infinite reward or part fails the episode.
        """
        ...


def problem_of(options: dict[str, Any] | None) -> Problem:
    """Return the problem in the `options` of a reset."""
    problem = (options or {}).get("problem")
    assert isinstance(problem, Problem), "reset needs options={'problem': Problem}"
    return problem


def verdict_of(info: Mapping[str, Any]) -> str:
    """Return the verdict in the `info` of a step. It is `correct` if and only if `success` is true, where both exist.

    >>> verdict_of({"verdict": "unparsable", "success": False}), verdict_of({"success": True}), verdict_of({})
    ('unparsable', 'correct', '')
    """
    verdict = str(info.get("verdict", ""))
    if info.get("success"):
        return "correct"
    return "wrong" if "success" in info and verdict in ("", "correct") else verdict
