"""Checks of what the outputs of tools do to the policy. `tools.sql` has the others."""

import re
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from itertools import groupby, pairwise

from tasks.audit.checks import AuditEvidence, Measured, check
from tasks.audit.checks.problems import MOST_PROBLEMS, StatedAnswer, contains_gold, leaks
from tasks.audit.checks.verdicts import stated
from tasks.audit.decoding import Decoders

_MARK = r"""(?:^|$|[\n<>\[\]|"])"""
"""Texts that templates write around an output: marks, quotes, or the begin and the end of a line."""


@check("tool_output_in_loss", "call", needs="calls tokens")
def tool_output_in_loss(evidence: AuditEvidence) -> Measured:
    """Count calls whose output is in no tokens that a following turn was given, but stands alone among action tokens.

    The policy is then trained to invent what tools say. This pipeline cannot write such rows. Other writers do if they
    take all tokens after the prompt for one completion, make each message a turn, or forget the outputs in the mask.

    An output that is nowhere in the tokens is the matter of `template_drift`. What the policy itself wrote in the form
    of an output is no case: then the true one was given, too.
    """
    database, decoders = evidence.database, Decoders(evidence)
    calls = database.count("answered")
    query = "select data_set, output, digest, any_value(given) as ids from calls_given group by all"
    lacking = [
        (row["data_set"], row["output"], row["digest"])
        for batch in decoders.decode(evidence, query, special=True)
        for row, text in batch.columns("data_set", "output", "digest")
        if not decoders.runs[batch.run].shows(text, row["output"])
    ]
    # The distinct tokens that were given after a call and lack its output.
    columns = "data_set integer, output varchar, digest bigint"
    database.connection.execute(f"create or replace temp table lacking ({columns})")
    database.insert("lacking", lacking)
    found = [
        row
        for batch in decoders.decode(evidence, _ACTIONS, special=True)
        for row, text in batch.columns("row", "turn", "number", "output")
        if stands_alone(decoders.runs[batch.run].spellings(row["output"].strip()), text)
    ]
    query = """select trajectory_id, data_set,
            call_name(turn, number, name) || ': its output is among the sampled tokens: "'
                || left(calls.output, 80) || '"'
        from calls join found using (row, turn, number)"""
    count = database.flag("tool_output_in_loss", "call", query, found=found)
    says = f"the outputs of {count:,} of {calls:,} calls with outputs that were checked stand among the sampled tokens"
    return Measured(count, calls, says + decoders.remark)


def stands_alone(spellings: Iterable[str], text: str) -> bool:
    r"""Return whether a text has one of the spellings between marks that templates write.

    >>> stands_alone(["19"], "so <tool> 19\n"), stands_alone(["19"], "so 19")
    (True, False)
    """
    either = "|".join(re.escape(_with_short_blanks(each)) for each in spellings)
    return re.search(rf"{_MARK}\s?(?:{either})\s?{_MARK}", _with_short_blanks(text)) is not None


def _with_short_blanks(text: str) -> str:
    """Write one blank or line break for several: patterns with runs of blanks would take quadratic time."""
    return re.sub(r"\s+", lambda blanks: "\n" if "\n" in blanks[0] else " ", text)


# The action tokens from a call's turn to the end of the turn after it in the sequence, or of the sequence.
_ACTIONS = """
    with shown as (
        select distinct row, turn, number from calls_given anti join lacking using (data_set, output, digest)
    )
    select data_set, row, turn, number, output, list_where(
        token_ids[begin + 1 : until], list_transform(action_mask[begin + 1 : until], lambda m: coalesce(m, false))
    ) as ids from (
        select *, if(turns[turn + 2]."end" <= rest, turns[turn + 2]."end", rest) as until from (
            select c.*, token_ids, action_mask, turns, turns[c.turn + 1]."start"::bigint as begin, coalesce(
                list_min(list_filter(sequence_starts, lambda s: s > turns[c.turn + 1]."start")), len(token_ids)) as rest
            from (answered anti join shown using (row, turn, number)) c
            join (select row, token_ids, action_mask, turns, sequence_starts from trajectories) using (row)
        )
    ) where begin >= 0"""

