"""Check for problems never solved while at least half of the episodes agree on another answer: a wrong gold answer?"""

from tasks.audit.checks.registry import AuditEvidence, Measured, register_check


def never_solved(evidence: AuditEvidence) -> Measured:
    """Count problems with many episodes and no right turn, for which at least half of the last answers are the same."""
    least = evidence.settings.least_episodes
    found = evidence.database.flag(
        "never_solved",
        "problem",
        """
        with played as (
            select t.row, problem_id, prompt, solutions, best from episodes join (
                select row, prompt, solutions from trajectories
            ) t using (row) where best is not null
        ), unsolved as (
            select problem_id, prompt, solutions, count(*) as episodes from played
            group by problem_id, prompt, solutions having count(*) >= ? and max(best) = 0
        ), answers as (
            select problem_id, prompt, solutions, extracted, count(*) as votes
            from played join (select row, arg_max(extracted, answer) as extracted from turns group by row) using (row)
            where extracted <> '' group by all
        )
        select h.problem_id, null::integer,
            votes || ' of ' || episodes || ' episodes ended in ' || extracted || ', none in the gold answer '
                || coalesce(h.solutions[1], '')
        from unsolved h join answers a using (problem_id, prompt, solutions)
        where votes * 2 >= episodes
        qualify row_number() over (partition by h.problem_id, prompt, h.solutions order by votes desc, extracted) = 1
        """,
        least,
    )
    checked = int(
        evidence.database.number(
            """select count(*) from (
                select problem_id from episodes join (select row, prompt, solutions from trajectories) using (row)
                where best is not null group by problem_id, prompt, solutions having count(*) >= ?
            )""",
            least,
        )
    )
    return Measured(
        found,
        checked,
        f"{found:,} of {checked:,} problems with {least} episodes or more were never solved, while at least half of "
        "the episodes ended in one other answer",
    )


register_check("never_solved", "Problems whose gold may be wrong", "problem", never_solved, needs_scores=True)
