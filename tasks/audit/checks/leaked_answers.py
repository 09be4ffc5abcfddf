"""Check for prompts that state the gold answer and feedback that gives it away: the policy then learns to copy."""

from collections.abc import Iterator, Sequence
from typing import Any

from tasks.audit.checks.registry import AuditEvidence, Measured, SkippedError, register_check
from tasks.audit.flag_rows import flag_rows
from tasks.audit.golds import MOST_PROBLEMS, StatedAnswer, contains_gold, leaks
from tasks.audit.prompts import create_distinct_prompts
from tasks.audit.second_checker import stated
from tasks.audit.tokens import Decoders

_SHOWN = 80  # characters


def leaked_answers(evidence: AuditEvidence) -> Measured:
    """Search each distinct prompt, as text and as decoded tokens, and each feedback in a problem's episodes.

    What tools put out is the matter of `leaked_by_tool`, because a calculator puts out answers rightly.
    """
    problems = evidence.database.all("select problem_id, prompt, solutions from problems")
    answers = (*leaks(_in_problems(problems)), *leaks(_in_prompts(evidence)))
    told = {(answer.problem_id, answer.words): answer for answer in answers}
    found = flag_rows(
        evidence.database,
        "leaked_answers",
        "problem",
        {
            "id": [leak.problem_id for leak in told.values()],
            "data_set": [leak.data_set for leak in told.values()],
            "words": [leak.words[:_SHOWN] for leak in told.values()],
        },
        """select id, data_set, 'its prompt states the gold answer: "' || words || '"' from found""",
    )
    turns = _flag_feedback(evidence)
    return Measured(
        found + turns,
        len(problems),
        f"the prompts of {found:,} of {len(problems):,} problems state the gold answer, and the feedback after "
        f"{turns:,} turns gives it away",
    )


def _in_problems(problems: Sequence[tuple[str, str, list[str]]]) -> Iterator[StatedAnswer]:
    return (
        StatedAnswer("", words, name, -1, is_gold)
        for name, prompt, solutions in problems
        for words, is_gold in stated(prompt, solutions)
    )


def _in_prompts(evidence: AuditEvidence) -> Iterator[StatedAnswer]:
    """Yield the answers stated in the tokens that the policy was given; nothing if no tokenizer is left."""
    create_distinct_prompts(evidence)
    query = "select data_set, problem_id, solutions, ids from distinct_prompts order by number"
    try:
        decoders = Decoders(evidence)
    except SkippedError:
        return
    for part in decoders.decode(evidence, query):
        rows = part.columns("data_set", "problem_id", "solutions")
        for row, text in zip(rows, part.texts, strict=True):
            for words, is_gold in stated(text, row["solutions"]):
                yield StatedAnswer(part.run, words, row["problem_id"], row["data_set"], is_gold)


def _flag_feedback(evidence: AuditEvidence) -> int:
    """Flag turns whose feedback contains the gold answer, while neither the prompt nor a turn before it does."""
    by_feedback: dict[str, list[tuple[int, str]]] = {}
    for name, prompt, solutions, feedback, problems in evidence.database.all(_FEEDBACK_WITH_GOLD):
        if contains_gold(feedback, solutions) and not contains_gold(prompt, solutions):
            by_feedback.setdefault(feedback, []).append((problems, name))
    found = [
        (name, feedback)
        for feedback, leaking in by_feedback.items()
        if len(leaking) > MOST_PROBLEMS * leaking[0][0]
        for _, name in leaking
    ]
    return flag_rows(evidence.database, "leaked_answers", "turn", _turns(evidence, found), "from found")


# The outputs of calls are taken out of the feedback once each, the longest first.
_SAID = """
    select row, turn, problem_id, text, list_reduce(
        coalesce(outputs, []),
        lambda said, output: if(contains(said, output),
            left(said, instr(said, output) - 1) || substr(said, instr(said, output) + length(output)), said),
        feedback
    ) as feedback
    from turns left join (
        select row, turn, list(output order by length(output) desc) as outputs
        from calls where output <> '' group by row, turn
    ) using (row, turn) where feedback <> ''"""
_FEEDBACK_WITH_GOLD = f"""
    select problem_id, prompt, solutions, feedback, problems from (
        select *, count(*) over (partition by feedback) as problems from (
            select distinct s.problem_id, prompt, solutions, feedback
            from ({_SAID}) s join (select row, prompt, solutions from trajectories) using (row) where feedback <> ''
        )
    ) where len(list_filter(
        solutions, lambda gold: contains(replace(feedback, ',', ''), replace(trim(gold), ',', ''))
    )) > 0"""
"""SQL: feedback that contains a gold answer as a substring, and the number of problems with the same feedback."""


def _turns(evidence: AuditEvidence, found: list[tuple[str, str]]) -> dict[str, list[Any]]:
    """Return the turns that got the feedback of a leak (problem id, feedback), if the policy had not said the gold."""
    names, feedback = [name for name, _ in found], [words for _, words in found]
    rows = evidence.database.all(
        f"""select trajectory_id, data_set, turn, feedback, solutions,
            (select string_agg(text, chr(10)) from turns b where b.row = s.row and b.turn <= s.turn)
        from ({_SAID}) s
        join (select unnest(?::varchar[]) as problem_id, unnest(?::varchar[]) as feedback) using (problem_id, feedback)
        join (select row, trajectory_id, data_set, solutions from trajectories) using (row)""",
        *(names, feedback),
    )
    turns = [row for row in rows if not contains_gold(row[5], row[4])]
    return {
        "id": [row[0] for row in turns],
        "data_set": [row[1] for row in turns],
        "detail": [f'the feedback after turn {row[2] + 1} gives the gold away: "{row[3][:_SHOWN]}"' for row in turns],
    }


register_check("leaked_answers", "Prompts and feedback that give the answer", "problem", leaked_answers)
