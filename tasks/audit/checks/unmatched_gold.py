"""Gold answers that the judge does not even match with themselves: nobody can be right."""

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tasks.audit.checks.registry import AuditEvidence, Measured, register_check
from tasks.audit.found import flag_found

if TYPE_CHECKING:
    from tasks.score.verifier import Verdict

_NO_ANSWER = ("n/a", "na", "nan", "null", "unknown", "todo", "tbd", "?", "-", "...")
"""What stands where somebody had no answer; math-verify matches most of these with themselves."""
MOST = 20_000
"""Distinct golds that are judged, at up to a thousand a second; of more a sample."""


def unmatched_gold(evidence: AuditEvidence) -> Measured:
    """Has the real verifier judge each distinct gold, presented as an answer, against itself."""
    problems = evidence.database.all("select problem_id, unnest(solutions) from problems order by all")
    problems += evidence.database.all("select problem_id, '' from problems where len(solutions) = 0 order by all")
    holders: dict[str, list[str]] = {}
    for name, gold in problems:
        holders.setdefault(gold, []).append(name)
    golds = _sample(sorted(holders))
    given = [gold for gold in golds if gold.strip()]
    verdicts = dict(zip(given, evidence.verifier.grade([(presented(gold), [gold]) for gold in given]), strict=True))
    bad = [(name, told) for gold in golds if (told := _complaint(gold, verdicts.get(gold))) for name in holders[gold]]
    rows = {"id": [name for name, _ in bad], "detail": [told for _, told in bad]}
    query = "select id, null::integer, detail from found"
    found = flag_found(evidence.database, "unmatched_gold", "problem", rows, query)
    looked_at = f"{len(golds):,} distinct gold answers"
    looked_at += "" if len(golds) == len(holders) else f", drawn from {len(holders):,},"
    return Measured(found, len(golds), f"of {looked_at} those of {found:,} problems do not match themselves")


def presented(gold: str) -> str:
    r"""`gold` as a policy would give it: in a box, unless it brings delimiters of its own.

    >>> presented("1/2"), presented("$x$"), presented(r"\$5")
    ('\\boxed{1/2}', '$x$', '\\boxed{\\$5}')
    """
    unescaped = gold.replace("\\$", "")
    return gold if "\\boxed" in gold or "$" in unescaped else f"\\boxed{{{gold}}}"


def _sample(golds: Sequence[str]) -> list[str]:
    return list(golds) if len(golds) <= MOST else sorted(random.Random(0).sample(golds, MOST))


def _complaint(gold: str, verdict: "Verdict | None") -> str:
    if verdict is None:
        return "its gold answer is empty"
    if gold.strip().casefold() in _NO_ANSWER:
        return f"its gold answer {gold!r} says that there is none"
    if verdict.name == "correct":
        return ""
    return f"its gold answer {gold[:80]!r}, given as an answer, is judged {verdict.name}" + (
        f": {verdict.reason[:80]}" if verdict.reason else ""
    )


register_check("unmatched_gold", "Gold answers that do not match themselves", "problem", unmatched_gold)
