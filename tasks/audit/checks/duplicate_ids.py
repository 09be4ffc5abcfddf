"""Check for rows with the id of another row: a lookup by id finds only one of them."""

from tasks.audit.checks.registry import AuditEvidence, Measured, register_check


def duplicate_ids(evidence: AuditEvidence) -> Measured:
    """Count all rows but the first of each id, over all data sets together."""
    database = evidence.database
    found = database.flag(
        "duplicate_ids",
        "trajectory",
        """select trajectory_id, data_set, 'an earlier row has the same id'
        from episodes qualify row_number() over (partition by trajectory_id order by row) > 1""",
    )
    rows = int(database.number("select count(*) from episodes"))
    return Measured(found, rows, f"{found} of {rows} rows have the id of an earlier row")


register_check("duplicate_ids", "Duplicate ids", "trajectory", duplicate_ids)
