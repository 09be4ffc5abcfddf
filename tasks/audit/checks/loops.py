"""Check for turns that repeat themselves: the policy finds no end or has collapsed."""

from tasks.audit.checks.registry import AuditEvidence, Measured, register_check
from tasks.audit.checks.shares import highest

_LONG = 32  # tokens; shorter turns have too few 4-grams
_GRAM = 4
_MOST = 0.5  # share of 4-grams that are repetitions


def loops(evidence: AuditEvidence) -> Measured:
    """Measure the share of long turns in which more than half of the 4-grams of tokens are repetitions."""
    database = evidence.database
    database.connection.execute(
        f"""create or replace temp table looping as
        select data_set, trajectory_id, turn, repeated from (
            select data_set, trajectory_id, turn, 1 - list_unique(grams) / len(grams) as repeated from (
                select data_set, trajectory_id, turn, list_transform(
                    range(1, len(ids) - {_GRAM - 2}), lambda i: hash(ids[i], ids[i + 1], ids[i + 2], ids[i + 3])
                ) as grams
                from ({_TURNS}) where len(ids) >= {_LONG}
            )
        ) where repeated > {_MOST}"""
    )
    database.flag(
        "loops",
        "turn",
        """select trajectory_id, data_set,
            'turn ' || (turn + 1) || ': ' || round(100 * repeated)::integer || ' % of its 4-grams are repetitions'
        from looping""",
    )
    return highest(
        evidence,
        f"turns of {_LONG} tokens or more repeat themselves",
        f"""select data_set, coalesce(part, 0) as part, whole
        from (select data_set, count(*) as whole from turns where "end"::bigint - "start" >= {_LONG} group by 1)
        left join (select data_set, count(*) as part from looping group by 1) using (data_set)""",
    )


_TURNS = f"""
    select data_set, trajectory_id, turn, token_ids[t."start"::bigint + 1 : t."end"] as ids from (
        select data_set, trajectory_id, token_ids, unnest(turns) as t, generate_subscripts(turns, 1) - 1 as turn
        from trajectories
    ) where t."end"::bigint - t."start" >= {_LONG}"""

register_check("loops", "Turns that repeat themselves", "turn", loops)
