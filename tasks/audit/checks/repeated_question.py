"""Check for right answers without a number that the question does not hold: the policy is paid for repeating it.

A verifier that computes what it reads takes `12 + 7` for 19, and pays the policy for writing the problem down again.
Only turns count whose gold answer is a number that the question does not name: the result can only stand in an answer
that holds another number, or says it in words.
"""

from tasks.audit.checks.registry import AuditEvidence, Measured, register_check
from tasks.audit.checks.shares import highest

_NUMBER = r"\d+(?:\.\d+)?"
_CANDIDATES = f"""
    with read as (
        select t.trajectory_id, t.data_set, t.turn, t.given, p.solutions,
            regexp_extract_all(regexp_replace(t.given, '(\\d),(\\d\\d\\d)', '\\1\\2', 'g'), '{_NUMBER}') as said,
            regexp_extract_all(regexp_replace(p.prompt, '(\\d),(\\d\\d\\d)', '\\1\\2', 'g'), '{_NUMBER}') as asked
        from turns t join (select row, prompt, solutions from trajectories) p using (row)
        where t.verdict = 'correct' and t.scorer = 'math-verify'
    )
    select *, list_has_all(asked, said) as repeats from read
    where list_bool_and([regexp_full_match(s, '-?{_NUMBER}') and not list_contains(asked, ltrim(s, '-'))
        for s in solutions])"""
"""SQL: the turns that are counted, with the numbers in them and in their questions."""


def repeated_question(evidence: AuditEvidence) -> Measured:
    """Measure the share of right answers that hold no number beyond the question's, in the worst data set."""
    evidence.database.flag(
        "repeated_question",
        "turn",
        f"""select trajectory_id, data_set,
            'turn ' || (turn + 1) || ': ' || '''' || left(given, 60) || ''' was judged correct for ' || solutions[1]
        from ({_CANDIDATES}) where repeats""",
    )
    counts = f"select data_set, count(*) filter (repeats) as part, count(*) as whole from ({_CANDIDATES}) group by 1"
    return highest(evidence, "right answers hold no number beyond the question's", counts)


register_check(
    "repeated_question", "Right answers that repeat the question", "turn", repeated_question, needs_scores=True
)
