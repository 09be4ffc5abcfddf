"""The interface of scorers, which give verdicts on stored turns."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from configs.models import Role
from storage.records import Annotation
from tasks.score.verdict import Answer, Verdict
from tasks.score.verifier import Verifier

RunProgram = Callable[[str, str], str]
"""Runs a Python program with a text as its input, in a sandbox. Many threads may call it at the same time.

It returns what the program printed, and raises `ProgramError` if the program is to blame for having no result, another
exception if the sandbox is.
"""
Annotations = Mapping[tuple[str, int], Annotation]
"""What a model beside the policy said, by trajectory and turn."""
COLUMNS = ("trajectory_id", "turns", "source", "ungraded")
"""The columns that every scorer gets."""


class ProgramError(Exception):
    """A program failed or met a limit; the message says how."""


@dataclass(frozen=True, slots=True)
class ScorerContext:
    """The first argument of every scorer's constructor; the others are those of `score.args` under its name."""

    verifier: Verifier
    run_program: RunProgram
    annotations: Mapping[Role, Annotations] = field(default_factory=dict)
    """What models beside the policy said, by role."""


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
        ...
