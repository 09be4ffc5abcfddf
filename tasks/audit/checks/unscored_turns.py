"""Check for turns without a score: they cannot be trained on, and no rate includes them."""

from tasks.audit.checks.registry import AuditEvidence, Measured, register_check


def unscored_turns(evidence: AuditEvidence) -> Measured:
    """Count turns that have no row in the scores of their data set."""
    database = evidence.database
    found = database.flag(
        "unscored_turns",
        "turn",
        """select trajectory_id, data_set, 'turn ' || (turn + 1) || ' has no score'
        from turns where verdict is null and list_contains(?, data_set)""",
        evidence.complete,
    )
    turns = int(database.number("select count(*) from turns"))
    unscored = [each.version for each in evidence.data_sets if each.manifest and not each.scores]
    says = f"{found:,} of {turns:,} turns have no score"
    never = f"; {len(unscored)} data sets were never scored, such as {unscored[0]}" if unscored else ""
    return Measured(found, turns, says + never)


register_check("unscored_turns", "Turns without a score", "turn", unscored_turns)
