"""Check for jumps of the success rate. `learning.sql` has the other checks of what a policy learns."""

import math
from dataclasses import dataclass

from storage import layout
from tasks.audit.checks import AuditEvidence, Measured, check
from tasks.audit.data_sets import DataSet, fetch_data_sets, previous
from tasks.audit.results import Case

_LEAST_STEP = 0.1  # smaller steps raise no alarm, however certain they are


@dataclass(frozen=True, slots=True)
class _Success:
    """The success rate of first turns in a data set: mean and variance over its problems."""

    version: str
    mean: float
    variance: float
    problems: int


@dataclass(frozen=True, slots=True)
class _Step:
    """Two successive data sets."""

    before: _Success
    after: _Success

    @property
    def is_large(self) -> bool:
        before, after = self.before, self.after
        return abs(after.mean - before.mean) >= _LEAST_STEP and min(before.problems, after.problems) > 1

    @property
    def errors(self) -> float:
        """The step in standard errors of the difference.

        The standard error is that of the mean over problems, because the episodes of one problem are not independent. A
        minimum variance keeps it above 0 if all problems agree.
        """
        variances = (max(each.variance, 0.25 / each.problems) / each.problems for each in (self.before, self.after))
        return abs(self.after.mean - self.before.mean) / math.sqrt(sum(variances))

    def __str__(self) -> str:
        return f"first turn {self.before.mean:.3f} to {self.after.mean:.3f} in {self.after.version}"


@check("success_drift", "Jumps of the success rate", "data set", needs="scores")
def success_drift(evidence: AuditEvidence) -> Measured:
    """Measure the largest step from one iteration of a run to the next, which sampling noise may not explain."""
    steps = _steps(evidence)
    large = [step for step in steps if step.is_large]
    limit = evidence.settings.checks.success_drift.threshold
    cases = [
        Case("data set", step.after.version, step.after.version, f"{step}, {step.errors:.1f} standard errors")
        for step in large
        if step.errors > limit
    ]
    evidence.database.flag_all("success_drift", cases)
    if not large:
        return Measured(0, len(steps), f"{len(steps)} steps between data sets, none of {_LEAST_STEP} or more")
    most = max(large, key=lambda step: step.errors)
    says = f"the largest of {len(steps)} steps: {most}, {most.errors:.1f} errors"
    return Measured(most.errors, len(steps), says)


def _steps(evidence: AuditEvidence) -> list[_Step]:
    """Return pairs of scored training data sets: that of the iteration before, if it is in the store, and the next."""
    known = {version: _Success(version, *columns) for version, *columns in evidence.database.all(_SUCCESS)}
    steps = []
    for data_set in evidence.data_sets:
        if data_set.version in known and not data_set.is_evaluation and data_set.iteration:
            earlier = layout.trajectories(data_set.run, data_set.iteration - 1)
            if before := known.get(earlier) or _read_previous(evidence, data_set):
                steps.append(_Step(before, known[data_set.version]))
    return steps


_MEANS = "avg(mean), coalesce(var_samp(mean), 0), count(*)"
_SUCCESS = f"""
    select version, {_MEANS} from (
        select data_set, problem_id, avg(success) as mean from turns
        where answer = 0 and success is not null group by 1, 2
    ) join data_sets using (data_set) group by 1"""
_SUCCESS_IN_FILES = f"""
    select {_MEANS} from (
        select problem_id, avg(success) as mean from read_parquet(?) join (
            select trajectory_id, arg_min(success, turn) as success from read_parquet(?)
            where verdict <> 'none' group by 1
        ) using (trajectory_id) group by 1)"""


def _read_previous(evidence: AuditEvidence, data_set: DataSet) -> _Success | None:
    """Return the success rate of the data set before `data_set`; None if it is not in the store or not scored."""
    earlier = previous(evidence.store, data_set)
    if earlier is None or earlier.manifest is None:
        return None
    intake = fetch_data_sets(evidence.store, [earlier], evidence.cache)
    if not intake.trajectories or not intake.scores:
        return None
    files = [[str(path) for _, path in paths] for paths in (intake.trajectories, intake.scores)]
    found = _Success(earlier.version, *evidence.database.one(_SUCCESS_IN_FILES, *files))
    return found if found.problems else None
