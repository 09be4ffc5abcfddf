"""Check for impossible behaviour logprobs: they make PPO's ratios infinite, or train on tokens never sampled."""

from storage.records import HIGHEST_LOGPROB
from tasks.audit.checks.registry import AuditEvidence, Measured, register_check


def bad_logprobs(evidence: AuditEvidence) -> Measured:
    """Count rows with a logprob that is NaN, infinite, above 0 by more than rounding, or not 0 outside of turns."""
    database = evidence.database
    found = database.flag(
        "bad_logprobs",
        "trajectory",
        f"""select trajectory_id, data_set, case
            when impossible > 0 then impossible || ' logprobs are not finite or above 0'
            else 'tokens that were not sampled have logprobs' end
        from (
            select trajectory_id, data_set,
                len(list_filter(logprobs, lambda p: not isfinite(p) or p > {HIGHEST_LOGPROB})) as impossible,
                len(list_filter(logprobs, lambda p: p <> 0)) as given,
                coalesce(list_sum(list_transform(turns, lambda t:
                    len(list_filter(logprobs[t."start"::bigint + 1:t."end"], lambda p: p <> 0)))), 0) as sampled
            from trajectories
        ) where impossible > 0 or given <> sampled""",
    )
    rows = int(database.number("select count(*) from episodes"))
    return Measured(found, rows, f"{found} of {rows:,} rows have impossible logprobs")


register_check("bad_logprobs", "Impossible logprobs", "trajectory", bad_logprobs)
