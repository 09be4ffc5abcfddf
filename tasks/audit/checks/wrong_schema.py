"""Check for files that this program cannot read: not Parquet, or with a newer or another schema.

They are left out of all other checks.
"""

from tasks.audit.checks.registry import AuditEvidence, Measured, register_check


def wrong_schema(evidence: AuditEvidence) -> Measured:
    """Count the files that `tasks.audit.intake` noted as having another schema."""
    intake = evidence.intake
    found = evidence.database.flag_all("wrong_schema", intake.foreign)
    return Measured(found, intake.objects, f"{found} of {intake.objects} files have an unknown schema")


register_check("wrong_schema", "Unknown schema", "object", wrong_schema)
