"""Turns in which no answer was found: the format is not kept, or the judge does not know it."""

from tasks.audit.checks.registry import AuditEvidence, Measured, register_check
from tasks.audit.checks.shares import highest_share


def unparsable(evidence: AuditEvidence) -> Measured:
    """The share of turns with the verdict `unparsable`, among those with a score."""
    return highest_share(
        evidence,
        "unparsable",
        "turns hold no answer",
        "turns",
        "verdict = 'unparsable'",
        "'turn ' || (turn + 1) || ' holds no answer'",
        "verdict is not null",
    )


register_check("unparsable", "Turns without an answer", "turn", unparsable, needs_scores=True)
