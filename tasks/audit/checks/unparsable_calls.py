"""Check for calls of tools that cannot be read: the policy does not know the format, or the renderer does not."""

from tasks.audit.checks.registry import AuditEvidence, Measured, register_check
from tasks.audit.checks.shares import CALL, highest_share


def unparsable_calls(evidence: AuditEvidence) -> Measured:
    """Measure the share of calls with the status `unparsable`."""
    return highest_share(
        evidence,
        "unparsable_calls",
        "calls cannot be read",
        "calls",
        "status = 'unparsable'",
        f"{CALL} || ' cannot be read: ' || left(arguments, 80)",
    )


register_check("unparsable_calls", "Calls that cannot be read", "call", unparsable_calls, needs_calls=True)
