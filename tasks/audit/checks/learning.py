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


@check("success_drift", "data set", needs="scores")
def success_drift(evidence: AuditEvidence) -> Measured:
    """Measure the largest step from one iteration of a run to the next, which sampling noise may not explain.

    The unit is the standard error of the difference. It is that of the mean over problems, because the episodes of one
    problem are not independent. A minimum variance keeps it above 0 if all problems agree.
    """
    known = {version: _Success(version, *columns) for version, *columns in evidence.database.all(_SUCCESS)}
    limit = evidence.settings.checks.success_drift.threshold
    count, large, cases = 0, list[tuple[float, str]](), list[Case]()
    for data_set in evidence.data_sets:
        after = known.get(data_set.version)
        if not after or data_set.is_evaluation or not data_set.iteration:
            continue
        earlier = layout.trajectories(data_set.run, data_set.iteration - 1)
        before = known.get(earlier) or _read_previous(evidence, data_set)
        if not before:
            continue
        count, step = count + 1, abs(after.mean - before.mean)
        if step >= _LEAST_STEP and min(before.problems, after.problems) > 1:
            variance = sum(max(each.variance, 0.25 / each.problems) / each.problems for each in (before, after))
            errors = step / math.sqrt(variance)
            says = f"first turn {before.mean:.3f} to {after.mean:.3f} in {after.version}"
            large.append((errors, says))
            if errors > limit:
                detail = f"{says}, {errors:.1f} standard errors"
                cases.append(Case("data set", after.version, after.version, detail))
    evidence.database.flag_all("success_drift", cases)
    if not large:
        return Measured(0, count, f"{count} steps between data sets, none of {_LEAST_STEP} or more")
    errors, says = max(large)
    return Measured(errors, count, f"the largest of {count} steps: {says}, {errors:.1f} errors")


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