_LEAST_PROBLEMS = 3  # that the same call gave their own gold answers


@dataclass(frozen=True, slots=True)
class _Output:
    """A distinct output in the episodes of a problem."""

    name: str
    arguments: str
    problem_id: str
    prompt: str
    solutions: list[str]
    output: str

    @property
    def leak(self) -> "_Leak":
        return self.problem_id, self.name, self.output


_Leak = tuple[str, str, str]
"""Problem, name of the tool, and output."""


@check("leaked_by_tool", "call", needs="calls golds")
def leaked_by_tool(evidence: AuditEvidence) -> Measured:
    """Count calls whose output states the gold answer, or gives each problem its own one for the same arguments.

    The policy then learns to fetch the answer, not to compute it. A calculator puts out answers rightly, so an output
    with the gold answer alone is no case. It is one if
    - it states the gold as an answer ("the answer is 19"), while nothing that the policy wrote before has the gold, or
      speaks of an answer as code does that prints one; or
    - the episode's first call, with the same arguments in several problems, gives most of these their own gold answers:
      such an output follows from the problem, not from the arguments.

    So a tool that returns the bare answer for arguments which differ from problem to problem is taken for a calculator.
    """
    stating = set(_stating(_outputs(evidence, "stating_calls")))
    fetching = set(_fetching(_outputs(evidence, "first_calls"))) - stating
    state, fetch = _flag_leaks(evidence, stating, "stating_calls"), _flag_leaks(evidence, fetching, "first_calls")
    calls = evidence.database.count("calls")
    says = (
        f"the outputs of {state:,} of {calls:,} calls state the gold answer; those of {fetch:,} have it, "
        "although the same arguments gave other problems theirs"
    )
    return Measured(state + fetch, calls, says)


def _outputs(evidence: AuditEvidence, calls: str) -> list[_Output]:
    """Return the distinct outputs of some calls, by tool and arguments."""
    rows = evidence.database.all(
        f"""select distinct name, arguments, c.problem_id, prompt, solutions, output
        from {calls} c join (select row, prompt, solutions from trajectories) using (row) order by all"""
    )
    return [_Output(*row) for row in rows]


def _stating(outputs: Iterable[_Output]) -> Iterator[_Leak]:
    """Yield the outputs that state the gold of their problem, in words that are no fixed phrase."""
    by_words: dict[tuple[str, str], list[_Output]] = {}
    answers = list[StatedAnswer]()
    for each in outputs:
        for words, is_gold in stated(each.output, each.solutions):
            by_words.setdefault((each.problem_id, words), []).append(each)
            answers.append(StatedAnswer(words, each.problem_id, is_gold))
    for answer in leaks(answers):
        for each in by_words[answer.problem_id, answer.words]:
            if not contains_gold(each.prompt, each.solutions):
                yield each.leak


def _fetching(outputs: Iterable[_Output]) -> Iterator[_Leak]:
    """Yield the outputs of calls that give most problems their own gold, and not that of another problem, too."""
    for _, same in groupby(outputs, key=lambda each: (each.name, each.arguments)):
        by_problem = {each.problem_id: each for each in same}
        golds = list(dict.fromkeys(tuple(each.solutions) for each in by_problem.values()))
        others = dict(pairwise([*golds, golds[0]]))
        own = [
            each
            for each in by_problem.values()
            if contains_gold(each.output, each.solutions)
            and not contains_gold(each.output, others[tuple(each.solutions)])
            and not contains_gold(f"{each.prompt}\n{each.arguments}", each.solutions)
        ]
        if len(own) >= _LEAST_PROBLEMS and len(own) > MOST_PROBLEMS * len(by_problem):
            yield from (each.leak for each in own)


def _flag_leaks(evidence: AuditEvidence, leaking: Set[_Leak], calls: str) -> int:
    """Flag the calls with these outputs, among those of `calls`."""
    found = [{"problem_id": problem, "name": name, "output": output} for problem, name, output in leaking]
    query = f"""select trajectory_id, data_set,
            call_name(turn, number, name) || ' gives the gold answer away: "' || left(output, 80) || '"'
        from {calls} join found using (problem_id, name, output)"""
    return evidence.database.flag("leaked_by_tool", "call", query, found=found)
