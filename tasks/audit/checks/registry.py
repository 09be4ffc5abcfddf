"""The checks by name: what one is given, and what it answers."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from configs.audit import Audit, Checks
from storage import layout
from storage.logs.holders import is_held
from storage.objects.store import Store
from storage.versions import manifests
from tasks.audit.database import AuditDatabase
from tasks.audit.intake import Intake
from tasks.audit.results import Unit
from tasks.audit.selection import DataSet

if TYPE_CHECKING:
    from tasks.score.verifier import Verifier


@dataclass(frozen=True)
class AuditEvidence:
    """What checks look at."""

    database: AuditDatabase
    store: Store
    cache: Path
    data_sets: list[DataSet]
    intake: Intake
    settings: Audit
    verifier: "Verifier"
    drifts: dict[str, float] = field(default_factory=dict)
    """By version of a data set, where recomputed logprobs were compared."""

    @cached_property
    def complete(self) -> list[int]:
        """Numbers of the data sets that were taken whole: only there does a missing row mean anything.

        Not one that a run is still at work on: its scores are to come.
        """
        incomplete = self.intake.incomplete
        return [
            each.number
            for each in self.data_sets
            if each.version not in incomplete and not (not each.scores and self._is_at_work(each))
        ]

    def _is_at_work(self, data_set: DataSet) -> bool:
        trained = layout.checkpoint(data_set.run, data_set.iteration + 1)
        return (
            not data_set.is_evaluation
            and not manifests.committed(self.store, trained)
            and is_held(self.store, data_set.run) is not None
        )

    @cached_property
    def rows(self) -> int:
        """Trajectories that could be read."""
        return int(self.database.number("select count(*) from episodes"))

    @cached_property
    def scored(self) -> bool:
        """Whether any turn has a score."""
        return bool(self.database.number("select count(*) from turns where verdict is not null"))


@dataclass(frozen=True, slots=True)
class Measured:
    """A check's answer. The cases behind it are in the database by then."""

    value: float  # to be compared with the threshold
    of: int  # how many were looked at
    says: str  # a sentence with the numbers


class SkippedError(Exception):
    """A check cannot be made; the message says why."""


Run = Callable[[AuditEvidence], Measured]


@dataclass(frozen=True, slots=True)
class AuditCheck:
    """One entry of the registry."""

    name: str
    title: str
    unit: Unit
    run: Run
    needs_scores: bool

    @property
    def about(self) -> str:
        """What the configuration's page says of it."""
        return (Checks.model_fields[self.name].description or "").replace("\n", " ")


CHECKS: dict[str, AuditCheck] = {}


def register_check(name: str, title: str, unit: Unit, run: Run, *, needs_scores: bool = False) -> None:
    """Make a check known under its name in `audit.checks`.

    Args:
        name: of its knob.
        title: for people.
        unit: what its cases are.
        run: notes the cases (`AuditDatabase.flag`) and measures; raises `SkippedError` where it cannot.
        needs_scores: it is skipped where no turn has a score.
    """
    if name not in Checks.model_fields:
        raise ValueError(f"check {name!r} has no knob in configs/audit.py: declare its threshold and severity there")
    if name in CHECKS:
        raise ValueError(f"check {name!r} is registered already: choose another name")
    CHECKS[name] = AuditCheck(name, title, unit, run, needs_scores)


def share(part: float, whole: float) -> float:
    """`part` of `whole`; 0 where there is nothing."""
    return part / whole if whole else 0.0
