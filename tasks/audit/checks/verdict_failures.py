"""Check for verdicts that are timeouts or errors of the verifier: these answers earn no reward, even if right."""

from tasks.audit.checks.registry import AuditEvidence, Measured, register_check
from tasks.audit.checks.shares import highest_share


def verdict_failures(evidence: AuditEvidence) -> Measured:
    """Measure the share of turns with the verdict `timeout` or `error`, among graded turns with a score."""
    return highest_share(
        evidence,
        "verdict_failures",
        "verdicts are timeouts or errors",
        "turns",
        "verdict in ('timeout', 'error')",
        "'turn ' || (turn + 1) || ': ' || verdict || ' ' || verdict_reason",
        "verdict <> 'none'",
    )


register_check("verdict_failures", "Verdicts that failed", "turn", verdict_failures, needs_scores=True)
