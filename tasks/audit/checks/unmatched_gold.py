"""Check for gold answers that the verifier does not even match with themselves: no answer can be right."""

import random
from collections.abc import Sequence

from tasks.audit.checks.registry import AuditEvidence, Measured, register_check
from tasks.audit.flag_rows import flag_rows
from tasks.problems.columns import is_placeholder
from tasks.score.verdict import Verdict

MOST = 20_000
"""The most distinct gold answers that are graded, at up to a thousand a second; of more, a sample is graded."""


def unmatched_gold(evidence: AuditEvidence) -> Measured:
    """Let the verifier grade each distinct gold answer of its problems, presented as an answer, against itself."""
    problems = evidence.database.all(
        "select problem_id, unnest(solutions) from problems where math_verify order by all"
    )
    problems += evidence.database.all(
        "select problem_id, '' from problems where math_verify and len(solutions) = 0 order by all"
    )
    ids: dict[str, list[str]] = {}
    for name, gold in problems:
        ids.setdefault(gold, []).append(name)
    golds = _sample(sorted(ids))
    answers = [gold for gold in golds if gold.strip()]
    verdicts = dict(zip(answers, evidence.verifier.grade([(presented(gold), [gold]) for gold in answers]), strict=True))
    bad = [(name, detail) for gold in golds if (detail := _complaint(gold, verdicts.get(gold))) for name in ids[gold]]
    rows = {"id": [name for name, _ in bad], "detail": [detail for _, detail in bad]}
    query = "select id, null::integer, detail from found"
    found = flag_rows(evidence.database, "unmatched_gold", "problem", rows, query)
    graded = f"{len(golds):,} distinct gold answers"
    graded += "" if len(golds) == len(ids) else f", a sample of {len(ids):,},"
    return Measured(found, len(golds), f"of {graded} those of {found:,} problems do not match themselves")


def presented(gold: str) -> str:
    r"""Write `gold` as a policy would answer: in a box, unless it already has delimiters.

    >>> presented("1/2"), presented("$x$"), presented(r"\$5")
    ('\\boxed{1/2}', '$x$', '\\boxed{\\$5}')
    """
    unescaped = gold.replace("\\$", "")
    return gold if "\\boxed" in gold or "$" in unescaped else f"\\boxed{{{gold}}}"


def _sample(golds: Sequence[str]) -> list[str]:
    return list(golds) if len(golds) <= MOST else sorted(random.Random(0).sample(golds, MOST))


def _complaint(gold: str, verdict: Verdict | None) -> str:
    if verdict is None:
        return "its gold answer is empty"
    if is_placeholder(gold):
        return f"its gold answer {gold!r} means that the answer is missing"
    if verdict.name == "correct":
        return ""
    return f"its gold answer {gold[:80]!r}, given as an answer, is judged {verdict.name}" + (
        f": {verdict.reason[:80]}" if verdict.reason else ""
    )


register_check("unmatched_gold", "Gold answers that do not match themselves", "problem", unmatched_gold)
