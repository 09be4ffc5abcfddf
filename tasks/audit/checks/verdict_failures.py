"""Verdicts that are none: answers on which the judge ran out of time or broke earn nothing, right or wrong."""

from tasks.audit.checks.registry import AuditEvidence, Measured, register_check
from tasks.audit.checks.shares import highest_share


def verdict_failures(evidence: AuditEvidence) -> Measured:
    """The share of turns with the verdict `timeout` or `error`, among those with a score."""
    return highest_share(
        evidence,
        "verdict_failures",
        "verdicts are timeouts or errors",
        "turns",
        "verdict in ('timeout', 'error')",
        "'turn ' || (turn + 1) || ': ' || verdict || ' ' || judge_reason",
        "verdict is not null",
    )


register_check("verdict_failures", "Verdicts that failed", "turn", verdict_failures, needs_scores=True)
