"""Check for the same call again and again in one conversation: the policy does not read what the tool says."""

from tasks.audit.checks.registry import AuditEvidence, Measured, register_check
from tasks.audit.checks.shares import highest

_TIMES = 3


def repeated_calls(evidence: AuditEvidence) -> Measured:
    """Measure the share of episodes, among those with calls, with the same call 3 times or more in one conversation.

    Calls are the same if tool and arguments are, whatever the outputs. Equal calls in branches that do not follow each
    other are no repetition: several completions may be sampled after one turn.
    """
    database = evidence.database
    database.connection.execute(f"create or replace temp table repeated as {_REPEATED}")
    database.flag(
        "repeated_calls",
        "trajectory",
        """select trajectory_id, data_set, 'it calls ' || left(name, 40) || ' ' || times || ' times with the arguments '
            || left(arguments, 80)
        from repeated join (select row, trajectory_id, data_set from episodes) using (row)""",
    )
    return highest(
        evidence,
        f"episodes with calls have the same call {_TIMES} times or more",
        """select data_set, count(times) as part, count(*) as whole
        from (select row, data_set from episodes where calls > 0) left join repeated using (row) group by 1""",
    )


# From each turn with a call that its episode has often enough, up its branch. Of an episode the most frequent call.
_REPEATED = f"""
    with recursive often as (
        select row, name, arguments from calls group by all having count(*) >= {_TIMES}
    ), same as (
        select row, turn, name, arguments, count(*) as count
        from calls join often using (row, name, arguments) group by row, turn, name, arguments
    ), climbing as (
        select distinct row, turn, turn as above from same
        union
        select c.row, c.turn, t.follows from climbing c join turns t on t.row = c.row and t.turn = c.above
        where t.follows >= 0
    )
    select row, name, arguments, times from (
        select s.row, s.name, s.arguments, sum(b.count)::integer as times
        from same s join climbing c on c.row = s.row and c.turn = s.turn
        join same b on b.row = s.row and b.turn = c.above and b.name = s.name and b.arguments = s.arguments
        group by s.row, s.turn, s.name, s.arguments
    ) where times >= {_TIMES}
    qualify row_number() over (partition by row order by times desc, name, arguments) = 1"""

register_check("repeated_calls", "The same call again and again", "trajectory", repeated_calls, needs_calls=True)
