"""Check for jumps of the success rate. `learning.sql` has the other checks of what a policy learns."""

import math

from tasks.audit.checks import AuditEvidence, Measured, check
from tasks.audit.results import Case

_LEAST_STEP = 0.1  # smaller steps raise no alarm, however certain they are


@check("success_drift", "data set", needs="scores")
def success_drift(evidence: AuditEvidence) -> Measured:
    """Measure the largest step from one iteration of a run to the next, which sampling noise may not explain.

    The unit is the standard error of the difference. It is that of the mean over problems, because the episodes of one
    problem are not independent. A minimum variance keeps it above 0 if all problems agree.
    """
    limit, large, cases = evidence.settings.checks.success_drift.threshold, list[tuple[float, str]](), list[Case]()
    steps = evidence.database.all(_STEPS)
    for version, before, after, variance in steps:
        if abs(after - before) >= _LEAST_STEP and variance:
            errors = abs(after - before) / math.sqrt(variance)
            says = f"first turn {before:.3f} to {after:.3f} in {version}"
            large.append((errors, says))
            if errors > limit:
                cases.append(Case("data set", version, version, f"{says}, {errors:.1f} standard errors"))
    evidence.database.flag_all("success_drift", cases)
    if not large:
        return Measured(0, len(steps), f"{len(steps)} steps between data sets, none of {_LEAST_STEP} or more")
    errors, says = max(large)
    return Measured(errors, len(steps), f"the largest of {len(steps)} steps: {says}, {errors:.1f} errors")


_STEPS = """
    with success as (
        select data_set, avg(mean) as mean, count(*) as problems,
            greatest(coalesce(var_samp(mean), 0), 0.25 / count(*)) / count(*) as variance
        from (
            select data_set, problem_id, avg(success) as mean from turns
            where answer = 0 and success is not null group by 1, 2
        ) group by data_set
    ), of_runs as (select * from success join data_sets using (data_set) where not evaluation)
    select a.version, b.mean, a.mean, if(least(a.problems, b.problems) > 1, a.variance + b.variance, 0)
    from of_runs a join of_runs b on a.run = b.run and a.iteration = b.iteration + 1 order by a.data_set"""
"""For each data set after another one of its run: its name, the success rates of first turns in both, and the variance
of their difference; 0 if one has a single problem."""
