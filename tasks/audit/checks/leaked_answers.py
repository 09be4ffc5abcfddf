"""Prompts that state the gold answer, and feedback that gives it away: what is learned then is to copy."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.audit.checks.registry import AuditEvidence, Measured, SkippedError, register_check
from tasks.audit.found import flag_found
from tasks.audit.prompts import gather
from tasks.audit.second_checker import stated
from tasks.audit.tokens import Decoders

_SHOWN = 80  # characters
_OWN = 0.5
"""What is said about many problems is an example or a form of words; it gives the golds away where it holds most of
them."""


@dataclass(frozen=True, slots=True)
class _Said:
    """Words that may give a gold away, and whether they do."""

    run: str
    words: str
    problem_id: str
    data_set: int
    gold: bool


def leaked_answers(evidence: AuditEvidence) -> Measured:
    """Looks at each distinct prompt, as text and as tokens, and at each feedback that a problem's episodes heard."""
    problems = evidence.database.all("select problem_id, prompt, solutions from problems")
    told = (*_leaks(_in_problems(problems)), *_leaks(_in_prompts(evidence)))
    leaks = {(said.problem_id, said.words): said for said in told}
    found = flag_found(
        evidence.database,
        "leaked_answers",
        "problem",
        {
            "id": [said.problem_id for said in leaks.values()],
            "data_set": [said.data_set for said in leaks.values()],
            "words": [said.words[:_SHOWN] for said in leaks.values()],
        },
        """select id, data_set, 'its prompt states the gold answer: "' || words || '"' from found""",
    )
    turns = _feedback(evidence)
    return Measured(
        found + turns,
        len(problems),
        f"the prompts of {found:,} of {len(problems):,} problems state the gold answer, and the feedback after "
        f"{turns:,} turns gives it away",
    )


def _leaks(said: Iterable[_Said]) -> Iterator[_Said]:
    """Those whose words give the gold of most problems away about which they are said."""
    problems: dict[tuple[str, str], dict[str, _Said]] = {}
    for each in said:
        problems.setdefault((each.run, each.words), {})[each.problem_id] = each
    for told in problems.values():
        giving = [each for each in told.values() if each.gold]
        if len(giving) > _OWN * len(told):
            yield from giving


def _in_problems(problems: Sequence[tuple[str, str, list[str]]]) -> Iterator[_Said]:
    return (
        _Said("", words, name, -1, gold)
        for name, prompt, solutions in problems
        for words, gold in stated(prompt, solutions)
    )


def _in_prompts(evidence: AuditEvidence) -> Iterator[_Said]:
    """The same of what the policy was really given; nothing where no tokenizer is left."""
    gather(evidence)
    query = "select data_set, problem_id, solutions, ids from asked order by asked"
    try:
        decoders = Decoders(evidence)
    except SkippedError:
        return
    for part in decoders.decode(evidence, query):
        rows = part.columns("data_set", "problem_id", "solutions")
        for row, text in zip(rows, part.texts, strict=True):
            for words, gold in stated(text, row["solutions"]):
                yield _Said(part.run, words, row["problem_id"], row["data_set"], gold)


def _feedback(evidence: AuditEvidence) -> int:
    """Notes turns whose feedback holds the gold, which neither the prompt nor the turn's own text does."""
    heard: dict[str, list[tuple[int, str]]] = {}
    for name, prompt, solutions, feedback, problems in evidence.database.all(_HEARD):
        if _gives(feedback, solutions) and not _gives(prompt, solutions):
            heard.setdefault(feedback, []).append((problems, name))
    giving = [(name, feedback) for feedback, told in heard.items() if len(told) > _OWN * told[0][0] for _, name in told]
    return flag_found(evidence.database, "leaked_answers", "turn", _turns(evidence, giving), "from found")


_HEARD = """
    select problem_id, prompt, solutions, feedback, problems from (
        select *, count(*) over (partition by feedback) as problems from (
            select distinct problem_id, prompt, solutions, t.feedback
            from (select problem_id, prompt, solutions, unnest(turns) as t from trajectories) where t.feedback <> ''
        )
    ) where len(list_filter(
        solutions, lambda gold: contains(replace(feedback, ',', ''), replace(trim(gold), ',', ''))
    )) > 0"""
"""SQL: feedback that a gold is a part of, and about how many problems it is said."""


def _turns(evidence: AuditEvidence, giving: list[tuple[str, str]]) -> dict[str, list[Any]]:
    """Turns on these problems that heard this feedback without having said the gold themselves."""
    names, feedback = [name for name, _ in giving], [words for _, words in giving]
    rows = evidence.database.all(
        """select trajectory_id, data_set, turn, text, feedback, solutions from turns
        join (select unnest(?::varchar[]) as problem_id, unnest(?::varchar[]) as feedback) using (problem_id, feedback)
        join (select row, solutions from trajectories) using (row)""",
        *(names, feedback),
    )
    told = [row for row in rows if not _gives(row[3], row[5])]
    return {
        "id": [row[0] for row in told],
        "data_set": [row[1] for row in told],
        "detail": [f'the feedback after turn {row[2] + 1} gives the gold away: "{row[4][:_SHOWN]}"' for row in told],
    }


def _gives(text: str, solutions: Sequence[str]) -> bool:
    """Whether one of `solutions` stands in `text` for itself: 12 does not stand in 112, 1.12 or -12."""
    plain = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text)
    return any(
        re.search(rf"(?<![\w.\-]){re.escape(gold)}(?!\w|\.\d)", plain) is not None
        for solution in solutions
        if (gold := re.sub(r"(?<=\d),(?=\d{3}\b)", "", solution.strip()))
    )


register_check("leaked_answers", "Prompts and feedback that give the answer", "problem", leaked_answers)
