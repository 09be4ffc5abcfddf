"""Check for jumps of the success rate between successive data sets that sampling noise cannot explain."""

import math
from dataclasses import dataclass

from storage import layout
from tasks.audit.checks.registry import AuditEvidence, Measured, register_check
from tasks.audit.intake import fetch_data_sets
from tasks.audit.results import Case
from tasks.audit.selection import DataSet, previous

_LEAST = 0.1  # smaller steps raise no alarm, however certain they are


@dataclass(frozen=True, slots=True)
class _Success:
    """The success rate of first turns in a data set: mean and variance over its problems."""

    version: str
    mean: float
    variance: float
    problems: int


def success_drift(evidence: AuditEvidence) -> Measured:
    """Measure the largest step from one iteration of a run to the next, in standard errors of the difference.

    The standard error is that of the mean over problems, because the episodes of one problem are not independent.
    """
    steps = _steps(evidence)
    large = [(before, after, _errors(before, after)) for before, after in steps if _is_large(before, after)]
    limit = evidence.settings.checks.success_drift.threshold
    evidence.database.flag_all(
        "success_drift",
        [
            Case(
                "data set",
                after.version,
                after.version,
                f"{_describe_step(before, after)}, {errors:.1f} standard errors",
            )
            for before, after, errors in large
            if errors > limit
        ],
    )
    if not large:
        return Measured(0, len(steps), f"{len(steps)} steps between data sets, none of {_LEAST} or more")
    before, after, errors = max(large, key=lambda step: step[2])
    return Measured(
        errors, len(steps), f"the largest of {len(steps)} steps: {_describe_step(before, after)}, {errors:.1f} errors"
    )


def _describe_step(before: _Success, after: _Success) -> str:
    return f"first turn {before.mean:.3f} to {after.mean:.3f} in {after.version}"


def _is_large(before: _Success, after: _Success) -> bool:
    return abs(after.mean - before.mean) >= _LEAST and min(before.problems, after.problems) > 1


def _errors(before: _Success, after: _Success) -> float:
    """Return the step in standard errors; a minimum variance keeps the error above 0 if all problems agree."""
    variances = (max(each.variance, 0.25 / each.problems) / each.problems for each in (before, after))
    return abs(after.mean - before.mean) / math.sqrt(sum(variances))


def _steps(evidence: AuditEvidence) -> list[tuple[_Success, _Success]]:
    """Return pairs of scored training data sets: that of the iteration before, if it is in the store, and the next."""
    rates = {row[0]: _Success(row[1], row[2], row[3] or 0.0, row[4]) for row in evidence.database.all(_QUERY)}
    known = {each.version: rates[each.number] for each in evidence.data_sets if each.number in rates}
    steps = []
    for data_set in evidence.data_sets:
        if data_set.version in known and not data_set.is_evaluation and data_set.iteration:
            earlier = layout.trajectories(data_set.run, data_set.iteration - 1)
            if before := known.get(earlier) or _read_previous(evidence, data_set):
                steps.append((before, known[data_set.version]))
    return steps


_QUERY = """
    select data_set, version, avg(mean), var_samp(mean), count(*) from (
        select data_set, problem_id, avg(success) as mean from turns
        where answer = 0 and success is not null group by 1, 2
    ) join data_sets using (data_set) group by 1, 2"""


def _read_previous(evidence: AuditEvidence, data_set: DataSet) -> _Success | None:
    """Return the success rate of the data set before `data_set`; None if it is not in the store or not scored."""
    earlier = previous(evidence.store, data_set)
    if earlier is None or earlier.manifest is None:
        return None
    intake = fetch_data_sets(evidence.store, [earlier], evidence.cache)
    if not intake.trajectories or not intake.scores:
        return None
    trajectories, scores = ([str(path) for _, path in paths] for paths in (intake.trajectories, intake.scores))
    mean, variance, problems = evidence.database.one(
        """select avg(mean), var_samp(mean), count(*) from (
            select problem_id, avg(success) as mean from read_parquet(?) join (
                select trajectory_id, arg_min(success, turn) as success from read_parquet(?)
                where verdict <> 'none' group by 1
            ) using (trajectory_id) group by 1)""",
        trajectories,
        scores,
    )
    return _Success(earlier.version, mean, variance or 0.0, problems) if problems else None


register_check("success_drift", "Jumps of the success rate", "data set", success_drift, needs_scores=True)
