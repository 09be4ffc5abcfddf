"""The interface of scorers: a turn to score (`Answer`), the verdict on it, and what a scorer has to offer."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from storage.records import Annotation, VerdictName
from tasks.thoughts import split

RunProgram = Callable[[str, str], str]
"""Runs a Python program with a text as its input, in a sandbox. Many threads may call it at the same time.

It returns what the program printed, and raises `ProgramError` if the program is to blame for having no result, another
exception if the sandbox is.
"""
Annotations = Mapping[tuple[str, int], Annotation]
"""The answers of a model beside the policy, by trajectory and turn."""
COLUMNS = ("trajectory_id", "turns", "source", "ungraded")
"""The columns that every scorer gets."""
FAILED = ("timeout", "error")
LIMIT_MET = "needs more than"
"""The beginning of the reason where the answer met a limit of time or memory."""
_LARGEST = 3e38  # rewards are stored as float32


@dataclass(frozen=True, slots=True)
class Answer:
    """A turn to score, within its stored trajectory.

    Example: Answer({"trajectory_id": "demo/3/12+7/0", "turns": [{"text": "19", …}], "solutions": ["19"], …}, turn=0)
    """

    row: dict[str, Any]  # columns of `storage.records.Trajectory`, without those that have a value for each token
    turn: int
    group: Sequence[dict[str, Any]] = ()  # the rows of its problem in the data set, with its own; with `score.group`

    @property
    def ungraded(self) -> bool:
        """True if the turn answers nothing, for agent or environment: no scorer gets it, its verdict is `none`."""
        return self.turn in self.row["ungraded"] or self.row["turns"][self.turn]["verdict"] == "none"

    @property
    def text(self) -> str:
        """The completion, with its thoughts between their tags."""
        return str(self.row["turns"][self.turn]["text"])

    @property
    def given(self) -> str:
        """The answer that the agent gave to the environment, without thoughts: at times a part of the completion."""
        answers = self.row.get("answers")
        return split(self.text if not answers or answers[self.turn] is None else str(answers[self.turn]))[1]

    @property
    def metadata(self) -> dict[str, Any]:
        """The problem's metadata."""
        return dict(json.loads(self.row["metadata"]))


@dataclass(frozen=True, slots=True)
class Verdict:
    """A scorer's result for one turn. A turn is right if its verdict is `correct`, whatever its reward.

    Example: Verdict("correct", extracted="19", solution="19"), or Verdict("wrong", reward=0.2, parts={"format": 0.2})
    """

    name: VerdictName
    extracted: str = ""  # what was read as the answer, cut to 500 characters
    solution: str = ""  # the gold solution that matched, or the first
    reason: str = ""  # details of a timeout or an error
    reward: float | None = None  # raw: any finite number; None: the success
    parts: dict[str, float] = field(default_factory=dict)  # the named parts of the reward

    @property
    def success(self) -> float:
        """1 for a right turn and 0 for any other."""
        return float(self.name == "correct")


class ProgramError(Exception):
    """A program failed or met a limit; the message says how."""


class Scorer(Protocol):
    """A scorer. The same stored turn gets the same verdict each time, so that scores can be computed again.

    An exception costs only the turns that cause it: their verdict is `error`, with the reason.

    It may also have an attribute `private`: a list of keys of problems' metadata, such as hidden tests. Agents,
    commands and whatever else plays for the policy never get these; scorers and environments do.
    """

    columns: Sequence[str]
    """The columns of trajectories that it reads, in addition to `COLUMNS`. If `solutions` is one of them, problems
    without any are refused when they are imported."""
    version: int
    """Raise it when a change of the scorer changes verdicts: it is a part of the scores' name."""

    def judge(self, answers: Sequence[Answer]) -> list[Verdict]:
        """Return the verdicts on `answers`, in order."""


def has_failed(name: str, reason: str) -> bool:
    """Return whether a grader failed by itself, so that a verdict says nothing about the answer.

    An answer that meets a limit is to blame for that. Otherwise a policy would rather stop graders than be wrong.
    """
    return name in FAILED and not reason.startswith(LIMIT_MET)


def checked(verdict: Verdict) -> Verdict:
    """Return the verdict, or an `error` with the reason if it cannot be stored: its numbers are to be finite.

    A turn that answers nothing (`none`) has no reward.
    """
    if verdict.reward is None and not verdict.parts:
        return verdict
    parts = {f"part {name!r} of the reward": value for name, value in verdict.parts.items()}
    numbers = {"reward": verdict.reward or 0.0} | parts
    for name, value in numbers.items():
        if not -_LARGEST < value < _LARGEST:  # also NaN
            return Verdict("error", reason=storable(f"{name} is {value!r}: give a finite number"))
    if verdict.name == "none" and any(numbers.values()):
        return Verdict("error", reason=storable(f"the verdict is 'none', which has no reward, but {numbers}"))
    return verdict


def storable(text: str) -> str:
    """Return the text, cut to 500 characters and without lone surrogates, which UTF-8 cannot encode."""
    return text[:500].encode("utf-8", "replace").decode()
