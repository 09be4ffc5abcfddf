"""Check for contradicting verdicts: the environment judged a turn in one way, its score in another."""

from tasks.audit.checks.registry import AuditEvidence, Measured, register_check


def verdicts_disagree(evidence: AuditEvidence) -> Measured:
    """Count turns that environment and score judge differently, and turns judged unlike the same answer elsewhere.

    If an answer was judged correct and wrong equally often, the turns that were judged correct are counted.
    Verdicts with other names, which a custom environment may use, are not compared, and neither are those of scorers
    other than math-verify: their rules need not be the environment's.
    """
    database = evidence.database
    unlike_environment = database.flag(
        "verdicts_disagree",
        "turn",
        """select trajectory_id, data_set,
            'turn ' || (turn + 1) || ': the environment said ' || environment_verdict || ', the score ' || verdict
        from turns where environment_verdict in ('correct', 'wrong', 'unparsable')
        and verdict in ('correct', 'wrong', 'unparsable') and scorer = 'math-verify'
        and (environment_verdict = 'correct') <> (verdict = 'correct')""",
    )
    unlike_elsewhere = database.flag(
        "verdicts_disagree",
        "turn",
        """select t.trajectory_id, t.data_set,
            'turn ' || (t.turn + 1) || ': elsewhere this answer was judged the other way'
        from turns t join (
            select problem_id, prompt, solutions, given, count(*) filter (verdict = 'correct') * 2 > count(*) as usual
            from turns join (select row, prompt, solutions from trajectories) using (row)
            where verdict in ('correct', 'wrong') group by 1, 2, 3, 4
            having count(distinct verdict = 'correct') > 1
        ) b using (problem_id, given)
        join (select row, prompt, solutions from trajectories) p on p.row = t.row
        where p.prompt = b.prompt and p.solutions = b.solutions
        and t.verdict in ('correct', 'wrong') and (t.verdict = 'correct') <> b.usual""",
    )
    turns = int(database.number("select count(*) from turns where verdict is not null"))
    says = (
        f"environment and score differ about {unlike_environment} of {turns:,} turns; {unlike_elsewhere} were judged "
        "differently elsewhere"
    )
    return Measured(unlike_environment + unlike_elsewhere, turns, says)


register_check("verdicts_disagree", "Verdicts that disagree", "turn", verdicts_disagree, needs_scores=True)
