"""Check the tokens before each turn: turns must be in order, each in one sequence, and a group has one prompt."""

from tasks.audit.checks.registry import AuditEvidence, Measured, register_check


def broken_prefix(evidence: AuditEvidence) -> Measured:
    """Count rows with turns out of order or across sequences, and rows with another prompt than most of their group."""
    database = evidence.database
    found = database.flag("broken_prefix", "trajectory", _DISORDER) + database.flag(
        "broken_prefix", "trajectory", _OTHER_PROMPT
    )
    rows = int(database.number("select count(*) from episodes"))
    return Measured(found, rows, f"in {found} of {rows:,} rows a turn does not continue the tokens before it")


_DISORDER = """
    select trajectory_id, data_set, 'turn ' || (turn + 1) || case
        when "start" < after then ' begins before the end of the tokens before it'
        else ' lies across two sequences' end
    from (
        select t.trajectory_id, t.data_set, t.turn, t."start", t."end", s.starts,
            coalesce(lag(t."end") over (partition by t.row order by t.turn), 1) as after
        from turns t join (
            select row, sequence_starts as starts from trajectories
        ) s using (row)
    )
    where "start" < after or len(list_filter(starts, lambda b: b >= "start" and b < "end")) > 0"""

# If no prompt of a group has a majority, the agent varies prompts on purpose, and the group is not checked.
_OTHER_PROMPT = """
    with beginnings as (
        select trajectory_id, data_set, problem_id, hash(token_ids[1:turns[1]."start"]) as beginning
        from trajectories where len(turns) > 0
    ), counted as (
        select data_set, problem_id, beginning, count(*) as here,
            sum(count(*)) over (partition by data_set, problem_id) as rows
        from beginnings group by data_set, problem_id, beginning
    ), usual as (
        select data_set, problem_id, beginning from counted where 2 * here > rows and here < rows
    )
    select b.trajectory_id, b.data_set, 'its prompt has other tokens than most of its group'
    from beginnings b join usual u using (data_set, problem_id) where b.beginning <> u.beginning"""

register_check("broken_prefix", "Turns that do not continue", "trajectory", broken_prefix)
