"""Check the tokens before each turn: turns must be in order, each in one sequence, and a group has one prompt."""

from tasks.audit.checks.registry import AuditEvidence, Measured, register_check
from tasks.audit.prompts import BEGINNINGS


def broken_prefix(evidence: AuditEvidence) -> Measured:
    """Count rows with turns out of order or across sequences, and rows with another prompt than most of their group.

    Rows whose turns follow turns, or whose calls are in turns, that do not exist are counted, too.
    """
    database = evidence.database
    found = sum(
        database.flag("broken_prefix", "trajectory", query) for query in (_DISORDER, _LOST_CALLS, _OTHER_PROMPT)
    )
    rows = int(database.number("select count(*) from episodes"))
    return Measured(found, rows, f"in {found} of {rows:,} rows a turn does not continue the tokens before it")


_DISORDER = """
    select trajectory_id, data_set, 'turn ' || (turn + 1) || case
        when "start" < after then ' begins before the end of the tokens before it'
        when crossed then ' lies across two sequences'
        when follows not between -1 and turns - 1 or follows = turn then ' follows a turn that does not exist'
        else ' follows turn ' || (follows + 1) || ' and not the one before it in its sequence' end
    from (
        select *, len(list_filter(starts, lambda b: b >= "start" and b < "end")) > 0 as crossed,
            turn > 0 and len(list_filter(starts, lambda b: b >= after and b <= "start")) = 0 as inside
        from (
            select t.trajectory_id, t.data_set, t.turn, t.follows, t."start", t."end", s.starts, s.turns,
                coalesce(lag(t."end") over (partition by t.row order by t.turn), 1) as after
            from turns t join (
                select row, sequence_starts as starts, len(turns) as turns from trajectories
            ) s using (row)
        )
    )
    where "start" < after or crossed or follows not between -1 and turns - 1 or follows = turn
        or (inside and follows <> turn - 1)"""

_LOST_CALLS = """
    select c.trajectory_id, c.data_set, 'it has a call in turn ' || (c.turn + 1) || ', which does not exist'
    from calls c left join turns t on t.row = c.row and t.turn = c.turn where t.row is null"""

# If no prompt of a group has a majority, the agent varies prompts on purpose, and the group is not checked. An episode
# of several conversations has the prompt of its group if one of them has it.
_OTHER_PROMPT = f"""
    with beginnings as (
        select row, trajectory_id, data_set, problem_id, digest from ({BEGINNINGS}) where len(turns) > 0
    ), counted as (
        select data_set, problem_id, digest, count(distinct row) as here, any_value(rows) as rows
        from beginnings join (
            select data_set, problem_id, count(*) as rows from trajectories where len(turns) > 0 group by all
        ) using (data_set, problem_id) group by data_set, problem_id, digest
    ), usual as (
        select data_set, problem_id, digest from counted where 2 * here > rows and here < rows
    )
    select any_value(b.trajectory_id), b.data_set, 'its prompt has other tokens than most of its group'
    from beginnings b join usual u using (data_set, problem_id)
    group by b.row, b.data_set having not bool_or(b.digest = u.digest)"""

register_check("broken_prefix", "Turns that do not continue", "trajectory", broken_prefix)
