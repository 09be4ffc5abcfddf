"""Episodes that failed, by their deadline or by an error: what is left may be the easy part."""

from tasks.audit.checks.registry import AuditEvidence, Measured, register_check
from tasks.audit.checks.shares import highest_share


def failed(evidence: AuditEvidence) -> Measured:
    """The share of episodes of status `failed`."""
    return highest_share(evidence, "failed", "episodes failed", "episodes", "status = 'failed'", "reason")


register_check("failed", "Failed episodes", "trajectory", failed)
