"""Check the policy version of each token: within a turn it may rise (new weights were swapped in), but never fall."""

from tasks.audit.checks.registry import AuditEvidence, Measured, register_check


def falling_versions(evidence: AuditEvidence) -> Measured:
    """Count rows with a falling, unknown or future version in a turn, or with a version outside of the turns."""
    database = evidence.database
    found = database.flag(
        "falling_versions",
        "trajectory",
        """select trajectory_id, data_set, case
            when unsorted then 'the policy version falls within a turn'
            when oldest < 0 then 'a sampled token has no policy version'
            when newest > newest_allowed then 'a token is of version ' || newest || ', newer than ' || newest_allowed
            else 'tokens that were not sampled have a policy version' end
        from (
            select trajectory_id, data_set, d.iteration as newest_allowed,
                coalesce(list_bool_or(list_transform(spans, lambda v: v <> list_sort(v))), false) as unsorted,
                list_min(flatten(spans)) as oldest, list_max(flatten(spans)) as newest,
                len(flatten(spans)) as sampled, len(list_filter(versions, lambda v: v <> -1)) as given
            from (
                select trajectory_id, data_set, versions,
                    list_transform(turns, lambda t: versions[t."start"::bigint + 1:t."end"]) as spans
                from trajectories
            ) join data_sets d using (data_set)
        ) where unsorted or oldest < 0 or newest > newest_allowed or sampled <> given""",
    )
    rows = int(database.number("select count(*) from episodes"))
    return Measured(found, rows, f"{found} of {rows:,} rows have impossible policy versions")


register_check("falling_versions", "Policy versions in turns", "trajectory", falling_versions)
