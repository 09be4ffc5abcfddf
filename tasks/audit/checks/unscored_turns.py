"""Turns without a score: they cannot be trained on, and every rate is of the others only."""

from tasks.audit.checks.registry import AuditEvidence, Measured, register_check


def unscored_turns(evidence: AuditEvidence) -> Measured:
    """Counts turns that the scores of their data set do not mention."""
    database = evidence.database
    found = database.flag(
        "unscored_turns",
        "turn",
        """select trajectory_id, data_set, 'turn ' || (turn + 1) || ' has no score'
        from turns where verdict is null and list_contains(?, data_set)""",
        evidence.complete,
    )
    turns = int(database.number("select count(*) from turns"))
    bare = [each.version for each in evidence.data_sets if each.manifest and not each.scores]
    says = f"{found:,} of {turns:,} turns have no score"
    return Measured(
        found, turns, says + (f"; {len(bare)} data sets were never scored, such as {bare[0]}" if bare else "")
    )


register_check("unscored_turns", "Turns without a score", "turn", unscored_turns)
