"""Check whether length correlates with success: if the longer answer of a group is mostly right, answers get longer."""

from tasks.audit.checks.registry import AuditEvidence, Measured, register_check
from tasks.audit.results import Case

_LEAST = 100  # turns in groups with right and wrong answers


def length_and_reward(evidence: AuditEvidence) -> Measured:
    """Measure the correlation of length and success of first turns, both minus their group's mean.

    The value is the largest absolute correlation among the data sets.
    """
    rows = evidence.database.all(
        f"""select version, count(*), corr(length, success) from (
            select data_set, "end" - "start" - avg("end" - "start") over grouped as length,
                success - avg(success) over grouped as success, stddev_pop(success) over grouped as spread
            from turns where answer = 0 and success is not null window grouped as (partition by data_set, problem_id)
        ) join data_sets using (data_set)
        where spread > 0 group by 1 having count(*) >= {_LEAST} and isfinite(corr(length, success))"""
    )
    turns = sum(row[1] for row in rows)
    if not rows:
        return Measured(0, 0, f"no data set has {_LEAST} turns in groups with right and wrong answers to correlate")
    limit = evidence.settings.checks.length_and_reward.threshold
    evidence.database.flag_all(
        "length_and_reward",
        [
            Case("data set", version, version, f"length and success of its first turns correlate by {found:+.2f}")
            for version, _, found in rows
            if abs(found) > limit
        ],
    )
    version, _, most = max(rows, key=lambda row: abs(row[2]))
    says = f"length and success of {turns:,} first turns correlate by at most {most:+.2f}, in {version}"
    return Measured(abs(most), len(rows), says)


register_check("length_and_reward", "Length against reward", "data set", length_and_reward, needs_scores=True)
