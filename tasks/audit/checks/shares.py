"""Measure a share of turns, calls, episodes or groups in each data set; the highest is compared with the threshold."""

from typing import Literal

from tasks.audit.checks.registry import AuditEvidence, Measured, share
from tasks.audit.results import Unit

CALL = "'turn ' || (turn + 1) || ', call ' || (number + 1) || ' of ' || if(name = '', 'no tool', left(name, 40))"
"""SQL: names a call in the detail of a case."""


def highest_share(
    evidence: AuditEvidence,
    check: str,
    what: str,
    source: Literal["episodes", "turns", "calls"],
    condition: str,
    detail: str,
    among: str = "true",
) -> Measured:
    """Flag the rows of `source` that fulfil `condition`, and return their highest share among the data sets.

    Args:
        evidence: the data to check.
        check: name of the check.
        what: what is counted, in words.
        source: table to read.
        condition: SQL condition of the rows to flag.
        detail: SQL expression for the detail of a case.
        among: SQL condition of all rows that are counted.
    """
    units: dict[str, Unit] = {"episodes": "trajectory", "turns": "turn", "calls": "call"}
    chosen = f"select trajectory_id, data_set, {detail} from {source} where ({among}) and ({condition})"
    evidence.database.flag(check, units[source], chosen)
    return highest(
        evidence,
        what,
        f"""select data_set, count(*) filter ({condition}) as part, count(*) as whole
        from {source} where {among} group by 1""",
    )


def highest(evidence: AuditEvidence, what: str, counts: str) -> Measured:
    """Return the highest share among the data sets; `counts` is a query with the columns data_set, part and whole."""
    rows = evidence.database.all(f"select version, part, whole from ({counts}) join data_sets using (data_set)")
    part, whole = sum(row[1] for row in rows), sum(row[2] for row in rows)
    version, most = max(((row[0], share(row[1], row[2])) for row in rows), key=lambda row: row[1], default=("", 0.0))
    says = f"{part:,} of {whole:,} {what} ({share(part, whole):.1%})"
    if len(rows) > 1 and part:
        says += f"; the highest share, {most:.1%}, in {version}"
    return Measured(most, whole, says)
