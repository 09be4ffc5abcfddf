"""Check for groups without variance: their advantages are zero, so they cost a rollout and teach nothing."""

from tasks.audit.checks.registry import AuditEvidence, Measured, register_check
from tasks.audit.checks.shares import highest

GROUPS = """
    select data_set, problem_id, max(best) as best, max(episodes) as episodes, bool_and(alike) as same from (
        select t.data_set, t.problem_id, t.turn, max(t.success) as best, count(distinct t.row) as episodes,
            min(t.scored_reward) = max(t.scored_reward)
                and bool_or(t.verdict = 'none') = bool_and(t.verdict = 'none') as alike
        from turns t join episodes e using (row)
        where t.verdict is not null and e.status in ('completed', 'truncated') group by all
    ) group by 1, 2 having max(episodes) > 1"""
"""SQL: groups of two or more episodes; `same` is true if in each turn all episodes earned the same."""


def zero_variance(evidence: AuditEvidence) -> Measured:
    """Measure the share of groups in which each turn earned the same in all episodes that have this turn.

    In these groups a baseline leaves no advantage.
    """
    evidence.database.flag(
        "zero_variance",
        "group",
        f"""select problem_id, data_set, 'all ' || episodes || ' episodes are ' || if(best > 0, 'right', 'wrong')
        from ({GROUPS}) where same""",
    )
    return highest(
        evidence,
        "groups have no variance",
        f"select data_set, count(*) filter (same) as part, count(*) as whole from ({GROUPS}) group by 1",
    )


register_check("zero_variance", "Groups without variance", "group", zero_variance, needs_scores=True)
