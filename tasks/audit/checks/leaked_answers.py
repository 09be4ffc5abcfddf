"""Check for prompts that state the gold answer and feedback that gives it away: the policy then learns to copy."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.audit.checks.registry import AuditEvidence, Measured, SkippedError, register_check
from tasks.audit.flag_rows import flag_rows
from tasks.audit.prompts import create_distinct_prompts
from tasks.audit.second_checker import stated
from tasks.audit.tokens import Decoders

_SHOWN = 80  # characters
_MOST_PROBLEMS = 0.5
"""The same words about many problems, in prompts or feedback, may be an example or a fixed phrase. They count as a leak
only if they contain the gold answers of more than this share of the problems."""


@dataclass(frozen=True, slots=True)
class _StatedAnswer:
    """Words in a prompt that state an answer, and whether it is the gold answer.

    Example: _StatedAnswer(run="demo", words="answer is 19", problem_id="12+7", data_set=0, is_gold=True)
    """

    run: str
    words: str
    problem_id: str
    data_set: int
    is_gold: bool


def leaked_answers(evidence: AuditEvidence) -> Measured:
    """Search each distinct prompt, as text and as decoded tokens, and each feedback in a problem's episodes."""
    problems = evidence.database.all("select problem_id, prompt, solutions from problems")
    answers = (*_leaks(_in_problems(problems)), *_leaks(_in_prompts(evidence)))
    leaks = {(answer.problem_id, answer.words): answer for answer in answers}
    found = flag_rows(
        evidence.database,
        "leaked_answers",
        "problem",
        {
            "id": [leak.problem_id for leak in leaks.values()],
            "data_set": [leak.data_set for leak in leaks.values()],
            "words": [leak.words[:_SHOWN] for leak in leaks.values()],
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


def _leaks(answers: Iterable[_StatedAnswer]) -> Iterator[_StatedAnswer]:
    """Group stated answers by their words; yield the gold ones of a group if most of its problems have a gold one."""
    by_words: dict[tuple[str, str], dict[str, _StatedAnswer]] = {}
    for answer in answers:
        by_words.setdefault((answer.run, answer.words), {})[answer.problem_id] = answer
    for by_problem in by_words.values():
        golds = [answer for answer in by_problem.values() if answer.is_gold]
        if len(golds) > _MOST_PROBLEMS * len(by_problem):
            yield from golds


def _in_problems(problems: Sequence[tuple[str, str, list[str]]]) -> Iterator[_StatedAnswer]:
    return (
        _StatedAnswer("", words, name, -1, is_gold)
        for name, prompt, solutions in problems
        for words, is_gold in stated(prompt, solutions)
    )


def _in_prompts(evidence: AuditEvidence) -> Iterator[_StatedAnswer]:
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
                yield _StatedAnswer(part.run, words, row["problem_id"], row["data_set"], is_gold)


def _flag_feedback(evidence: AuditEvidence) -> int:
    """Flag turns whose feedback contains the gold answer, while neither the prompt nor the turn's text does."""
    by_feedback: dict[str, list[tuple[int, str]]] = {}
    for name, prompt, solutions, feedback, problems in evidence.database.all(_FEEDBACK_WITH_GOLD):
        if _contains_gold(feedback, solutions) and not _contains_gold(prompt, solutions):
            by_feedback.setdefault(feedback, []).append((problems, name))
    leaks = [
        (name, feedback)
        for feedback, leaking in by_feedback.items()
        if len(leaking) > _MOST_PROBLEMS * leaking[0][0]
        for _, name in leaking
    ]
    return flag_rows(evidence.database, "leaked_answers", "turn", _turns(evidence, leaks), "from found")


_FEEDBACK_WITH_GOLD = """
    select problem_id, prompt, solutions, feedback, problems from (
        select *, count(*) over (partition by feedback) as problems from (
            select distinct problem_id, prompt, solutions, t.feedback
            from (select problem_id, prompt, solutions, unnest(turns) as t from trajectories) where t.feedback <> ''
        )
    ) where len(list_filter(
        solutions, lambda gold: contains(replace(feedback, ',', ''), replace(trim(gold), ',', ''))
    )) > 0"""
"""SQL: feedback that contains a gold answer as a substring, and the number of problems with the same feedback."""


def _turns(evidence: AuditEvidence, leaks: list[tuple[str, str]]) -> dict[str, list[Any]]:
    """Return the turns that got the feedback of a leak (problem id, feedback) without stating the gold themselves."""
    names, feedback = [name for name, _ in leaks], [words for _, words in leaks]
    rows = evidence.database.all(
        """select trajectory_id, data_set, turn, text, feedback, solutions from turns
        join (select unnest(?::varchar[]) as problem_id, unnest(?::varchar[]) as feedback) using (problem_id, feedback)
        join (select row, solutions from trajectories) using (row)""",
        *(names, feedback),
    )
    turns = [row for row in rows if not _contains_gold(row[3], row[5])]
    return {
        "id": [row[0] for row in turns],
        "data_set": [row[1] for row in turns],
        "detail": [f'the feedback after turn {row[2] + 1} gives the gold away: "{row[4][:_SHOWN]}"' for row in turns],
    }


def _contains_gold(text: str, solutions: Sequence[str]) -> bool:
    """Return whether `text` contains one of `solutions` as a whole: 112, 1.12 and -12 do not contain 12."""
    plain = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text)
    return any(
        re.search(rf"(?<![\w.\-]){re.escape(gold)}(?!\w|\.\d)", plain) is not None
        for solution in solutions
        if (gold := re.sub(r"(?<=\d),(?=\d{3}\b)", "", solution.strip()))
    )


register_check("leaked_answers", "Prompts and feedback that give the answer", "problem", leaked_answers)
