"""Check for tools whose calls fail: the tool is broken, or its description misleads the policy."""

from tasks.audit.checks.registry import AuditEvidence, Measured, register_check, share
from tasks.audit.checks.shares import CALL

_LEAST = 20  # calls of a tool in a data set; of fewer a share says little
_SHOWN = 40  # characters


def tool_errors(evidence: AuditEvidence) -> Measured:
    """Measure the share of failed calls of each tool in each data set, among those that got an output.

    The value is the highest share among tools with at least 20 such calls.
    """
    database = evidence.database
    database.flag(
        "tool_errors",
        "call",
        f"select trajectory_id, data_set, {CALL} || ' failed: ' || left(output, 80) from calls where status = 'failed'",
    )
    rows = database.all(
        """select version, name, count(*) filter (status = 'failed'), count(*)
        from calls join data_sets using (data_set) where status in ('answered', 'failed') group by all order by all"""
    )
    failed, ran = sum(row[2] for row in rows), sum(row[3] for row in rows)
    says = f"{failed:,} of {ran:,} calls failed ({share(failed, ran):.1%})"
    often = [row for row in rows if row[3] >= _LEAST]
    if not often:
        return Measured(0.0, ran, f"{says}; no tool has {_LEAST} calls in a data set, fewer raise no alarm")
    version, name, part, whole = max(often, key=lambda row: share(row[2], row[3]))
    if part:
        says += (
            f"; the highest share, {share(part, whole):.1%} of {whole:,} calls, is that of {name[:_SHOWN]} in {version}"
        )
    return Measured(share(part, whole), ran, says)


register_check("tool_errors", "Calls that failed", "call", tool_errors, needs_calls=True)
