"""Checks of problems that need the verifier or the problem sets of evaluations. `problems.sql` has the others."""

import random
import re
from collections.abc import Iterable, Sequence

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
from tasks.problems.contamination import find_overlaps
from tasks.problems.problem_set import SETTING_SQL
from tasks.problems.rows import is_placeholder
from tasks.score.verdict import Verdict
from tasks.tables.sets import Case


def contains_gold(text: str, solutions: Sequence[str]) -> bool:
    """Return whether `text` contains one of `solutions` as a whole: 112, 1.12 and -12 do not contain 12."""
    plain, *golds = (re.sub(r"(?<=\d),(?=\d{3}\b)", "", each.strip()) for each in (text, *solutions))
    return any(re.search(rf"(?<![\w.\-]){re.escape(gold)}(?!\w|\.\d)", plain) for gold in filter(None, golds))


MOST_GOLDS = 20_000
"""The most distinct gold answers that are graded, at up to a thousand a second; of more, a sample is graded."""


@check("unmatched_gold", "problem", needs="golds")
def unmatched_gold(evidence: AuditEvidence) -> Measured:
    """Let the verifier grade each distinct gold answer of its problems, presented as an answer, against itself.

    If it does not match itself, no answer can be right.
    """
    rows = evidence.database.all("from distinct_golds")
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
    selected = f"run, problem_id, prompt, solutions, '', {SETTING_SQL}"
    rows = evidence.database.all(f"select distinct {selected} from training_rows order by all")
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
