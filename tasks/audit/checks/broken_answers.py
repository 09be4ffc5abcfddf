"""Check for right answers that the next answer replaces by wrong ones: the policy may only react to the feedback."""

from tasks.audit.checks.registry import AuditEvidence, Measured, register_check
from tasks.audit.checks.shares import highest


def broken_answers(evidence: AuditEvidence) -> Measured:
    """Measure the share of answers that are wrong, among those that come after a right one in their conversation."""
    evidence.database.flag(
        "broken_answers",
        "turn",
        """select trajectory_id, data_set, 'turn ' || (before + 1) || ' was right, turn ' || (turn + 1) || ' is not'
        from revisions where was > 0 and success = 0""",
    )
    return highest(
        evidence,
        "right answers with a next answer were followed by a wrong one",
        """select data_set, count(*) filter (success = 0) as part, count(*) as whole
        from revisions where was > 0 and success is not null group by 1""",
    )


register_check("broken_answers", "Right, then wrong", "turn", broken_answers, needs_scores=True)
