"""Check for episodes that failed by their deadline or an error: the remaining ones may be the easier part."""

from tasks.audit.checks.registry import AuditEvidence, Measured, register_check
from tasks.audit.checks.shares import highest_share


def failed(evidence: AuditEvidence) -> Measured:
    """Measure the share of episodes with status `failed`."""
    return highest_share(evidence, "failed", "episodes failed", "episodes", "status = 'failed'", "reason")


register_check("failed", "Failed episodes", "trajectory", failed)
