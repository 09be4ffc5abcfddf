"""Check for calls of tools without an output: the agent gave up, or lost what the tool said."""

from tasks.audit.checks.registry import AuditEvidence, Measured, register_check
from tasks.audit.checks.shares import CALL, highest_share


def unanswered_calls(evidence: AuditEvidence) -> Measured:
    """Measure the share of calls with the status `unanswered`, such as those before an episode's end."""
    return highest_share(
        evidence,
        "unanswered_calls",
        "calls have no output",
        "calls",
        "status = 'unanswered'",
        f"{CALL} || ' has no output'",
    )


register_check("unanswered_calls", "Calls without an output", "call", unanswered_calls, needs_calls=True)
