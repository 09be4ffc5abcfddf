"""Check the lineage: a data set's parents must exist unchanged and be the ones that its rows name."""

from tasks.audit.checks.registry import AuditEvidence, Measured, register_check


def broken_parents(evidence: AuditEvidence) -> Measured:
    """Count parents whose manifest is missing or has another hash, and rows that name another policy or problem set."""
    database, intake = evidence.database, evidence.intake
    orphaned = database.flag_all("broken_parents", intake.orphaned)
    mismatched = database.flag(
        "broken_parents",
        "trajectory",
        """select trajectory_id, data_set, case when other_policy
            then 'names the policy ' || t.policy || ', its data set was made from ' || d.policy
            else 'names the problem set ' || t.problem_set || ', its data set was made from ' || d.problem_set end
        from (
            select t.*, len(policies) > 0 and not list_contains(policies, t.policy) as other_policy,
                d.problem_set not in ('', t.problem_set) as other_set
            from (select trajectory_id, data_set, policy, problem_set from trajectories) t
            join data_sets d using (data_set)
        ) t join data_sets d using (data_set) where other_policy or other_set""",
    )
    says = f"{orphaned} of {intake.parents} parents are missing or changed; {mismatched} rows name other parents"
    return Measured(orphaned + mismatched, intake.parents, says)


register_check("broken_parents", "Broken lineage", "object", broken_parents)
