"""Names of versions as types, so that code cannot confuse a policy with trajectories, or trajectories with scores.

`storage.layout` makes names from their parts. `PolicyVersion(text)` checks a name from a manifest or a command line;
`version_of(text)` does so if its kind is not known.
"""

import re
from collections.abc import Iterable
from typing import Any, ClassVar, Literal, Self, TypeVar

from pydantic_core import CoreSchema, core_schema

from storage.errors import DamagedError

_RUN = r"runs/(?!\.{1,2}/)[^/\\]+"
"""Matches the folder of a run, but no name that would climb out of the root."""

Kind = Literal[
    "run", "problems", "checkpoint", "trajectories", "annotations", "scores", "evaluation",
    "history", "curriculum", "decision", "audit", "exclusions"
]  # fmt: skip
KINDS: "dict[str, type[Version]]" = {}


class Version(str):
    """The name of a version: a string, the key of its folder. Its type is the kind of the version.

    Calling one of the types below checks that versions of this kind have such names; `version_of` finds the type.

    >>> version = ScoresVersion("runs/demo/scores/000003/1f0c4a7b")
    >>> version.kind, version.run, version.number
    ('scores', 'demo', 3)
    """

    kind: ClassVar[Kind]
    pattern: ClassVar[re.Pattern[str]]

    def __init_subclass__(cls, kind: Kind | None = None, where: str = "") -> None:
        """Declare a kind of versions, and the pattern of their names; classes without kind are bases of others."""
        if kind:
            KINDS[kind], cls.kind, cls.pattern = cls, kind, re.compile(where)

    def __new__(cls, text: str) -> Self:
        """Check the name. Raises DamagedError if versions of this kind have other names."""
        if not cls.is_place(text):
            raise DamagedError(f"{text!r} is not where {cls.kind} versions are, {cls.pattern.pattern}")
        return super().__new__(cls, text)

    @classmethod
    def is_place(cls, text: str) -> bool:
        return text.isprintable() and bool(cls.pattern.fullmatch(text))

    @classmethod
    def __get_pydantic_core_schema__(cls, _source: Any, _handler: Any) -> CoreSchema:
        """Allow this type as a field of records: a string in JSON, checked when it is read."""
        return core_schema.no_info_after_validator_function(cls, core_schema.str_schema())

    @property
    def run(self) -> str | None:
        """The name of its run; None for versions of no run, such as problem sets."""
        parts = self.split("/")
        return parts[1] if parts[0] == "runs" else None


class _Numbered(Version):
    """A version of a run with a number, which is an iteration or a policy version."""

    @property
    def run(self) -> str:
        return self.split("/")[1]

    @property
    def number(self) -> int:
        return int(self.split("/")[3])


class RunVersion(Version, kind="run", where=rf"{_RUN}/run"):
    """A run's configuration."""


class ProblemsVersion(Version, kind="problems", where=r"problems/(?!\.{1,2}$)[^/\\]+"):
    """A problem set."""


class PolicyVersion(_Numbered, kind="checkpoint", where=rf"{_RUN}/checkpoints/\d+"):
    """A checkpoint; its number is the number of updates before it."""


class TrajectoriesVersion(_Numbered, kind="trajectories", where=rf"{_RUN}/trajectories/\d+"):
    """The trajectories of an iteration."""


class EvaluationVersion(TrajectoriesVersion, kind="evaluation", where=rf"{_RUN}/evaluations/\d+(/[^/]+/[^/]+)?"):
    """The trajectories of an evaluation; its number is the policy version. Older stores name no set and protocol."""

    @property
    def set_name(self) -> str | None:
        """The name of the evaluation set; None in older stores."""
        parts = self.split("/")
        return parts[4] if len(parts) > 4 else None

    @property
    def policy(self) -> PolicyVersion:
        return PolicyVersion(f"runs/{self.run}/checkpoints/{self.split('/')[3]}")


def _about(kind: str) -> str:
    return rf"{_RUN}/({kind}/\d+|evaluations/\d+(/[^/]+/[^/]+)?/{kind})/[^/]+"


class _OfTrajectories(_Numbered):
    """A version about the trajectories of an iteration or of an evaluation."""

    @property
    def evaluation(self) -> EvaluationVersion | None:
        """The evaluation that has the trajectories; None if they are those of an iteration."""
        return EvaluationVersion(self.rpartition(f"/{self.kind}/")[0]) if "/evaluations/" in self else None


class ScoresVersion(_OfTrajectories, kind="scores", where=_about("scores")):
    """The scores of trajectories of an iteration or of an evaluation."""


class AnnotationsVersion(_OfTrajectories, kind="annotations", where=_about("annotations")):
    """The answers of a model beside the policy about trajectories of an iteration or of an evaluation."""


class HistoryVersion(_Numbered, kind="history", where=rf"{_RUN}/history/\d+"):
    """The results of each problem in so many iterations of a run, of older programs: their rows are not read."""


class CurriculumVersion(Version, kind="curriculum", where=rf"{_RUN}/curriculum"):
    """The curriculum of a run: how often it draws each problem."""


class DecisionVersion(Version, kind="decision", where=rf"{_RUN}/decision"):
    """The decision of a night: champion or challenger, and why."""


class AuditVersion(Version, kind="audit", where=r"audits/[0-9a-f]+"):
    """The findings of an audit."""


class ExclusionsVersion(Version, kind="exclusions", where=r"exclusions/[0-9a-f]+"):
    """The trajectories and problems that are kept out of training."""


_V = TypeVar("_V", bound=Version)


def select(kind: type[_V], names: Iterable[str]) -> list[_V]:
    """Return those of `names` that are versions of this kind.

    >>> select(ProblemsVersion, ["problems/1f0c", "runs/demo/checkpoints/000000"])
    ['problems/1f0c']
    """
    return [kind(name) for name in names if kind.is_place(name)]


def version_of(text: str) -> Version | None:
    """Return `text` as a version of its kind; None if no kind of version has such names.

    >>> type(version_of("runs/demo/checkpoints/000003")), version_of("demo/latest")
    (<class 'storage.version_names.PolicyVersion'>, None)
    """
    return next((kind(text) for kind in KINDS.values() if kind.is_place(text)), None)
