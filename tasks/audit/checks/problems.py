"""Checks of problems: prompts and feedback that give the answer, gold answers that match nothing, evaluation sets.

The functions for gold answers in texts that should not have them are here, too.
"""

import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from storage import layout
from storage.errors import DamagedError
from storage.grouping import grouped
from storage.logs import catalog
from storage.objects.store import Store
from storage.records import Problem
from storage.version_names import EvaluationVersion, ProblemsVersion, select
from storage.versions import manifests
from storage.versions.datasets import rows as read_rows
from tasks.audit.checks import AuditEvidence, Measured, SkippedError, check
from tasks.audit.checks.templates import create_distinct_prompts
from tasks.audit.checks.verdicts import stated
from tasks.audit.decoding import Decoders
from tasks.problems.contamination import find_overlaps
from tasks.problems.problem_set import SETTING_SQL
from tasks.problems.rows import is_placeholder
from tasks.score.verdict import Verdict
from tasks.tables.sets import Case

MOST_PROBLEMS = 0.5
"""A share of the problems. The same words about many problems may be an example or a fixed phrase. They count as a leak
only if they contain the gold answers of more than this share of the problems."""
_SHOWN = 80  # characters


@dataclass(frozen=True, slots=True)
class StatedAnswer:
    """Words that state an answer, and whether it is the gold answer.

    Example: StatedAnswer("answer is 19", "12+7", is_gold=True, run="demo", version="runs/demo/trajectories/000000")
    """

    words: str
    problem_id: str
    is_gold: bool
    run: str = ""
    version: str = ""  # of the data set


def leaks(answers: Iterable[StatedAnswer]) -> Iterator[StatedAnswer]:
    """Group stated answers by their words; yield the gold ones of a group if most of its problems have a gold one."""
    by_words: dict[tuple[str, str], dict[str, StatedAnswer]] = {}
    for answer in answers:
        by_words.setdefault((answer.run, answer.words), {})[answer.problem_id] = answer
    for by_problem in by_words.values():
        golds = [answer for answer in by_problem.values() if answer.is_gold]
        if len(golds) > MOST_PROBLEMS * len(by_problem):
            yield from golds


def contains_gold(text: str, solutions: Sequence[str]) -> bool:
    """Return whether `text` contains one of `solutions` as a whole: 112, 1.12 and -12 do not contain 12."""
    plain = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text)
    return any(
        re.search(rf"(?<![\w.\-]){re.escape(gold)}(?!\w|\.\d)", plain) is not None
        for solution in solutions
        if (gold := re.sub(r"(?<=\d),(?=\d{3}\b)", "", solution.strip()))
    )


@check("leaked_answers", "problem", needs="golds")
def leaked_answers(evidence: AuditEvidence) -> Measured:
    """Search each distinct prompt, as text and as decoded tokens, and each feedback in a problem's episodes.

    The policy would learn to copy. What tools put out is the matter of `leaked_by_tool`, because a calculator puts out
    answers rightly.
    """
    problems = evidence.database.all(
        "select problem_id, prompt, solutions from problems where not all_left_out(data_sets)"
    )
    in_texts = [
        StatedAnswer(words, name, is_gold)
        for name, prompt, solutions in problems
        for words, is_gold in stated(prompt, solutions)
    ]
    answers = (*leaks(in_texts), *leaks(_in_prompts(evidence)))
    distinct = {(answer.problem_id, answer.words): answer for answer in answers}.values()
    cases = [
        Case("problem", each.problem_id, each.version, f'its prompt states the gold answer: "{each.words[:_SHOWN]}"')
        for each in distinct
    ]
    found = evidence.database.flag_all("leaked_answers", cases)
    turns = _flag_feedback(evidence)
    says = (
        f"the prompts of {found:,} of {len(problems):,} problems state the gold answer, and the feedback after "
        f"{turns:,} turns gives it away"
    )
    return Measured(found + turns, len(problems), says)


def _in_prompts(evidence: AuditEvidence) -> Iterator[StatedAnswer]:
    """Yield the answers stated in the tokens that the policy was given; nothing if no tokenizer is left."""
    create_distinct_prompts(evidence)
    query = "select data_set, problem_id, solutions, ids from distinct_prompts order by number"
    try:
        decoders = Decoders(evidence)
    except SkippedError:
        return
    for batch in decoders.decode(evidence, query):
        for row, text in batch.columns("data_set", "problem_id", "solutions"):
            version = evidence.data_sets[row["data_set"]].version
            for words, is_gold in stated(text, row["solutions"]):
                yield StatedAnswer(words, row["problem_id"], is_gold, batch.run, version)


def _flag_feedback(evidence: AuditEvidence) -> int:
    """Flag turns whose feedback contains the gold answer, while neither the prompt nor a turn before it does."""
    by_feedback: dict[str, list[str]] = {}
    given: dict[str, int] = {}  # number of problems with the same feedback
    for name, prompt, solutions, feedback, problems in evidence.database.all("from feedback_with_gold"):
        if contains_gold(feedback, solutions) and not contains_gold(prompt, solutions):
            by_feedback.setdefault(feedback, []).append(name)
            given[feedback] = problems
    leaking = [
        (name, feedback)
        for feedback, names in by_feedback.items()
        if len(names) > MOST_PROBLEMS * given[feedback]
        for name in names
    ]
    cases = [
        Case("turn", row, version, f'the feedback after turn {turn + 1} gives the gold away: "{feedback[:_SHOWN]}"')
        for row, version, turn, feedback, solutions, written in evidence.database.all(
            _SAID_BEFORE, [name for name, _ in leaking], [feedback for _, feedback in leaking]
        )
        if not contains_gold(written, solutions)
    ]
    return evidence.database.flag_all("leaked_answers", cases)


