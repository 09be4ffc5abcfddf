"""The registry of checks: what a check is given (`AuditEvidence`), and what it returns (`Measured`)."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from configs.audit import Audit, Checks
from storage import layout
from storage.logs.leases import is_held
from storage.objects.store import Store
from storage.versions import manifests
from tasks.audit.database import AuditDatabase
from tasks.audit.intake import Intake
from tasks.audit.results import Unit
from tasks.audit.selection import DataSet
from tasks.score.verifier import Verifier


@dataclass(frozen=True)
class AuditEvidence:
    """The data that checks read, and the settings."""

    database: AuditDatabase
    store: Store
    cache: Path
    data_sets: list[DataSet]
    intake: Intake
    settings: Audit
    verifier: Verifier
    drifts: dict[str, float] = field(default_factory=dict)
    """The mean difference to recomputed logprobs, by version of the data set; `logprob_drift` fills it."""

    @cached_property
    def complete(self) -> list[int]:
        """The numbers of the data sets that were read completely, because a missing row means nothing in others.

        A data set without scores is left out while a run is still working on it, because its scores are yet to come.
        """
        incomplete = self.intake.incomplete
        return [
            each.number
            for each in self.data_sets
            if each.version not in incomplete and not (not each.scores and self._is_in_progress(each))
        ]

    def _is_in_progress(self, data_set: DataSet) -> bool:
        trained = layout.checkpoint(data_set.run, data_set.iteration + 1)
        return (
            not data_set.is_evaluation
            and not manifests.committed(self.store, trained)
            and is_held(self.store, data_set.run) is not None
        )

    @cached_property
    def rows(self) -> int:
        """The number of trajectories that could be read."""
        return int(self.database.number("select count(*) from episodes"))

    @cached_property
    def scored(self) -> bool:
        """Return whether any turn has a score."""
        return bool(self.database.number("select count(*) from turns where verdict is not null"))

    @cached_property
    def calls(self) -> int:
        """The number of calls of tools."""
        return int(self.database.number("select count(*) from calls"))


@dataclass(frozen=True, slots=True)
class Measured:
    """The result of a check, which has already noted its cases in the database."""

    value: float  # compared with the threshold
    of: int  # number of units that were checked
    says: str  # a sentence with the numbers
    judged: float = 1.0  # share of its sample that the check could judge


class SkippedError(Exception):
    """A check cannot run; the message says why."""


Run = Callable[[AuditEvidence], Measured]


@dataclass(frozen=True, slots=True)
class AuditCheck:
    """One entry of the registry."""

    name: str
    title: str
    unit: Unit
    run: Run
    needs_scores: bool
    needs_calls: bool

    @property
    def about(self) -> str:
        """The description of the check's knob in the configuration."""
        return (Checks.model_fields[self.name].description or "").replace("\n", " ")


CHECKS: dict[str, AuditCheck] = {}


def register_check(
    name: str, title: str, unit: Unit, run: Run, *, needs_scores: bool = False, needs_calls: bool = False
) -> None:
    """Register a check under its name in `audit.checks`.

    Args:
        name: name of its knob.
        title: name for people.
        unit: unit of its cases.
        run: function that notes the cases (`AuditDatabase.flag`) and measures, or raises `SkippedError`.
        needs_scores: skip the check if no turn has a score.
        needs_calls: skip the check if no turn calls a tool.
    """
    if name not in Checks.model_fields:
        raise ValueError(f"check {name!r} has no knob in configs/audit.py: declare its threshold and severity there")
    if name in CHECKS:
        raise ValueError(f"check {name!r} is registered already: choose another name")
    CHECKS[name] = AuditCheck(name, title, unit, run, needs_scores, needs_calls)


def share(part: float, whole: float) -> float:
    """Return `part / whole`, or 0 if `whole` is 0."""
    return part / whole if whole else 0.0
