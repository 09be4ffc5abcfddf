"""Check for scores of turns that do not exist, and for second scores of the same turn."""

from tasks.audit.checks.registry import AuditEvidence, Measured, SkippedError, register_check


def orphan_scores(evidence: AuditEvidence) -> Measured:
    """Count scores without a turn, and turns with several scores."""
    database = evidence.database
    scores = int(database.number("select count(*) from scores"))
    if not scores:
        raise SkippedError("there is no score to check")
    without_turn = database.flag(
        "orphan_scores",
        "turn",
        """select s.trajectory_id, s.data_set, 'a score of turn ' || (s.turn + 1) || ', which does not exist'
        from scores s anti join turns t using (data_set, trajectory_id, turn)
        where list_contains(?, s.data_set)""",
        evidence.complete,
    )
    repeated = database.flag(
        "orphan_scores",
        "turn",
        """select trajectory_id, data_set, 'turn ' || (turn + 1) || ' has ' || count(*) || ' scores'
        from scores group by trajectory_id, data_set, turn having count(*) > 1""",
    )
    return Measured(
        without_turn + repeated,
        scores,
        f"{without_turn} of {scores:,} scores belong to no turn; {repeated} turns have several scores",
    )


register_check("orphan_scores", "Scores without a turn", "turn", orphan_scores)
