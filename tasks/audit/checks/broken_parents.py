"""Lineage that does not hold: what a data set says it was made from is missing, changed, or not what its rows say."""

from tasks.audit.checks.registry import AuditEvidence, Measured, register_check


def broken_parents(evidence: AuditEvidence) -> Measured:
    """Counts parents without a manifest of the hash that is named, and rows that name another policy or problem set."""
    database, intake = evidence.database, evidence.intake
    orphaned = database.flag_all("broken_parents", intake.orphaned)
    strangers = database.flag(
        "broken_parents",
        "trajectory",
        """select trajectory_id, data_set, case when strange
            then 'names the policy ' || t.policy || ', its data set was made from ' || d.policy
            else 'names the problem set ' || t.problem_set || ', its data set was made from ' || d.problem_set end
        from (
            select t.*, len(policies) > 0 and not list_contains(policies, t.policy) as strange,
                d.problem_set not in ('', t.problem_set) as foreign_set
            from (select trajectory_id, data_set, policy, problem_set from trajectories) t
            join data_sets d using (data_set)
        ) t join data_sets d using (data_set) where strange or foreign_set""",
    )
    says = f"{orphaned} of {intake.parents} parents are missing or changed; {strangers} rows name others"
    return Measured(orphaned + strangers, intake.parents, says)


register_check("broken_parents", "Broken lineage", "object", broken_parents)
