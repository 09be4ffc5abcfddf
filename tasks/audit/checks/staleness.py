"""Check the staleness: how many versions a token's policy was behind the policy in training."""

from tasks.audit.checks.registry import AuditEvidence, Measured, register_check


def staleness(evidence: AuditEvidence) -> Measured:
    """Measure by how many versions the stalest row exceeds the `rollout.max_head_offpolicyness` of its data set.

    Evaluations are not checked.
    """
    database = evidence.database
    database.flag(
        "staleness",
        "trajectory",
        f"""select trajectory_id, data_set, 'it is ' || behind || ' versions behind, ' || allowed || ' are allowed'
        from ({_BEHIND}) where behind > allowed""",
    )
    rows, worst, most = database.one(f"select count(*), max(behind - allowed), max(behind) from ({_BEHIND})")
    over = max(0, worst or 0)
    return Measured(
        over, rows, f"the stalest of {rows:,} rows is {most or 0} versions behind, {over} more than allowed"
    )


_BEHIND = """
    select trajectory_id, data_set, allowed,
        d.iteration - list_min(list_filter(versions, lambda v: v >= 0)) as behind
    from trajectories join data_sets d using (data_set) where not d.evaluation"""

register_check("staleness", "Staleness", "trajectory", staleness)
