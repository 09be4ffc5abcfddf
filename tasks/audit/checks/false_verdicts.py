"""Check verdicts with a second checker: right answers that are judged wrong teach the policy to avoid them."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from tasks.audit.checks.registry import AuditEvidence, Measured, register_check
from tasks.audit.results import Case
from tasks.audit.second_checker import Opinion, opinion
from tasks.evaluate.statistics import proportion

_SHOWN = 60  # characters
_LEAST = 20  # turns; fewer are too few for a share


def _contradicted(
    check: str, verdict: Literal["wrong", "correct"], contrary: Opinion, evidence: AuditEvidence
) -> Measured:
    """Judge a sample of math-verify's turns with `verdict` again, and flag those that the second checker contradicts.

    The value is the lower end of the 95 % interval of the share that the second checker contradicts. If it could judge
    too few, those that it could not judge are flagged, too.
    """
    sample = evidence.database.all(
        """select trajectory_id, version, turn, given, solutions
        from (
            select row, data_set, turn, given, trajectory_id from turns
            where verdict = ? and scorer = 'math-verify'
            order by hash(row, turn), row, turn limit ?
        ) join (select row, solutions from trajectories) using (row) join data_sets using (data_set)
        order by row, turn""",
        verdict,
        evidence.settings.judged_again,
    )
    opinions = [opinion(given, solutions) for _, _, _, given, solutions in sample]
    measured = _measured([judged for judged, _ in opinions], verdict, contrary)
    flagged = {contrary, "cannot say"} if measured.judged < evidence.settings.least_judged else {contrary}
    pairs = zip(sample, opinions, strict=True)
    evidence.database.flag_all(check, [_case(row, *judged, verdict) for row, judged in pairs if judged[0] in flagged])
    return measured


def _case(row: tuple[Any, ...], judged: Opinion, answer: str, verdict: str) -> Case:
    name, version, turn, given, solutions = row
    if judged == "cannot say":
        read = f"the second checker cannot judge {given[-_SHOWN:]!r}"
    else:
        read = f"the second checker reads {answer[:_SHOWN]!r}"
    return Case("turn", name, version, f"turn {turn + 1}: judged {verdict}; {read}, the gold is {_gold(solutions)}")


def _gold(solutions: list[str]) -> str:
    return " or ".join(repr(solution[:_SHOWN]) for solution in solutions[:3])


def _measured(opinions: list[Opinion], verdict: str, contrary: Opinion) -> Measured:
    decided: list[Opinion] = [opinion for opinion in opinions if opinion != "cannot say"]
    judged = len(decided) / len(opinions) if len(opinions) >= _LEAST else 1.0
    if not decided:
        says = f"the second checker could judge none of {len(opinions):,} turns judged {verdict}"
        return Measured(0.0, 0, says, judged)
    estimate = proportion([float(opinion == contrary) for opinion in decided])
    says = (
        f"the second checker calls {decided.count(contrary):,} of {len(decided):,} turns judged {verdict} {contrary}: "
        f"{estimate.value:.1%}, 95 % interval {estimate.low:.1%} to {estimate.high:.1%}"
    )
    if len(decided) < _LEAST:
        says += f"; fewer than {_LEAST} turns raise no alarm"
    if undecided := len(opinions) - len(decided):
        says += f"; it cannot judge {undecided:,} more"
    return Measured(estimate.low if len(decided) >= _LEAST else 0.0, len(decided), says, judged)


false_negatives: Callable[[AuditEvidence], Measured] = partial(_contradicted, "false_negatives", "wrong", "right")
false_positives: Callable[[AuditEvidence], Measured] = partial(_contradicted, "false_positives", "correct", "wrong")

register_check("false_negatives", "Right answers judged wrong", "turn", false_negatives, needs_scores=True)
register_check("false_positives", "Wrong answers judged right", "turn", false_positives, needs_scores=True)
