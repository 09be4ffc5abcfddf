"""Shares of turns, episodes or groups, data set by data set: the highest one is what a threshold is about."""

from typing import Literal

from tasks.audit.checks.registry import AuditEvidence, Measured, share


def highest_share(
    evidence: AuditEvidence,
    check: str,
    what: str,
    source: Literal["episodes", "turns"],
    condition: str,
    detail: str,
    among: str = "true",
) -> Measured:
    """Notes the rows of `source` that fulfil `condition`, and measures their share where it is highest.

    Args:
        evidence: what is looked at.
        check: its name.
        what: of the share, in words.
        source: table.
        condition: SQL, of what counts.
        detail: SQL, what is said of a case.
        among: SQL, of what is looked at.
    """
    unit: Literal["turn", "trajectory"] = "turn" if source == "turns" else "trajectory"
    chosen = f"select trajectory_id, data_set, {detail} from {source} where ({among}) and ({condition})"
    evidence.database.flag(check, unit, chosen)
    return highest(
        evidence,
        what,
        f"""select data_set, count(*) filter ({condition}) as part, count(*) as whole
        from {source} where {among} group by 1""",
    )


def highest(evidence: AuditEvidence, what: str, counts: str) -> Measured:
    """The highest share among data sets; `counts` is a query of data_set, part and whole."""
    rows = evidence.database.all(f"select version, part, whole from ({counts}) join data_sets using (data_set)")
    part, whole = sum(row[1] for row in rows), sum(row[2] for row in rows)
    version, most = max(((row[0], share(row[1], row[2])) for row in rows), key=lambda row: row[1], default=("", 0.0))
    says = f"{part:,} of {whole:,} {what} ({share(part, whole):.1%})"
    if len(rows) > 1 and part:
        says += f"; the most, {most:.1%}, in {version}"
    return Measured(most, whole, says)
