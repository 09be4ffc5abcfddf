"""Scores that belong to nothing: of a turn that is not there, or a second one of the same turn."""

from tasks.audit.checks.registry import AuditEvidence, Measured, SkippedError, register_check


def orphan_scores(evidence: AuditEvidence) -> Measured:
    """Counts scores without their turn, and all but the first of a turn."""
    database = evidence.database
    scores = int(database.number("select count(*) from scores"))
    if not scores:
        raise SkippedError("there is no score to look at")
    lonely = database.flag(
        "orphan_scores",
        "turn",
        """select s.trajectory_id, s.data_set, 'a score of turn ' || (s.turn + 1) || ', which is not there'
        from scores s anti join turns t using (data_set, trajectory_id, turn)
        where list_contains(?, s.data_set)""",
        evidence.complete,
    )
    doubled = database.flag(
        "orphan_scores",
        "turn",
        """select trajectory_id, data_set, 'turn ' || (turn + 1) || ' has ' || count(*) || ' scores'
        from scores group by trajectory_id, data_set, turn having count(*) > 1""",
    )
    return Measured(
        lonely + doubled, scores, f"{lonely} of {scores:,} scores are of no turn; {doubled} turns have several"
    )


register_check("orphan_scores", "Scores without a turn", "turn", orphan_scores)
