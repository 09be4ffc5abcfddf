"""Check for outputs of tools that give the gold answer away: the policy then learns to fetch it, not to compute it.

A calculator puts out answers rightly, so an output with the gold answer alone is no case. It is one if
- it states the gold as an answer ("the answer is 19"), while nothing that the policy wrote before has the gold, or
  speaks of an answer as code does that prints one; or
- the episode's first call, with the same arguments in several problems, gives most of these their own gold answers:
  such an output follows from the problem, not from the arguments.

So a tool that returns the bare answer for arguments which differ from problem to problem is taken for a calculator.
"""

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import groupby, pairwise

from tasks.audit.checks.registry import AuditEvidence, Measured, register_check
from tasks.audit.checks.shares import CALL
from tasks.audit.flag_rows import flag_rows
from tasks.audit.golds import MOST_PROBLEMS, StatedAnswer, contains_gold, leaks
from tasks.audit.second_checker import stated

_LEAST = 3  # problems that the same call gave their own gold answers


@dataclass(frozen=True, slots=True)
class _Output:
    """A distinct output in the episodes of a problem."""

    name: str
    arguments: str
    problem_id: str
    prompt: str
    solutions: list[str]
    output: str


_Leak = tuple[str, str, str]
"""Problem, name of the tool, and output."""


def leaked_by_tool(evidence: AuditEvidence) -> Measured:
    """Count calls whose output states the gold answer, or gives each problem its own one for the same arguments."""
    stating = set(_stating(_outputs(evidence, _STATING)))
    fetching = set(_fetching(_outputs(evidence, _FIRST))) - stating
    state, fetch = _flag(evidence, stating, _STATING), _flag(evidence, fetching, _FIRST)
    says = (
        f"the outputs of {state:,} of {evidence.calls:,} calls state the gold answer; those of {fetch:,} have it, "
        "although the same arguments gave other problems theirs"
    )
    return Measured(state + fetch, evidence.calls, says)


def _outputs(evidence: AuditEvidence, calls: str) -> list[_Output]:
    """Return the distinct outputs of some calls, by tool and arguments."""
    rows = evidence.database.all(
        f"""select distinct name, arguments, c.problem_id, prompt, solutions, output
        from ({calls}) c join (select row, prompt, solutions from trajectories) using (row) order by all"""
    )
    return [_Output(*row) for row in rows]


def _stating(outputs: Iterable[_Output]) -> Iterator[_Leak]:
    """Yield the outputs that state the gold of their problem, in words that are no fixed phrase."""
    told: dict[tuple[str, str], list[_Output]] = {}
    answers = list[StatedAnswer]()
    for each in outputs:
        for words, is_gold in stated(each.output, each.solutions):
            told.setdefault((each.problem_id, words), []).append(each)
            answers.append(StatedAnswer("", words, each.problem_id, -1, is_gold))
    for answer in leaks(answers):
        for each in told[answer.problem_id, answer.words]:
            if not contains_gold(each.prompt, each.solutions):
                yield each.problem_id, each.name, each.output


def _fetching(outputs: Iterable[_Output]) -> Iterator[_Leak]:
    """Yield the outputs of calls that give most problems their own gold, and not that of another problem, too."""
    for _, same in groupby(outputs, key=lambda each: (each.name, each.arguments)):
        by_problem = {each.problem_id: each for each in same}
        golds = list(dict.fromkeys(tuple(each.solutions) for each in by_problem.values()))
        others = dict(pairwise([*golds, golds[0]]))
        own = [each for each in by_problem.values() if _is_own(each, others[tuple(each.solutions)])]
        if len(own) >= _LEAST and len(own) > MOST_PROBLEMS * len(by_problem):
            yield from ((each.problem_id, each.name, each.output) for each in own)


def _is_own(each: _Output, others: Sequence[str]) -> bool:
    given = f"{each.prompt}\n{each.arguments}"
    return (
        contains_gold(each.output, each.solutions)
        and not contains_gold(each.output, others)
        and not contains_gold(given, each.solutions)
    )


def _flag(evidence: AuditEvidence, found: Set[_Leak], calls: str) -> int:
    """Flag the calls with these outputs, among those of `calls`."""
    problems, names, outputs = zip(*found, strict=True) if found else ((), (), ())
    return flag_rows(
        evidence.database,
        "leaked_by_tool",
        "call",
        {"problem_id": problems, "name": names, "output": outputs},
        f"""select trajectory_id, data_set, {CALL} || ' gives the gold answer away: "' || left(output, 80) || '"'
        from ({calls}) join found using (problem_id, name, output)""",
    )


# Outputs with a word that introduces an answer, which the policy did not write up to the call, nor the gold.
_STATING = """
    select c.* exclude (word) from (
        select *, regexp_extract(lower(output), 'answer|solution|boxed|####') as word from calls
    ) c join (select row, solutions from trajectories) s using (row)
    where word <> '' and not exists (
        select 1 from turns t where t.row = c.row and t.turn <= c.turn and (
            contains(lower(t.text), c.word) or len(list_filter(s.solutions, lambda gold: contains(t.text, gold))) > 0)
    )"""

# First calls of episodes, with arguments that occur in several problems and gave different outputs.
_FIRST = f"""
    select * from (
        select * from calls qualify row_number() over (partition by row order by turn, number) = 1
    ) join (
        select name, arguments from calls group by all
        having count(distinct problem_id) >= {_LEAST} and count(distinct output) >= {_LEAST}
    ) using (name, arguments) where output <> ''"""

register_check("leaked_by_tool", "Tools that give the answer away", "call", leaked_by_tool, needs_calls=True)
