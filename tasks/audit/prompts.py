"""SQL for the tokens that the policy was given: before its first turn, and between two turns.

Rows whose turns do not fit their mask are left out, because the check `mask_and_spans` already reports them.
"""

from tasks.audit.checks.registry import AuditEvidence

_PROMPT = """token_ids[: coalesce(turns[1]."start", len(token_ids))]"""
_MASK_FITS = """coalesce(turns[1]."start", len(token_ids))
    = coalesce(nullif(list_position(action_mask, true), 0) - 1, len(token_ids))"""
PROMPTS = f"""
    select data_set, row, trajectory_id, problem_id, prompt, solutions, ids, (hash(ids) >> 1)::bigint as digest
    from (select *, {_PROMPT} as ids from trajectories where {_MASK_FITS} and len(token_ids) > 0)"""
"""SQL: for each trajectory the ids and the digest of the tokens before its first turn.

Rows without tokens are left out, because their episodes never began.
"""

BETWEEN = """
    select data_set, trajectory_id, turn, feedback, ids, (hash(ids) >> 1)::bigint as digest from (
        select data_set, trajectory_id, k - 1 as turn, turns[k].feedback as feedback,
            token_ids[turns[k]."end"::bigint + 1 : turns[k + 1]."start"] as ids
        from (
            select data_set, trajectory_id, turns, token_ids, action_mask, unnest(range(1, len(turns))) as k
            from trajectories where len(sequence_starts) < 2 or hash(row) % 16 = 0
        ) where turns[k]."end" <= turns[k + 1]."start"
            and action_mask[turns[k]."end"] and action_mask[turns[k + 1]."start"::bigint + 1]
    )"""
"""SQL: for each turn but the last, the feedback and the ids and digest of the tokens between it and the next turn.

A template that rewrites history makes these pieces long and all different, so only a sixteenth of the trajectories with
several sequences is included.
"""


def create_distinct_prompts(evidence: AuditEvidence) -> None:
    """Create the table `distinct_prompts`, unless it exists.

    It has one row for each distinct prompt of each problem of a run: number, run, data_set (the first), problem_id,
    prompt, solutions (the problem's), digest, ids (token ids before the first turn), episodes (with this prompt).
    """
    evidence.database.connection.execute(
        f"""create temp table if not exists distinct_prompts as
        select row_number() over (order by data_set, problem_id, prompt, digest) as number, * from (
            select run, min(data_set) as data_set, problem_id, prompt, solutions, digest, arg_min(ids, row) as ids,
                count(*) as episodes
            from ({PROMPTS}) p join (select data_set, run from data_sets) using (data_set)
            group by run, problem_id, prompt, solutions, digest
        )"""
    )
