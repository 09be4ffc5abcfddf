"""Check for episodes that a token limit cut: the answer may have come a token later."""

from tasks.audit.checks.registry import AuditEvidence, Measured, register_check
from tasks.audit.checks.shares import highest_share


def truncated(evidence: AuditEvidence) -> Measured:
    """Measure the share of episodes with status `truncated`."""
    return highest_share(
        evidence, "truncated", "episodes were cut by a token limit", "episodes", "status = 'truncated'", "reason"
    )


register_check("truncated", "Cut by the token limit", "trajectory", truncated)
