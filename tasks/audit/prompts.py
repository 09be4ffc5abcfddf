"""SQL for the tokens that the policy was given: before the first turn of a conversation, and before turns that follow.

Rows whose turns do not fit their mask are left out, because the check `mask_and_spans` already reports them.
"""

from tasks.audit.checks.registry import AuditEvidence

# A turn that follows none begins a conversation; in rows without `follows` that is the first turn. Turns from 1 on.
_FIRST = "list_filter(range(1, len(turns) + 1), lambda k: coalesce(follows[k], k - 2) = -1)"
_SEQUENCE = "coalesce(list_max(list_filter(sequence_starts, lambda s: s <= {})), 0)"

BEGINNINGS = f"""
    select *, token_ids[begin + 1 : until] as ids, (hash(token_ids[begin + 1 : until]) >> 1)::bigint as digest from (
        select *, {_SEQUENCE.format("until")} as begin from (
            select *, coalesce(turns[first]."start"::bigint, len(token_ids)) as until from (
                select *, unnest(if(len(firsts) = 0, [0], firsts)) as first, len(firsts) as conversations
                from (select *, {_FIRST} as firsts from trajectories)
            )
        )
    )"""
"""SQL: each trajectory with the ids and the digest of the tokens before its first turn, where they begin and end, and
the number of its conversations; several rows if an agent began several, for helpers or to shorten one.
"""

PROMPTS = f"""
    select data_set, row, trajectory_id, problem_id, prompt, solutions, ids, digest from ({BEGINNINGS})
    where conversations < 2 and len(ids) > 0 and coalesce(action_mask[until + 1], true)
        and not coalesce(list_bool_or(action_mask[begin + 1 : until]), false)"""
"""SQL: for each trajectory the ids and the digest of the tokens before its first turn.

Rows without tokens are left out, because their episodes never began; those with several conversations, too, because
their prompts are the agent's.
"""

SAMPLED = "(len(sequence_starts) < 2 or hash(row) % 16 = 0)"
"""SQL: a sixteenth of the trajectories with several sequences, whose pieces are long and all different, and all others.
"""

BETWEEN = f"""
    select data_set, row, trajectory_id, parent - 1 as turn, turns[parent].feedback as feedback,
        ids, (hash(ids) >> 1)::bigint as digest,
        list_where(ids, list_transform(masked, lambda m: coalesce(not m, true))) as given
    from (
        select *, token_ids[begin + 1 : turns[child]."start"] as ids,
            action_mask[begin + 1 : turns[child]."start"] as masked
        from (
            select *, if(turns[parent]."end" between sequence and turns[child]."start", turns[parent]."end", sequence)
                as begin
            from (
                select *, coalesce(follows[child], child - 2) + 1 as parent,
                    {_SEQUENCE.format('turns[child]."start"')} as sequence
                from (
                    select *, unnest(range(1, len(turns) + 1)) as child
                    from trajectories where len(action_mask) = len(token_ids) and {SAMPLED}
                )
            )
        ) where parent > 0
            and (turns[parent]."end" <= turns[child]."start" or turns[parent]."start" >= turns[child]."end")
            and action_mask[turns[parent]."end"] and action_mask[turns[child]."start"::bigint + 1]
    )"""
"""SQL: for each turn and each that follows it the feedback, the ids and digest of the tokens between them, and the ids
among these that are no action tokens. Between two sequences these are the tokens before the second turn.

Only the trajectories of `SAMPLED` are included.
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
