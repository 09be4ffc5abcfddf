"""Check for episodes of a group that were sampled with the same seed: they are one episode, counted twice."""

from tasks.audit.checks.registry import AuditEvidence, Measured, register_check


def repeated_seeds(evidence: AuditEvidence) -> Measured:
    """Count turns with the same seed as the same turn of an earlier sample of their group.

    Trajectories of one episode have the same sample number and may share turns, so they are not compared.
    """
    database = evidence.database
    found = database.flag(
        "repeated_seeds",
        "turn",
        """with doubled as (
            select data_set, problem_id, turn, seed, min(sample) as first_sample from turns
            group by 1, 2, 3, 4 having count(distinct sample) > 1
        )
        select trajectory_id, data_set, 'turn ' || (t.turn + 1) || ' has the seed of another sample, ' || t.seed
        from turns t join doubled using (data_set, problem_id, turn, seed) where t.sample > first_sample""",
    )
    turns = int(database.number("select count(*) from turns"))
    return Measured(found, turns, f"{found} of {turns:,} turns were sampled with a seed that their group already had")


register_check("repeated_seeds", "Repeated seeds", "turn", repeated_seeds)
