"""Check for groups whose answers are all the same: seeds may have no effect, or the policy explores no more."""

from tasks.audit.checks.registry import AuditEvidence, Measured, register_check
from tasks.audit.checks.shares import highest

_LEAST = 4  # episodes of a group
_LONG = 16  # tokens; shorter right answers are often the same


def identical_answers(evidence: AuditEvidence) -> Measured:
    """Measure the share of groups whose first answers are all the same text, with at least 16 tokens or wrong."""
    groups = f"""
        select data_set, problem_id, count(*) as episodes,
            count(distinct text) = 1 and (min("end" - "start") >= {_LONG} or coalesce(max(success), 1) = 0) as same
        from turns where answer = 0 group by 1, 2 having count(*) >= {_LEAST}"""
    evidence.database.flag(
        "identical_answers",
        "group",
        f"select problem_id, data_set, 'all ' || episodes || ' first answers are the same' from ({groups}) where same",
    )
    return highest(
        evidence,
        "groups gave only one answer",
        f"select data_set, count(*) filter (same) as part, count(*) as whole from ({groups}) group by 1",
    )


register_check("identical_answers", "One answer for a whole group", "group", identical_answers)
