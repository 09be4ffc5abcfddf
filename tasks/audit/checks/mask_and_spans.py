"""Check that the action mask (tokens that are trained on) and the turns (tokens that were sampled) agree."""

from tasks.audit.checks.registry import AuditEvidence, Measured, register_check

_TRUE = "coalesce(list_sum({}::tinyint[]), 0)"


def mask_and_spans(evidence: AuditEvidence) -> Measured:
    """Count rows whose token columns differ in length, or whose mask is not exactly the spans of their turns."""
    database = evidence.database
    found = database.flag(
        "mask_and_spans",
        "trajectory",
        f"""select trajectory_id, data_set, case
            when not same then 'its token columns differ in length'
            when not inside then 'a turn lies outside of its tokens'
            else masked || ' tokens are in the mask, ' || spoken || ' in turns, ' || agreed || ' in both' end
        from (
            select trajectory_id, data_set,
                len(token_ids) = len(action_mask) and len(token_ids) = len(logprobs)
                    and len(token_ids) = len(versions) as same,
                coalesce(list_bool_and(list_transform(turns, lambda t:
                    0 <= t."start" and t."start" <= t."end" and t."end" <= len(token_ids))), true) as inside,
                {_TRUE.format("action_mask")} as masked,
                coalesce(list_sum(list_transform(turns, lambda t: t."end"::bigint - t."start")), 0) as spoken,
                coalesce(list_sum(list_transform(turns, lambda t:
                    {_TRUE.format('action_mask[t."start"::bigint + 1:t."end"]')})), 0) as agreed
            from trajectories
        ) where not same or not inside or masked <> spoken or agreed <> spoken""",
    )
    rows = int(database.number("select count(*) from episodes"))
    return Measured(found, rows, f"in {found} of {rows:,} rows mask and turns contradict each other")


register_check("mask_and_spans", "Mask against turns", "trajectory", mask_and_spans)
