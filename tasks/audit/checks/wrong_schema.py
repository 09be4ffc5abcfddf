"""Files that this code does not understand: no Parquet, of a newer or another schema; left out of everything else."""

from tasks.audit.checks.registry import AuditEvidence, Measured, register_check


def wrong_schema(evidence: AuditEvidence) -> Measured:
    """Counts the files that `intake` could not take."""
    intake = evidence.intake
    found = evidence.database.flag_all("wrong_schema", intake.foreign)
    return Measured(found, intake.objects, f"{found} of {intake.objects} files have another schema than they should")


register_check("wrong_schema", "Unknown schema", "object", wrong_schema)
