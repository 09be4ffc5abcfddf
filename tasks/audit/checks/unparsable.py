"""Check for turns in which no answer was found: the policy ignores the format, or the verifier does not know it."""

from tasks.audit.checks.registry import AuditEvidence, Measured, register_check
from tasks.audit.checks.shares import highest_share


def unparsable(evidence: AuditEvidence) -> Measured:
    """Measure the share of turns with the verdict `unparsable`, among graded turns with a score."""
    return highest_share(
        evidence,
        "unparsable",
        "turns have no answer",
        "turns",
        "verdict = 'unparsable'",
        "'turn ' || (turn + 1) || ' has no answer'",
        "verdict <> 'none'",
    )


register_check("unparsable", "Turns without an answer", "turn", unparsable, needs_scores=True)