_SAID_BEFORE = """
    select trajectory_id, version, turn, feedback, solutions,
        (select string_agg(text, chr(10)) from turns b where b.row = s.row and b.turn <= s.turn)
    from told s
    join (select unnest(?::varchar[]) as problem_id, unnest(?::varchar[]) as feedback) using (problem_id, feedback)
    join (select row, trajectory_id, data_set, solutions from trajectories) using (row)
    join (select data_set, version from data_sets) using (data_set)"""
"""SQL: the turns that got a feedback, and what the policy had said by then."""

MOST_GOLDS = 20_000
"""The most distinct gold answers that are graded, at up to a thousand a second; of more, a sample is graded."""


@check("unmatched_gold", "problem", needs="golds")
def unmatched_gold(evidence: AuditEvidence) -> Measured:
    """Let the verifier grade each distinct gold answer of its problems, presented as an answer, against itself.

    If it does not match itself, no answer can be right.
    """
    rows = evidence.database.all(
        """select problem_id, unnest(if(len(solutions) = 0, [''], solutions)) as gold from problems
        where math_verify and not all_left_out(data_sets) order by all"""
    )
    names = grouped((gold, name) for name, gold in rows)
    golds = sorted(names) if len(names) <= MOST_GOLDS else sorted(random.Random(0).sample(sorted(names), MOST_GOLDS))
    answers = [gold for gold in golds if gold.strip()]
    verdicts = dict(zip(answers, evidence.verifier.grade([(presented(gold), [gold]) for gold in answers]), strict=True))
    cases = [
        Case("problem", name, "", detail)
        for gold in golds
        if (detail := _complaint(gold, verdicts.get(gold)))
        for name in names[gold]
    ]
    found = evidence.database.flag_all("unmatched_gold", cases)
    sample = "" if len(golds) == len(names) else f", a sample of {len(names):,},"
    says = f"of {len(golds):,} distinct gold answers{sample} those of {found:,} problems do not match themselves"
    return Measured(found, len(golds), says)


def presented(gold: str) -> str:
    r"""Write `gold` as a policy would answer: in a box, unless it already has delimiters.

    >>> presented("1/2"), presented("$x$"), presented(r"\$5")
    ('\\boxed{1/2}', '$x$', '\\boxed{\\$5}')
    """
    unescaped = gold.replace("\\$", "")
    return gold if "\\boxed" in gold or "$" in unescaped else f"\\boxed{{{gold}}}"


def _complaint(gold: str, verdict: Verdict | None) -> str:
    if verdict is None:
        return "its gold answer is empty"
    if is_placeholder(gold):
        return f"its gold answer {gold!r} means that the answer is missing"
    if verdict.name == "correct":
        return ""
    reason = f": {verdict.reason[:80]}" if verdict.reason else ""
    return f"its gold answer {gold[:80]!r}, given as an answer, is judged {verdict.name}{reason}"


@check("contamination", "problem")
def contamination(evidence: AuditEvidence) -> Measured:
    """Compare the training problems of each run with the problem sets of its committed evaluations.

    The accuracy on a problem that is in both measures memory.
    """
    rows = evidence.database.all(
        f"""select distinct d.run, problem_id, prompt, solutions, '', {SETTING_SQL}
        from trajectories join data_sets d using (data_set) where not evaluation order by all"""
    )
    trained = grouped((run, Problem(*columns)) for run, *columns in rows)
    sets = _evaluation_sets(evidence.store, trained)
    if not any(sets.values()):
        raise SkippedError("no run among the data sets has both training problems and evaluations to compare them with")
    details: dict[tuple[str, str], str] = {}
    columns = ["problem_id", "prompt", "solutions", "metadata"]
    for run, names in sets.items():
        try:
            stored = {name: read_rows(evidence.store, name, evidence.cache, columns) for name in names}
            evaluated = {name: [Problem(**row) for row in rows] for name, rows in stored.items()}
        except DamagedError as error:
            raise SkippedError(f"an evaluation set cannot be read: {error}") from error
        for overlap in find_overlaps(trained[run], evaluated):
            match = f"{overlap.other_id} of {overlap.set_name}, which {run} is evaluated on"
            details[run, overlap.problem_id] = f'is {match} ({overlap.kind}): "{overlap.shared}"'
    cases = [Case("problem", problem, "", detail) for (_, problem), detail in details.items()]
    found = evidence.database.flag_all("contamination", cases)
    problems = sum(len(trained[run]) for run, names in sets.items() if names)
    compared = ", ".join(sorted({name for names in sets.values() for name in names}))
    return Measured(found, problems, f"{found:,} of {problems:,} training problems are also in {compared}")


def _evaluation_sets(store: Store, runs: Iterable[str]) -> dict[str, list[str]]:
    """Return for each run the problem sets that its policies were evaluated on and that gc has not collected.

    Evaluations that were never committed are left out, and those with a damaged manifest, which `storage verify`
    reports.
    """
    sets: dict[str, list[str]] = {run: [] for run in runs}
    for entry in catalog.read_all(store):
        run = layout.run_of(entry.version)
        if entry.kind == "evaluation" and run in sets:
            try:
                manifest = manifests.find(store, EvaluationVersion(entry.version))
            except DamagedError:
                continue
            for name in select(ProblemsVersion, manifest.parent_names) if manifest else ():
                if name not in sets[run] and not store.exists(layout.tombstone(name)):
                    sets[run].append(name)
    return sets
