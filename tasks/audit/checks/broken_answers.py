"""Check for right answers that the next turn replaces by wrong ones: the policy may only react to the feedback."""

from tasks.audit.checks.registry import AuditEvidence, Measured, register_check
from tasks.audit.checks.shares import highest


def broken_answers(evidence: AuditEvidence) -> Measured:
    """Measure the share of right turns whose next turn is wrong, among right turns with a next turn."""
    database = evidence.database
    pairs = """
        select trajectory_id, data_set, turn, success, lead(success) over (partition by row order by turn) as after
        from turns where answer is not null"""
    database.flag(
        "broken_answers",
        "turn",
        f"""select trajectory_id, data_set, 'turn ' || (turn + 1) || ' was right, the next is not'
        from ({pairs}) where success > 0 and after = 0""",
    )
    return highest(
        evidence,
        "right answers with a next turn were followed by a wrong one",
        f"""select data_set, count(*) filter (after = 0) as part, count(*) as whole
        from ({pairs}) where success > 0 and after is not null group by 1""",
    )


register_check("broken_answers", "Right, then wrong", "turn", broken_answers, needs_scores=True)
